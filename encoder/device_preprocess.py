"""Pixels to normalised patch rows on the device: a whole batch of any mix of sizes in one launch, or two.

The same integers as `encoder.preprocess`, which is Pillow's 8-bit bicubic, so the same bytes: horizontally, rounded
to uint8, then vertically. Only what a frame needs is done: one whose size stays is normalised and cut into patches by
the last launch alone. Needs Triton, which CUDA builds of torch bring.
"""

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

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
"""What is remembered of sizes seen before, the latest used first."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Pixels of one program, as powers of two, and which frames are resized without scratch.

    A frame of at most `max_fused_pixels` source pixels takes its horizontal pass anew for every row of its windows:
    more arithmetic, one launch less if all frames of a batch are such.
    """

    across_rows: int = 4
    across_columns: int = 128
    finish_rows: int = 4
    finish_columns: int = 128
    num_warps: int = 4
    max_fused_pixels: int = 0


@dataclass(frozen=True, slots=True)
class _Size:
    """All about frames of one size that does not change from batch to batch."""

    grid: Grid
    fields: npt.NDArray[np.int64]
    tables: torch.Tensor | None
    across_tiles: int
    finish_tiles: int
    scratch_words: int
    is_fused: bool

    @property
    def table_bytes(self) -> int:
        return 0 if self.tables is None else self.tables.nbytes


class DevicePreprocessor:
    """Makes patch rows on one device, all on one stream: the one that is current. Not for several threads at once."""

    def __init__(
        self, processor: ProcessorConfig, device: torch.device, dtype: torch.dtype, tiling: Tiling | None = None
    ) -> None:
        """Rows will have `dtype`: float32, bfloat16 or float16. Raises `ImportError` where Triton is missing."""
        from encoder.kernels.resize_across import resize_across
        from encoder.kernels.resize_finish import resize_finish

        self._processor = processor
        self._device = device
        self._dtype = dtype
        self._tiling = tiling or Tiling()
        self._across = resize_across
        self._finish = resize_finish
        levels = torch.tensor([*processor.image_mean, *processor.image_std], dtype=torch.float32) * 255.0
        self._channels = levels.to(device)
        self._sizes: OrderedDict[torch.Size, _Size] = OrderedDict()
        self._table_bytes = 0

    def rows(
        self, items: Sequence[torch.Tensor], grids: Sequence[Grid], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the patch rows `[num_patches, 3 * patch * patch]` of all items, end to end.

        An item is uint8 and contiguous on the device, at any address: an image `[height, width, 3]`, or a chunk
        `[frames, height, width, 3]`; `grids` are those of `encoder.sizing.grid_thw`. Items are read by work on the
        current stream, without waiting for it. Given `out` of the rows' shape, contiguous, it is written and
        returned; otherwise the caller owns a new tensor. Raises `ImageError` before any work if an item, a grid or
        `out` does not fit.
        """
        if len(items) != len(grids):
            raise ImageError(f"{len(items)} items need as many grids, got {len(grids)}")
        sizes: list[_Size] = []
        addresses: list[int] = []
        for item, grid in zip(items, grids, strict=True):
            size = self._size(item)
            if size.grid != grid:
                raise ImageError(f"pixels of shape {list(item.shape)} have the grid {size.grid}, got {grid}")
            frame_bytes = item.numel() // grid[0]
            start = item.data_ptr()
            sizes += [size] * grid[0]
            addresses += range(start, start + grid[0] * frame_bytes, frame_bytes)
        out = self._output(sum(t * h * w for t, h, w in grids), out)
        if sizes:
            with self._on_device():
                self._launch(sizes, addresses, out)
        return out

    def _launch(self, sizes: list[_Size], addresses: list[int], out: torch.Tensor) -> None:
        plan = np.array([size.fields for size in sizes]).T.copy()
        plan[line("source")] = addresses
        num_patches = plan[line("grid_width")] * plan[line("grid_height")]
        plan[line("first_patch")], _ = _starts(num_patches)
        plan[line("first_finish_tile")], finish_tiles = _starts([size.finish_tiles for size in sizes])
        plan[line("first_across_tile")], across_tiles = _starts([size.across_tiles for size in sizes])
        scratch = self._scratch(sizes, plan) if across_tiles else None
        on_device = self._upload(plan)
        tiling = self._tiling
        if scratch is not None:
            self._across[(across_tiles,)](
                on_device, len(sizes), tiling.across_rows, tiling.across_columns, num_warps=tiling.num_warps
            )
        patch = self._processor.patch_size
        self._finish[(finish_tiles,)](
            on_device,
            len(sizes),
            self._channels,
            out,
            patch,
            tiling.finish_rows,
            tiling.finish_columns,
            any(size.is_fused for size in sizes),
            num_warps=tiling.num_warps,
        )

    def _scratch(self, sizes: list[_Size], plan: npt.NDArray[np.int64]) -> torch.Tensor:
        """Room for what the first launch makes, whose addresses enter the plan."""
        words = np.array([size.scratch_words for size in sizes])
        starts, num_words = _starts(words)
        scratch = torch.empty(num_words, dtype=torch.int32, device=self._device)
        plan[line("scratch")] = np.where(words > 0, scratch.data_ptr() + 4 * starts, 0)
        return scratch

    def _size(self, item: torch.Tensor) -> _Size:
        if item.dtype != torch.uint8 or item.device != self._device or not item.is_contiguous():
            raise ImageError(
                f"pixels must be contiguous uint8 on {self._device}, got {item.dtype} {list(item.shape)} "
                f"with strides {item.stride()} on {item.device}"
            )
        shape = item.shape
        known = self._sizes.get(shape)
        if known is None:
            known = self._sizes[shape] = self._new_size(shape)
            self._table_bytes += known.table_bytes
            while len(self._sizes) > MAX_SIZES or self._table_bytes > MAX_TABLE_BYTES:
                self._table_bytes -= self._sizes.popitem(last=False)[1].table_bytes
        elif known.tables is not None:
            self._sizes.move_to_end(shape)
        return known

    def _new_size(self, shape: torch.Size) -> _Size:
        if len(shape) not in (3, 4) or shape[-1] != 3 or not shape[0]:
            raise ImageError(f"pixels must be [height, width, 3], or [frames, height, width, 3], got {list(shape)}")
        height, width, _ = shape[-3:]
        num_frames = shape[0] if len(shape) == 4 else 0
        new_width, new_height = resized_size(width, height, self._processor, num_frames)
        grid = grid_thw(width, height, self._processor, num_frames)
        patch, tiling = self._processor.patch_size, self._tiling
        if max(3 * width * height, 3 * (patch * grid[1]) * (patch * grid[2])) > MAX_FRAME_BYTES:
            raise ImageError(f"a frame of {width}x{height} pixels: at most {MAX_FRAME_BYTES} bytes, padded too")
        tables, (across, across_taps), (down, down_taps) = self._tables((width, new_width), (height, new_height))
        uses_scratch = across_taps > 0 and width * height > tiling.max_fused_pixels
        fields = FrameFields(
            source=0,
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
            scratch=0,
            first_across_tile=0,
            first_finish_tile=0,
            first_patch=0,
        )
        return _Size(
            grid=grid,
            fields=np.array(fields, np.int64),
            tables=tables,
            across_tiles=_tiles(height, tiling.across_rows, new_width, tiling.across_columns) if uses_scratch else 0,
            finish_tiles=_tiles(patch * grid[1], tiling.finish_rows, patch * grid[2], tiling.finish_columns),
            scratch_words=height * new_width if uses_scratch else 0,
            is_fused=across_taps > 0 and not uses_scratch,
        )

    def _tables(self, *sides: tuple[int, int]) -> tuple[torch.Tensor | None, tuple[int, int], tuple[int, int]]:
        """Tables on the device, and of each side the address and taps of its own; zeros for one that stays."""
        made = [resize_table(*side) if side[0] != side[1] else (np.empty(0, np.int32), 0) for side in sides]
        if not any(taps for _, taps in made):
            return None, (0, 0), (0, 0)
        tables = self._upload(np.concatenate([table.reshape(-1) for table, _ in made]))
        start = tables.data_ptr()
        (first, first_taps), (_, second_taps) = made
        return tables, (start, first_taps), (start + first.nbytes, second_taps)

    def _upload(self, values: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> torch.Tensor:
        """Copy through pinned memory, which torch does not reuse before the copy is done."""
        host = torch.from_numpy(values)
        return host.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else host

    def _output(self, num_patches: int, out: torch.Tensor | None) -> torch.Tensor:
        shape = (num_patches, 3 * self._processor.patch_size**2)
        if out is None:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        if tuple(out.shape) != shape or out.dtype != self._dtype or out.device != self._device:
            raise ImageError(
                f"out must be {self._dtype} {list(shape)} on {self._device}, got {out.dtype} {list(out.shape)} on "
                f"{out.device}"
            )
        if not out.is_contiguous():
            raise ImageError("out must be contiguous")
        return out

    def _on_device(self) -> AbstractContextManager[None]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def _starts(lengths: Sequence[int] | npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], int]:
    """Where each begins if they lie end to end, and where the last ends."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return ends - lengths, int(ends[-1])


def _tiles(height: int, tile_height: int, width: int, tile_width: int) -> int:
    return -(-height // tile_height) * -(-width // tile_width)
