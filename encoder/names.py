"""Spellings of the vision tensors' names: the original checkpoint's and the two that transformers writes.

Every spelling is turned into the original's by rules tried in order. One rule more, and another spelling is known.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

_BLOCK: Final = r"vision_tower\.layers\.(\d+)\."
_RENAMES: Final = (
    (r"vision_tower\.encoder\.patch_embed\.", r"vision_tower.patch_embed."),
    (r"vision_tower\.patch_embed\.pos_emb\.position_embeddings$", r"vision_tower.patch_embed.pos_emb.weight"),
    (r"vision_tower\.final_layernorm\.", r"vision_tower.encoder.final_layernorm."),
    (_BLOCK + r"norm1\.", r"vision_tower.encoder.blocks.\1.norm0."),
    (_BLOCK + r"norm2\.", r"vision_tower.encoder.blocks.\1.norm1."),
    (_BLOCK + r"attn\.proj\.", r"vision_tower.encoder.blocks.\1.wo."),
    (_BLOCK + r"mlp\.fc1\.", r"vision_tower.encoder.blocks.\1.mlp.fc0."),
    (_BLOCK + r"mlp\.fc2\.", r"vision_tower.encoder.blocks.\1.mlp.fc1."),
    (r"mm_projector\.(in_proj|linear_1)\.", r"mm_projector.proj.0."),
    (r"mm_projector\.(out_proj|linear_2)\.", r"mm_projector.proj.2."),
)
_SEPARATE: Final = re.compile(_BLOCK + r"attn\.([qkv])_proj\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stored tensor goes: a whole parameter, or the rows of `q`, `k` or `v` in the fused one."""

    parameter: str
    part: str = ""

    @property
    def label(self) -> str:
        """What to call it in a message."""
        return f"{self.parameter} ({self.part})" if self.part else self.parameter

    def shape(self, parameter_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that the stored tensor must have."""
        rows, *rest = parameter_shape
        return (rows // 3 if self.part else rows, *rest)

    def fill(self, parameter: torch.Tensor, read_into: Callable[[torch.Tensor], None], num_heads: int) -> None:
        """Have a stored tensor of that shape read into its place.

        `read_into` fills a contiguous tensor of that shape. Separate q and k hold each head's rows for a rotation of
        halves: (i, i + half) turn together. Here adjacent rows do, so the two halves are interleaved.
        """
        rows = parameter.chunk(3)["qkv".index(self.part)] if self.part else parameter
        if self.part in ("q", "k"):
            stored = torch.empty_like(rows)
            read_into(stored)
            rows.copy_(stored.view(num_heads, 2, -1, *stored.shape[1:]).transpose(1, 2).flatten(0, 2))
        else:
            read_into(rows)


def place(name: str) -> Place | None:
    """Return where a stored tensor goes, or None if it is not of the vision tower or projector.

    An unknown name keeps itself as its place, which no parameter has.
    """
    name = name.removeprefix("model.")
    if not name.startswith(("vision_tower.", "mm_projector.")):
        return None
    if match := _SEPARATE.fullmatch(name):
        layer, part, kind = match.groups()
        return Place(f"vision_tower.encoder.blocks.{layer}.wqkv.{kind}", part)
    for pattern, original in _RENAMES:
        name = re.sub("^" + pattern, original, name)
    return Place(name)
