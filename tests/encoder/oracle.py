"""The reference implementation, small, with every parameter random: default initialisation hides mistakes."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

from encoder.sizing import Grid, num_tokens

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
    """Return the embeddings of packed patch rows `[T, 3, 14, 14]`, one `[num_tokens, TEXT_WIDTH]` an item."""
    pooled = model.model.vision_tower(patches, grid_thw=torch.tensor(grids)).pooler_output
    rows = model.model.mm_projector(pooled).squeeze(1)
    return list(rows.split([num_tokens(grid, 2) for grid in grids]))


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
