"""What a packed forward needs to know about its batch, made once from host ints; nothing here reads a device.

Shape suffixes: T patches of all items, c pairs of one head (half its width), K taps of the position table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch

from encoder.config import EncoderConfig
from encoder.errors import ImageError
from encoder.sizing import Grid, num_patches, num_tokens

KEYS_CUBIC: Final = -0.75
"""Parameter of the cubic kernel with which position tables are resampled."""


@dataclass(frozen=True, slots=True)
class PackPlan:
    """Metadata of one packed batch, on the encoder's device unless said otherwise.

    Items lie end to end; inside an item frames follow each other, each in raster order. `cu_seqlens` and `cu_tokens`
    are host ints from 0, in patches and in tokens. `rotation` is complex `[T, c]`: the turn of every pair of a head.
    `tap_index` and `tap_weight`, `[T, K]`, say which rows of the flattened position table make each patch's position
    and with what weight; `frame`, `[T]`, picks the row of the time table (0: none). `merge_order`, `[T]`, lists each
    item's patches frame by frame and within a frame token by token.
    """

    grids: tuple[Grid, ...]
    cu_seqlens: tuple[int, ...]
    cu_tokens: tuple[int, ...]
    rotation: torch.Tensor
    tap_index: torch.Tensor
    tap_weight: torch.Tensor
    frame: torch.Tensor
    merge_order: torch.Tensor

    @property
    def has_frames(self) -> bool:
        """Whether any item has more than one frame."""
        return any(time > 1 for time, _, _ in self.grids)


@dataclass(frozen=True, slots=True)
class _GridPlan:
    rotation: torch.Tensor
    tap_index: torch.Tensor
    tap_weight: torch.Tensor
    frame: torch.Tensor
    merge_order: torch.Tensor


def plan_pack(grids: Sequence[Grid], config: EncoderConfig, device: torch.device) -> PackPlan:
    """Plan a packed forward over items of these grids; equal grids are computed once.

    Raises `ImageError` naming the first grid that the model cannot take.
    """
    for grid in grids:
        check_grid(grid, config)
    unique = {grid: _plan_grid(grid, config) for grid in dict.fromkeys(grids)}
    plans = [unique[grid] for grid in grids]
    cu_seqlens = tuple(accumulate((num_patches(grid) for grid in grids), initial=0))
    merge_order = [plan.merge_order + start for plan, start in zip(plans, cu_seqlens, strict=False)]
    return PackPlan(
        grids=tuple(grids),
        cu_seqlens=cu_seqlens,
        cu_tokens=tuple(accumulate((num_tokens(grid, config.merge_size) for grid in grids), initial=0)),
        rotation=_join([plan.rotation for plan in plans], device),
        tap_index=_join([plan.tap_index for plan in plans], device),
        tap_weight=_join([plan.tap_weight for plan in plans], device),
        frame=_join([plan.frame for plan in plans], device),
        merge_order=_join(merge_order, device),
    )


def check_grid(grid: Grid, config: EncoderConfig) -> None:
    """Raise `ImageError` unless the model can take a grid: its frames, and sides that can be merged."""
    time, height, width = grid
    if not 1 <= time <= config.pos_time:
        raise ImageError(f"grid {grid}: {time} frames, the model takes 1 to {config.pos_time}")
    if height < 1 or width < 1 or height % config.merge_size or width % config.merge_size:
        raise ImageError(f"grid {grid}: height and width must be positive multiples of {config.merge_size}")


def _join(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(device, non_blocking=True)


def _plan_grid(grid: Grid, config: EncoderConfig) -> _GridPlan:
    time, height, width = grid
    tap_index, tap_weight = _position_taps(height, width, config)
    return _GridPlan(
        rotation=_rotation(height, width, config).repeat(time, 1),
        tap_index=tap_index.repeat(time, 1),
        tap_weight=tap_weight.repeat(time, 1),
        frame=(torch.arange(time) + (time > 1)).repeat_interleave(height * width),
        merge_order=_merge_order(grid, config.merge_size),
    )


def _rotation(height: int, width: int, config: EncoderConfig) -> torch.Tensor:
    """Turns of one frame's pairs: even pairs by x, odd pairs by y, one frequency for both neighbours."""
    half = config.head_dim // 2
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
    x = (torch.arange(width)[:, None] * frequencies).expand(height, width, -1)
    y = (torch.arange(height)[:, None] * frequencies)[:, None].expand(height, width, -1)
    angles = torch.stack((x, y), dim=-1).reshape(height * width, half)
    return torch.complex(angles.cos(), angles.sin())


def _position_taps(height: int, width: int, config: EncoderConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the flattened position table and their weights, both `[height * width, 16]`."""
    row_index, row_weight = _axis_taps(height, config.pos_height)
    column_index, column_weight = _axis_taps(width, config.pos_width)
    index = row_index[:, None, :, None] * config.pos_width + column_index[None, :, None, :]
    weight = row_weight[:, None, :, None] * column_weight[None, :, None, :]
    return index.reshape(height * width, 16), weight.reshape(height * width, 16)


def _axis_taps(size: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bicubic resampling of a table's side to `size` points, half-pixel centres, edges repeated: `[size, 4]` each."""
    source = (torch.arange(size, dtype=torch.float32) + 0.5) * side / size - 0.5
    first = source.floor()
    offsets = torch.arange(-1, 3)
    distance = (source[:, None] - first[:, None] - offsets).abs()
    a = KEYS_CUBIC
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = a * (((distance - 5) * distance + 8) * distance - 4)
    index = (first.long()[:, None] + offsets).clamp(0, side - 1)
    return index, torch.where(distance <= 1, near, far)


def _merge_order(grid: Grid, merge: int) -> torch.Tensor:
    time, height, width = grid
    order = torch.arange(time * height * width).view(time, height // merge, merge, width // merge, merge)
    return order.transpose(2, 3).flatten()
