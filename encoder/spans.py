"""Which rows of a packed batch belong to which item, as host ints and as one small tensor on the device.

The table replaces per-patch metadata: kernels find a row's item and place by themselves, so a batch of any size
costs one copy of a few hundred integers, and a captured graph is told its batch by that copy alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import torch

from encoder.config import EncoderConfig
from encoder.packing import check_grid
from encoder.sizing import Grid, num_patches, num_tokens

TILE_ROWS: Final = 128
"""Rows of one item that are queries of one program, where the kernel divides the work by a list."""
NUM_FILLERS: Final = 8
"""Spans among which padding rows are shared out: attention over them grows with the square of a span."""
TABLE_ROWS: Final = 5


@dataclass(frozen=True, slots=True)
class Spans:
    """The items of a packed batch, and after them spans of padding that no embedding comes from.

    `cu_seqlens` and `cu_tokens` are host ints, in patches (with the padding) and in tokens (without); `num_tokens` are
    those with the padding. On the device, int32, one after the other in `words`: `table`, `[5, slots + 1]`, whose rows
    are the same in patches, the same in merged rows, then frames, height and width of each span; and `tiles`, `[n, 2]`,
    every run of `TILE_ROWS` queries as span and first row, longest span first, -1 where there is none.
    """

    cu_seqlens: tuple[int, ...]
    cu_tokens: tuple[int, ...]
    max_seqlen: int
    num_tokens: int
    words: torch.Tensor
    table: torch.Tensor
    tiles: torch.Tensor

    @property
    def cu_seqlens_device(self) -> torch.Tensor:
        """The first row of the table, contiguous."""
        return self.table[0]

    @property
    def num_patches(self) -> int:
        """Rows of the packed batch, padding included."""
        return self.cu_seqlens[-1]


@dataclass(frozen=True, slots=True)
class SpansShape:
    """The sizes of what `Spans` has on a device; a batch can be padded to any that is at least its own."""

    num_patches: int
    num_tokens: int
    num_slots: int
    num_tiles: int
    max_seqlen: int


def exact_shape(grids: Sequence[Grid], config: EncoderConfig) -> SpansShape:
    """Return the shape of a batch that is not padded."""
    lengths = [num_patches(grid) for grid in grids]
    tokens = sum(num_tokens(grid, config.merge_size) for grid in grids)
    tiles = sum(-(-length // TILE_ROWS) for length in lengths)
    return SpansShape(sum(lengths), tokens, len(lengths), tiles, max(lengths))


def plan_spans(
    grids: Sequence[Grid], config: EncoderConfig, device: torch.device, shape: SpansShape | None = None
) -> Spans:
    """Plan a packed batch, padded to `shape` if one is given, with one copy to the device and no wait.

    Raises `ImageError` naming the first grid that the model cannot take.
    """
    for grid in grids:
        check_grid(grid, config)
    own = exact_shape(grids, config)
    shape = shape or own
    assert _fits(own, shape), "a batch is padded to a shape that has room for it"
    rows = [*grids, *_fillers(shape.num_patches - own.num_patches, shape.num_slots - own.num_slots)]
    cu_seqlens = tuple(accumulate((num_patches(row) for row in rows), initial=0))
    cu_tokens = tuple(accumulate((num_tokens(grid, config.merge_size) for grid in grids), initial=0))
    merged = [tokens * config.merge_size**2 for tokens in cu_tokens]
    merged += merged[-1:] * (len(rows) - len(grids))
    sides = [[*(row[axis] for row in rows), 1] for axis in range(3)]
    tiles = _tiles(cu_seqlens)
    tiles += [(-1, 0)] * (shape.num_tiles - len(tiles))
    columns = [*cu_seqlens, *merged, *(n for side in sides for n in side)]
    words = _upload([*columns, *(word for tile in tiles for word in tile)], device)
    return Spans(
        cu_seqlens=cu_seqlens,
        cu_tokens=cu_tokens,
        max_seqlen=shape.max_seqlen,
        num_tokens=shape.num_tokens,
        words=words,
        table=words[: len(columns)].view(TABLE_ROWS, -1),
        tiles=words[len(columns) :].view(-1, 2),
    )


def _fits(own: SpansShape, shape: SpansShape) -> bool:
    padding = shape.num_patches - own.num_patches
    spare = shape.num_slots - own.num_slots
    return (
        padding >= 0
        and shape.num_tokens >= own.num_tokens
        and spare >= min(padding, 1)
        and shape.max_seqlen >= max(own.max_seqlen, -(-padding // max(1, min(spare, NUM_FILLERS))))
        and shape.num_tiles >= own.num_tiles + padding // TILE_ROWS + min(spare, NUM_FILLERS, padding)
    )


def _fillers(padding: int, slots: int) -> list[Grid]:
    """Spans of one row of patches each that share the padding; those that get none are empty."""
    num = min(slots, NUM_FILLERS)
    shares = [padding // num + (index < padding % num) for index in range(num)]
    return [(1, 1, share) for share in [*shares, *[0] * (slots - num)]]


def _tiles(cu_seqlens: Sequence[int]) -> list[tuple[int, int]]:
    spans = sorted(enumerate(pairwise(cu_seqlens)), key=lambda span: span[1][0] - span[1][1])
    return [(index, row) for index, (start, end) in spans for row in range(start, end, TILE_ROWS)]


def _upload(values: list[int], device: torch.device) -> torch.Tensor:
    words = torch.tensor(values, dtype=torch.int32)
    if device.type == "cuda":
        words = words.pin_memory()
    return words.to(device, non_blocking=True)
