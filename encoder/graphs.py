"""CUDA graphs of the forward pass by bucket, for batches so small that launching them takes longer than their work.

A batch is padded to the next bucket with rows of zeros, which belong to spans of their own: no item sees them, and
what becomes of them is not read. All that differs between batches of one bucket is in two tensors, patch rows and
the table of spans, so a replay is two copies and one launch. Graphs run one after the other on one stream, so all
share their memory.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from encoder.device_forward import DeviceForward
from encoder.sizing import Grid
from encoder.spans import NUM_FILLERS, TILE_ROWS, Spans, SpansShape, exact_shape, plan_spans

STEPS_PER_OCTAVE: Final = 16
SMALLEST_STEP: Final = 64
WARM_RUNS: Final = 2


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The largest batch that has a graph, and how many graphs are kept; the least recently used goes first."""

    max_patches: int = 8192
    max_items: int = 64
    max_graphs: int = 64


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    spans: Spans
    patches: torch.Tensor
    out: torch.Tensor


class GraphCache:
    """Runs batches through graphs that are captured when their bucket is first seen. For one thread at a time."""

    def __init__(self, forward: DeviceForward, limits: GraphLimits) -> None:
        """Take the memory of the largest batch's patch rows; everything else is taken by the first capture."""
        self._forward = forward
        self._limits = limits
        weight = next(forward.model.parameters())
        self._device = weight.device
        self._rows = torch.zeros(limits.max_patches, forward.patch_values, dtype=weight.dtype, device=weight.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: OrderedDict[SpansShape, _Captured] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graphs)

    def bucket(self, grids: Sequence[Grid]) -> SpansShape | None:
        """Return the shape to which a batch is padded, or None if it is too large for a graph."""
        own = exact_shape(grids, self._forward.config)
        if own.num_patches > self._limits.max_patches or len(grids) > self._limits.max_items:
            return None
        return bucket_of(own, self._forward.config.merge_size)

    def warm(self, batches: Iterable[Sequence[Grid]]) -> None:
        """Capture the graphs of the buckets that these batches fall into."""
        for grids in batches:
            if (shape := self.bucket(grids)) is not None:
                self._captured(shape, grids)

    def run(self, patches_TP: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Return the embeddings of a batch that has a bucket, `[N, text width]`, valid until the next call.

        `patches_TP` are `[T, values of a patch]` on the device, padded or not. Nothing waits for the device unless
        the bucket has to be captured.
        """
        shape = self.bucket(grids)
        assert shape is not None, "the caller asked for the bucket"
        captured = self._captured(shape, grids)
        spans = plan_spans(grids, self._forward.config, self._device, shape)
        captured.spans.words.copy_(spans.words, non_blocking=True)
        num_rows, values = patches_TP.shape
        captured.patches[:num_rows, :values].copy_(patches_TP, non_blocking=True)
        captured.patches[num_rows:].zero_()
        captured.graph.replay()
        return captured.out[: spans.cu_tokens[-1]]

    def _captured(self, shape: SpansShape, grids: Sequence[Grid]) -> _Captured:
        if shape not in self._graphs:
            while len(self._graphs) >= self._limits.max_graphs:
                self._graphs.popitem(last=False)
            self._graphs[shape] = self._capture(shape, grids)
        self._graphs.move_to_end(shape)
        return self._graphs[shape]

    def _capture(self, shape: SpansShape, grids: Sequence[Grid]) -> _Captured:
        patches = self._rows[: shape.num_patches]
        patches.zero_()
        spans = plan_spans(grids, self._forward.config, self._device, shape)
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(WARM_RUNS):
                self._forward(patches, spans)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=side):
            out = self._forward(patches, spans)
        return _Captured(graph, spans, patches, out)


def bucket_of(own: SpansShape, merge_size: int) -> SpansShape:
    """Return the shape of the bucket of a batch: at most a sixteenth more patches, and room for spans of padding."""
    step = max(SMALLEST_STEP, 1 << max(0, own.num_patches.bit_length() - 1 - (STEPS_PER_OCTAVE.bit_length() - 1)))
    patches = -(-own.num_patches // step) * step
    items = 1 << (own.num_slots - 1).bit_length()
    slots = items + NUM_FILLERS
    return SpansShape(
        num_patches=patches,
        num_tokens=patches // merge_size**2,
        num_slots=slots,
        num_tiles=patches // TILE_ROWS + slots,
        max_seqlen=min(patches, max(step, 1 << (own.max_seqlen - 1).bit_length())),
    )
