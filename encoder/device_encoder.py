"""Packs of items on a GPU, from pixels on the host to embeddings where they are wanted, at the device's speed.

The arithmetic is `encoder.moonvit`'s but for rounding (`encoder.device_forward`); the pixels are the same bits
(`encoder.device_preprocess`). For half precision; float32 and `deterministic` keep to the plain model.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Final

import numpy as np
import torch

from encoder.attention_choice import choose_attention
from encoder.config import ProcessorConfig
from encoder.device_forward import DeviceForward
from encoder.device_options import Acceleration, DeviceOptions
from encoder.device_preprocess import DevicePreprocessor
from encoder.finite import all_finite
from encoder.graphs import GraphCache, GraphLimits
from encoder.kernels.finite import are_finite, can_be_read
from encoder.moonvit import MoonViT
from encoder.patches import PatchRows
from encoder.preprocess import Pixels
from encoder.sizing import Grid, num_patches
from encoder.spans import plan_spans

PIXELS_ALIGNMENT: Final = 16
"""Bytes to which an item's pixels are aligned on the device."""
WARM_SIDES: Final = (64, 48, 32, 24, 16)
"""Patches a side of the single square images whose graphs are made at start, largest first."""


class DeviceEncoder:
    """Encodes on one GPU, on the stream that is current. Not for several threads at once."""

    def __init__(self, model: MoonViT, processor: ProcessorConfig, options: DeviceOptions) -> None:
        """Choose how attention is done: takes about a second, and longer where kernels are compiled for the first time.

        Raises `EncoderError` as `choose_attention` does, and `ImportError` where Triton is missing.
        """
        weight = next(model.parameters())
        self._device, self._dtype = weight.device, weight.dtype
        self._config = model.config
        self._options = options
        self.attention = choose_attention(options.attention, model.config, self._device, self._dtype)
        self._forward = DeviceForward(model, self.attention.load())
        self._preprocessor = DevicePreprocessor(processor, self._device, self._dtype)
        self.graphs: GraphCache | None = None

    @property
    def acceleration(self) -> Acceleration:
        """What is used, and what graphs take, as of now."""
        graphs = self.graphs
        if graphs is None:
            return Acceleration(str(self.attention))
        return Acceleration(str(self.attention), len(graphs), graphs.num_evicted, graphs.num_bytes, graphs.failure)

    @torch.inference_mode()
    def use_graphs(self) -> None:
        """From now on batches that are seen repeatedly run as CUDA graphs; those of usual single images at once.

        Waits for the device, so that another thread may encode from now on.
        """
        if self.graphs is None and self._options.graph_bytes:
            limits = GraphLimits(max_bytes=self._options.graph_bytes)
            self.graphs = GraphCache(self._forward, self.attention, limits)
            self.graphs.warm([[(1, side, side)] for side in WARM_SIDES])
            torch.cuda.current_stream(self._device).synchronize()

    @torch.inference_mode()
    def encode(self, items: Sequence[Pixels | PatchRows], grids: Sequence[Grid], outs: Sequence[torch.Tensor]) -> None:
        """Encode items, whose grids and outputs have been checked, as one pack; nothing waits for the device.

        The items' memory must stay as it is until the device is done.
        """
        batch = None if self.graphs is None else self.graphs.begin(grids)
        if self.graphs is not None and batch is not None:
            self._fill(batch.rows, items, grids)
            hidden, spans = self.graphs.run(batch, grids)
        else:
            rows = torch.empty(
                sum(map(num_patches, grids)), self._forward.patch_values, dtype=self._dtype, device=self._device
            )
            rows[:, self._config.patch_values :].zero_()
            self._fill(rows, items, grids)
            spans = plan_spans(grids, self._config, self._device)
            hidden = self._forward.hidden(rows, spans)
        self._forward.project(hidden, spans.cu_tokens, outs)

    def are_finite(self, outs: Sequence[torch.Tensor]) -> list[bool]:
        """Return for each output whether it holds neither NaN nor infinity. Waits for the device."""
        return are_finite(outs) if can_be_read(outs) else all_finite(outs)

    def _fill(self, rows: torch.Tensor, items: Sequence[Pixels | PatchRows], grids: Sequence[Grid]) -> None:
        """Write the patch rows of all items: those that come as rows are copied, the others made of pixels."""
        start, values = 0, self._config.patch_values
        for comes_as_rows, group in groupby(zip(items, grids, strict=True), lambda pair: type(pair[0]) is PatchRows):
            pairs = list(group)
            end = start + sum(num_patches(grid) for _, grid in pairs)
            part = rows[start:end, :values]
            if comes_as_rows:
                lengths = [num_patches(grid) for _, grid in pairs]
                made = [item.rows for item, _ in pairs if isinstance(item, PatchRows)]
                torch._foreach_copy_(list(part.split(lengths)), made)
            else:
                pixels = [item for item, _ in pairs if not isinstance(item, PatchRows)]
                self._preprocessor.rows(self._uploaded(pixels), [grid for _, grid in pairs], part)
            start = end

    def _uploaded(self, items: Sequence[Pixels]) -> list[torch.Tensor]:
        """Pixels on the device, in one piece of memory: copied straight where their pages are locked, else through
        memory that is, which torch does not reuse before the device has read it."""
        starts = np.cumsum([0, *(-(-item.nbytes // PIXELS_ALIGNMENT) * PIXELS_ALIGNMENT for item in items)])
        there = torch.empty(int(starts[-1]), dtype=torch.uint8, device=self._device)
        found = []
        for item, start in zip(items, starts, strict=False):
            target = there[start : start + item.nbytes].view(item.shape)
            target.copy_(_locked(item) if self._device.type == "cuda" else _wrapped(item), non_blocking=True)
            found.append(target)
        return found


def _locked(item: Pixels) -> torch.Tensor:
    """The same pixels in locked memory."""
    if item.flags.writeable and (wrapped := _wrapped(item)).is_pinned():
        return wrapped
    copy = torch.empty(item.shape, dtype=torch.uint8, pin_memory=True)
    np.copyto(copy.numpy(), item)
    return copy


def _wrapped(item: Pixels) -> torch.Tensor:
    return torch.from_numpy(item if item.flags.writeable else item.copy())
