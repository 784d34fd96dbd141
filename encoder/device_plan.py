"""What the preprocessing kernels are told, made from sizes alone and remembered: see `encoder.device_preprocess`."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from encoder.config import ProcessorConfig
from encoder.errors import ImageError
from encoder.kernels.resize_plan import MAX_FRAME_BYTES, FrameFields, line
from encoder.kernels.resize_tables import resize_table
from encoder.sizing import Grid, grid_thw, resized_size

MAX_SIZES: Final = 4096
MAX_TABLE_BYTES: Final = 64 << 20
MAX_MIXES: Final = 256
"""How much is remembered: sizes and their tables, the latest used; batches of the same sizes in the same order."""

Integers: TypeAlias = npt.NDArray[np.int64]
Upload: TypeAlias = Callable[[npt.NDArray[np.int32]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Pixels and warps of one program, as powers of two, and which frames are resized without scratch.

    `across_warps`: of the first launch. `resized_warps`, `num_warps`: of the last, with and without resized frames.
    On an H200 more warps make resizing faster, four images of 3840 x 2160 by a tenth, and copying slower.

    A frame of at most `max_fused_pixels` source pixels takes its horizontal pass anew for every row of its windows:
    more arithmetic, one launch less if all frames of a batch are such.
    """

    across_rows: int = 4
    across_columns: int = 128
    finish_rows: int = 4
    finish_columns: int = 128
    num_warps: int = 4
    across_warps: int = 8
    resized_warps: int = 8
    max_fused_pixels: int = 0


@dataclass(frozen=True, slots=True)
class ItemSize:
    """All about items of one shape. `frame` has the fields of each of its frames that no batch changes."""

    grid: Grid
    frame: FrameFields
    tables: torch.Tensor | None
    across_tiles: int
    finish_tiles: int
    scratch_words: int

    @property
    def is_fused(self) -> bool:
        """Whether the last launch does the horizontal pass too."""
        return self.frame.across_taps > 0 and not self.scratch_words

    @property
    def table_bytes(self) -> int:
        """Memory of the device that remembering this takes."""
        return 0 if self.tables is None else self.tables.nbytes


class Mix:
    """The plan of a batch but for its addresses, which differ from call to call."""

    def __init__(self, sizes: Sequence[ItemSize]) -> None:
        """`sizes` are those of the items, one or more, in order."""
        frames = [size for size in sizes for _ in range(size.grid[0])]
        self.sizes = tuple(sizes)
        self.num_frames = len(frames)
        self.is_fused = any(size.is_fused for size in sizes)
        self.is_resized = any(size.frame.across_taps or size.frame.down_taps for size in sizes)
        plan = np.array([size.frame for size in frames], np.int64).T.copy()
        patches = plan[line("grid_width")] * plan[line("grid_height")]
        plan[line("first_patch")], self.num_patches = _starts(patches)
        plan[line("first_finish_tile")], self.finish_tiles = _starts([size.finish_tiles for size in frames])
        plan[line("first_across_tile")], self.across_tiles = _starts([size.across_tiles for size in frames])
        words = np.array([size.scratch_words for size in frames])
        starts, self.scratch_words = _starts(words)
        self._plan = plan
        self._has_scratch = (words > 0).astype(np.int64)
        plan[line("scratch")] = 4 * starts * self._has_scratch

    def plan(self, sources: Sequence[int], scratch: int) -> Integers:
        """Return the plan `[fields, frames]` for frames at these addresses and scratch at that one."""
        plan = self._plan.copy()
        plan[line("source")] = sources
        if scratch:
            plan[line("scratch")] += scratch * self._has_scratch
        return plan


class PlanCache:
    """Sizes and mixes of one processor on one device."""

    def __init__(self, processor: ProcessorConfig, tiling: Tiling, upload: Upload) -> None:
        """`upload` returns a copy of an array on the device."""
        self._processor = processor
        self._tiling = tiling
        self._upload = upload
        self._sizes: OrderedDict[torch.Size, ItemSize] = OrderedDict()
        self._mixes: OrderedDict[tuple[torch.Size, ...], Mix] = OrderedDict()
        self._table_bytes = 0

    def mix(self, shapes: tuple[torch.Size, ...]) -> Mix:
        """Return the plan of items of these shapes. Raises `ImageError` if one is not of an image or a chunk."""
        known = self._mixes.get(shapes)
        if known is not None:
            self._mixes.move_to_end(shapes)
            return known
        made = Mix([self._size(shape) for shape in shapes])
        if not self._forget_sizes():
            self._mixes[shapes] = made
        while len(self._mixes) > MAX_MIXES:
            self._mixes.popitem(last=False)
        return made

    def _forget_sizes(self) -> bool:
        """Keep within bounds; return whether that took anything. Mixes hold tables too, so they go with the sizes."""
        forgotten = False
        while len(self._sizes) > MAX_SIZES or self._table_bytes > MAX_TABLE_BYTES:
            self._table_bytes -= self._sizes.popitem(last=False)[1].table_bytes
            self._mixes.clear()
            forgotten = True
        return forgotten

    def _size(self, shape: torch.Size) -> ItemSize:
        known = self._sizes.get(shape)
        if known is None:
            known = self._sizes[shape] = self._new_size(shape)
            self._table_bytes += known.table_bytes
        self._sizes.move_to_end(shape)
        return known

    def _new_size(self, shape: torch.Size) -> ItemSize:
        if len(shape) not in (3, 4) or shape[-1] != 3 or not shape[0]:
            raise ImageError(f"pixels must be [height, width, 3], or [frames, height, width, 3], got {list(shape)}")
        height, width, _ = shape[-3:]
        num_frames = shape[0] if len(shape) == 4 else 0
        new_width, new_height = resized_size(width, height, self._processor, num_frames)
        grid = grid_thw(width, height, self._processor, num_frames)
        padded_height, padded_width = (side * self._processor.patch_size for side in grid[1:])
        if 3 * max(width * height, padded_width * padded_height) > MAX_FRAME_BYTES:
            raise ImageError(f"a frame of {width}x{height} pixels: at most {MAX_FRAME_BYTES} bytes, padded too")
        tables, (across, across_taps), (down, down_taps) = self._tables((width, new_width), (height, new_height))
        frame = FrameFields(
            width=width,
            height=height,
            new_width=new_width,
            new_height=new_height,
            grid_width=grid[2],
            grid_height=grid[1],
            across_table=across,
            across_taps=across_taps,
            down_table=down,
            down_taps=down_taps,
        )
        tiling = self._tiling
        uses_scratch = across_taps > 0 and width * height > tiling.max_fused_pixels
        return ItemSize(
            grid,
            frame,
            tables,
            across_tiles=uses_scratch * _tiles(height, tiling.across_rows, new_width, tiling.across_columns),
            finish_tiles=_tiles(padded_height, tiling.finish_rows, padded_width, tiling.finish_columns),
            scratch_words=uses_scratch * height * new_width,
        )

    def _tables(self, *sides: tuple[int, int]) -> tuple[torch.Tensor | None, tuple[int, int], tuple[int, int]]:
        """Tables on the device, and of each side the address and taps of its own; zeros for one that stays."""
        made = [resize_table(*side) if side[0] != side[1] else (np.empty(0, np.int32), 0) for side in sides]
        (first, first_taps), (second, second_taps) = made
        if not first_taps and not second_taps:
            return None, (0, 0), (0, 0)
        tables = self._upload(np.concatenate([first.reshape(-1), second.reshape(-1)]))
        start = tables.data_ptr()
        return tables, (start, first_taps), (start + first.nbytes, second_taps)


def _starts(lengths: Sequence[int] | Integers) -> tuple[Integers, int]:
    """Where each begins if they lie end to end, and where the last ends."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return ends - lengths, int(ends[-1])


def _tiles(height: int, tile_height: int, width: int, tile_width: int) -> int:
    return -(-height // tile_height) * -(-width // tile_width)
