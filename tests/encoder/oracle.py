"""The reference implementation, small, with every parameter random: default initialisation hides mistakes."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

from encoder.moonvit import MoonViT
from encoder.sizing import Grid, num_patches, num_tokens

TEXT_WIDTH = 40
TEXT_CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": TEXT_WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": 512,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
VISION_CONFIG = {
    "hidden_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 100,
    "pos_emb_height": 16,
    "pos_emb_width": 16,
}


def build_oracle(seed: int = 0, **vision: int) -> Kimi_K25ForConditionalGeneration:
    """Return a small model whose vision parameters are all drawn at random, biases and LayerNorms too."""
    vision_config = {**VISION_CONFIG, **vision}
    config = Kimi_K25Config(
        vision_config=vision_config,
        text_config=TEXT_CONFIG,
        projection_hidden_size=vision_config["hidden_size"],
        projection_layer_norm_eps=1e-3,
        image_token_id=60,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
    )
    model = Kimi_K25ForConditionalGeneration(config).eval()
    model.set_attn_implementation("sdpa")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in vision_parameters(model):
        parameter.data = _draw(name, parameter.shape, generator)
    return model


def vision_parameters(model: Kimi_K25ForConditionalGeneration) -> list[tuple[str, torch.nn.Parameter]]:
    parts = ("model.vision_tower.", "model.mm_projector.")
    return [(name, parameter) for name, parameter in model.named_parameters() if name.startswith(parts)]


def save(model: Kimi_K25ForConditionalGeneration, folder: Path, **options: object) -> Path:
    model.save_pretrained(folder, **options)
    return folder


@torch.no_grad()
def oracle_embeddings(
    model: Kimi_K25ForConditionalGeneration, patches: torch.Tensor, grids: Sequence[Grid]
) -> list[torch.Tensor]:
    """Return the embeddings of packed patch rows `[T, 3, 14, 14]`, one `[num_tokens, TEXT_WIDTH]` an item.

    Items of as many frames are packed together: transformers 5.17 cannot pack others.
    """
    items = patches.split([num_patches(grid) for grid in grids])
    embeddings: dict[int, torch.Tensor] = {}
    for time in {time for time, _, _ in grids}:
        indices = [index for index, grid in enumerate(grids) if grid[0] == time]
        grid_thw = torch.tensor([grids[index] for index in indices], device=patches.device)
        pack = torch.cat([items[index] for index in indices])
        pooled = model.model.vision_tower(pack, grid_thw=grid_thw).pooler_output
        rows = model.model.mm_projector(pooled).squeeze(1)
        sizes = [num_tokens(grids[index], 2) for index in indices]
        embeddings |= dict(zip(indices, rows.split(sizes), strict=True))
    return [embeddings[index] for index in range(len(grids))]


def random_patches(grids: Sequence[Grid], seed: int = 1) -> torch.Tensor:
    """Return packed patch rows `[T, 3, 14, 14]` from -1 to 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(sum(map(num_patches, grids)), 3, 14, 14, generator=generator) * 2 - 1


def embed(model: MoonViT, patches: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
    """Return our own embeddings of packed patch rows, in the rows' dtype."""
    width = model.config.text_width
    options = {"dtype": patches.dtype, "device": patches.device}
    outs = [torch.full((num_tokens(grid, 2), width), torch.nan, **options) for grid in grids]
    model(patches.flatten(1), grids, outs)
    return outs


def round_vision(model: Kimi_K25ForConditionalGeneration) -> Kimi_K25ForConditionalGeneration:
    """Round the vision parameters to bfloat16, keeping their dtype."""
    for _, parameter in vision_parameters(model):
        parameter.data = parameter.data.bfloat16().to(parameter.dtype)
    return model


def min_cosine(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the smallest cosine between two tensors' rows."""
    return float(torch.nn.functional.cosine_similarity(ours.double(), theirs.double(), dim=1).min())


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    draw = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return draw * 0.3
    if draw.ndim == 1:
        return 1.0 + 0.3 * draw
    if name.endswith("position_embeddings"):
        return draw
    return draw / draw[0].numel() ** 0.5
