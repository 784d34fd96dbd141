"""Pixels to normalised patch rows on the device: a whole batch of any mix of sizes in one launch, or two.

The same integers as `encoder.preprocess`, which is Pillow's 8-bit bicubic, so the same bytes: horizontally, rounded
to uint8, then vertically. Only what a frame needs is done: one whose size stays is normalised and cut into patches by
the last launch alone. Needs Triton, which CUDA builds of torch bring.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from encoder.config import ProcessorConfig
from encoder.device_plan import Mix, PlanCache, Tiling
from encoder.errors import ImageError
from encoder.sizing import Grid


class DevicePreprocessor:
    """Makes patch rows on one device, all on one stream: the one that is current. Not for several threads at once."""

    def __init__(
        self, processor: ProcessorConfig, device: torch.device, dtype: torch.dtype, tiling: Tiling | None = None
    ) -> None:
        """Rows will have `dtype`: float32, bfloat16 or float16. Raises `ImportError` where Triton is missing."""
        from encoder.kernels.resize_across import resize_across
        from encoder.kernels.resize_finish import resize_finish

        is_unnumbered = device.type == "cuda" and device.index is None
        self._device = torch.device("cuda", torch.cuda.current_device()) if is_unnumbered else device
        self._dtype = dtype
        self._patch = processor.patch_size
        self._tiling = tiling or Tiling()
        self._across = resize_across
        self._finish = resize_finish
        levels = torch.tensor([*processor.image_mean, *processor.image_std], dtype=torch.float32) * 255.0
        self._channels = levels.to(self._device)
        self._plans = PlanCache(processor, self._tiling, self._upload)

    def rows(
        self, items: Sequence[torch.Tensor], grids: Sequence[Grid], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the patch rows `[num_patches, 3 * patch * patch]` of all items, end to end.

        An item is uint8 and contiguous on the device, at any address: an image `[height, width, 3]`, or a chunk
        `[frames, height, width, 3]`; `grids` are those of `encoder.sizing.grid_thw`. Items are read by work on the
        current stream, without waiting for it. Given `out` of the rows' shape, whose rows may lie apart, it is written
        and returned; otherwise the caller owns a new tensor. Raises `ImageError` before any work if an item, a grid or
        `out` does not fit.
        """
        if len(items) != len(grids):
            raise ImageError(f"{len(items)} items need as many grids, got {len(grids)}")
        for item in items:
            self._check(item)
        if not items:
            return self._output(0, out)
        with self._on_device():
            mix = self._plans.mix(tuple([item.shape for item in items]))
            for item, size, grid in zip(items, mix.sizes, grids, strict=True):
                if size.grid != grid:
                    raise ImageError(f"pixels of shape {list(item.shape)} have the grid {size.grid}, got {grid}")
            out = self._output(mix.num_patches, out)
            self._launch(mix, _addresses(items), out)
        return out

    def _launch(self, mix: Mix, addresses: list[int], out: torch.Tensor) -> None:
        tiling = self._tiling
        scratch = torch.empty(mix.scratch_words, dtype=torch.int32, device=self._device) if mix.scratch_words else None
        plan = self._upload(mix.plan(addresses, 0 if scratch is None else scratch.data_ptr()))
        if scratch is not None:
            self._across[(mix.across_tiles,)](
                plan, mix.num_frames, tiling.across_rows, tiling.across_columns, num_warps=tiling.across_warps
            )
        self._finish[(mix.finish_tiles,)](
            plan,
            mix.num_frames,
            self._channels,
            out,
            self._patch,
            out.stride(0),
            tiling.finish_rows,
            tiling.finish_columns,
            mix.is_fused,
            num_warps=tiling.resized_warps if mix.is_resized else tiling.num_warps,
        )

    def _upload(self, values: npt.NDArray[np.signedinteger[Any]]) -> torch.Tensor:
        """Copy through pinned memory, which torch does not reuse before the copy is done."""
        host = torch.from_numpy(values)
        return host.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else host

    def _check(self, item: torch.Tensor) -> None:
        if item.dtype != torch.uint8 or item.device != self._device or not item.is_contiguous():
            raise ImageError(
                f"pixels must be contiguous uint8 on {self._device}, got {item.dtype} {list(item.shape)} "
                f"with strides {item.stride()} on {item.device}"
            )

    def _output(self, num_patches: int, out: torch.Tensor | None) -> torch.Tensor:
        shape = (num_patches, 3 * self._patch**2)
        if out is None:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        fits = tuple(out.shape) == shape and out.dtype == self._dtype and out.device == self._device
        if not fits or out.stride(1) != 1 or out.stride(0) < shape[1]:
            raise ImageError(
                f"out must be rows of {self._dtype} {list(shape)} on {self._device}, got {out.dtype} "
                f"{list(out.shape)} with strides {out.stride()} on {out.device}"
            )
        return out

    def _on_device(self) -> AbstractContextManager[None]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def _addresses(items: Sequence[torch.Tensor]) -> list[int]:
    """Of every frame."""
    addresses: list[int] = []
    for item in items:
        if item.ndim == 3:
            addresses.append(item.data_ptr())
        else:
            start, num_frames = item.data_ptr(), len(item)
            addresses += [start + frame * (item.numel() // num_frames) for frame in range(num_frames)]
    return addresses
