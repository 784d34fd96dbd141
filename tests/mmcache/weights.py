"""Tiny checkpoint folders with random weights, in the original naming."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from encoder.config import EncoderConfig
from encoder.moonvit import MoonViT

CONFIG = EncoderConfig(
    hidden_size=48, num_layers=2, num_heads=4, mlp_size=64, text_width=32, pos_height=16, pos_width=16
)


def random_tensors(seed: int, config: EncoderConfig = CONFIG) -> dict[str, torch.Tensor]:
    """Every vision tensor of a model, none zero or one."""
    with torch.device("meta"):
        model = MoonViT(config)
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return {name: torch.rand(shape, generator=generator) * 0.4 - 0.15 for name, shape in sorted(shapes.items())}


def settings_of(config: EncoderConfig) -> dict[str, Any]:
    """`config.json` of a model."""
    vision = {
        "vt_hidden_size": config.hidden_size,
        "vt_num_hidden_layers": config.num_layers,
        "vt_num_attention_heads": config.num_heads,
        "vt_intermediate_size": config.mlp_size,
        "init_pos_emb_height": config.pos_height,
        "init_pos_emb_width": config.pos_width,
        "init_pos_emb_time": config.pos_time,
        "mm_hidden_size": config.hidden_size,
        "text_hidden_size": config.text_width,
        "projector_ln_eps": config.projector_layer_norm_eps,
    }
    return {"model_type": "kimi_k25", "vision_config": vision}


def write_checkpoint(
    folder: Path,
    seed: int,
    config: EncoderConfig = CONFIG,
    *,
    num_shards: int = 1,
    processor: Mapping[str, Any] | None = None,
) -> Path:
    """Write a folder, or write it anew in place."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    tensors = random_tensors(seed, config)
    files = {name: f"model-{index % num_shards}.safetensors" for index, name in enumerate(tensors)}
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        for file in set(files.values()):
            save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps(settings_of(config)))
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": processor}))
    return folder
