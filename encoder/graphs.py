"""CUDA graphs of the forward pass by bucket, for batches so small that launching them takes longer than their work.

A batch is padded to the next bucket with rows of zeros, which belong to spans of their own: no item sees them, and
what becomes of them is not read. All that differs between batches of one bucket is in two tensors, patch rows and
the table of spans, so a replay is a copy and a launch. Graphs run one after the other on one stream, so all share
their memory. The last product is not part of them: it writes where each embedding is wanted.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from encoder.attention_choice import AttentionChoice
from encoder.capture import capture, side_stream
from encoder.device_forward import DeviceForward
from encoder.device_options import GRAPH_BYTES
from encoder.sizing import Grid
from encoder.spans import NUM_FILLERS, TILE_ROWS, Spans, SpansShape, exact_shape, plan_spans

STEPS_PER_OCTAVE: Final = 16
SMALLEST_STEP: Final = 64
MAX_SEEN: Final = 1024
WARM_RUNS: Final = 2
SHARE_OF_ROWS: Final = 4
"""What all graphs share, a batch's first and last rows, is at most this part of their memory."""


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The largest batch that has a graph, and how many graphs are kept; the least recently used goes first.

    Launching a pass takes a host 8.5 ms (H200), as long as the device takes for 4096 patches: beyond, a graph would
    gain nothing and lose what its padding takes, up to a sixteenth. `max_bytes`: of device memory that all graphs
    together may take; 96 MiB suffice for 4096 patches of the true shape.
    """

    max_patches: int = 4096
    max_items: int = 64
    max_graphs: int = 64
    max_bytes: int = GRAPH_BYTES


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    spans: Spans


@dataclass(frozen=True, slots=True)
class Bucketed:
    """A batch that has a graph. Its rows are to be written to `rows`, `[patches of the batch, patch values]`."""

    shape: SpansShape
    rows: torch.Tensor


class GraphCache:
    """Graphs that are captured when their bucket is seen for the second time. For one thread at a time.

    `num_bytes`: device memory that they take. `failure`: why there are none and will be none, or nothing.
    """

    def __init__(self, forward: DeviceForward, choice: AttentionChoice, limits: GraphLimits) -> None:
        """Take the memory of the largest batch's first and last rows; everything else is taken by captures."""
        self.limits = limits
        self.failure = ""
        self.num_evicted = 0
        self._forward = forward
        self._choice = choice
        weight, values, hidden = next(forward.model.parameters()), forward.patch_values, forward.config.hidden_size
        most = limits.max_bytes // (SHARE_OF_ROWS * weight.itemsize * (values + hidden))
        self._max_patches = min(limits.max_patches, most)
        self._device = weight.device
        self._rows = torch.zeros(self._max_patches, values, dtype=weight.dtype, device=weight.device)
        tokens, width = -(-self._max_patches // forward.config.merge_size**2), forward.config.merged_width
        self._hidden = torch.empty(tokens, width, dtype=weight.dtype, device=weight.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._pool_bytes = 0
        self._stream: torch.cuda.Stream | None = None
        self._graphs: OrderedDict[SpansShape, _Captured] = OrderedDict()
        self._seen: OrderedDict[SpansShape, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def num_bytes(self) -> int:
        """Device memory of all graphs and of the rows that they share."""
        return self._pool_bytes + self._rows.nbytes + self._hidden.nbytes

    def bucket(self, grids: Sequence[Grid]) -> SpansShape | None:
        """Return the shape to which a batch is padded, or None if it can have no graph."""
        own = exact_shape(grids, self._forward.config)
        if self.failure or own.num_patches > self._max_patches or len(grids) > self.limits.max_items:
            return None
        shape = bucket_of(own, self._forward.config.merge_size)
        fits = shape.num_patches <= self._max_patches and self._choice.fits_graphs(shape)
        return shape if fits else None

    def warm(self, batches: Iterable[Sequence[Grid]]) -> None:
        """Capture the graphs of the buckets that these batches fall into. Large ones first take the least memory."""
        for grids in batches:
            if (shape := self.bucket(grids)) is not None and shape not in self._graphs:
                self._capture(shape, grids)

    def begin(self, grids: Sequence[Grid]) -> Bucketed | None:
        """Return where a batch's rows are to be written for `run`, or None if it has no graph now."""
        shape = self.bucket(grids)
        if shape is None:
            return None
        if shape not in self._graphs and self._is_seen_again(shape):
            self._capture(shape, grids)
        if shape not in self._graphs:
            return None
        self._graphs.move_to_end(shape)
        return Bucketed(shape, self._rows[: exact_shape(grids, self._forward.config).num_patches])

    def run(self, batch: Bucketed, grids: Sequence[Grid]) -> tuple[torch.Tensor, Spans]:
        """Replay the graph of a batch whose rows have been written; nothing waits for the device.

        Returns what `DeviceForward.hidden` does, valid until the next call, and the batch's spans.
        """
        captured = self._graphs[batch.shape]
        spans = plan_spans(grids, self._forward.config, self._device, batch.shape)
        captured.spans.words.copy_(spans.words, non_blocking=True)
        self._rows[len(batch.rows) : batch.shape.num_patches].zero_()
        captured.graph.replay()
        return self._hidden[: spans.num_tokens], spans

    def _is_seen_again(self, shape: SpansShape) -> bool:
        if shape in self._seen:
            return True
        self._seen[shape] = None
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return False

    def _capture(self, shape: SpansShape, grids: Sequence[Grid]) -> None:
        """Capture a graph; without one afterwards if it can not be, or if there is no memory for it."""
        while len(self._graphs) >= self.limits.max_graphs:
            self._graphs.popitem(last=False)
            self.num_evicted += 1
        try:
            self._graphs[shape], num_bytes = self._captured(shape, grids)
        except RuntimeError as error:
            torch.cuda.synchronize(self._device)  # a device that is lost raises again
            if not isinstance(error, torch.OutOfMemoryError):
                self.failure = str(error).partition("\n")[0]
            self._shrink(shape)
            return
        self._pool_bytes += num_bytes
        if self.num_bytes > self.limits.max_bytes:
            self._shrink(shape)

    def _captured(self, shape: SpansShape, grids: Sequence[Grid]) -> tuple[_Captured, int]:
        """A graph, and by how much it made the memory of all grow."""
        rows = self._rows[: shape.num_patches]
        rows.zero_()
        spans = plan_spans(grids, self._forward.config, self._device, shape)
        hidden = self._hidden[: spans.num_tokens]
        self._stream = self._stream or side_stream(self._device, rows.dtype)
        run = partial(self._forward.hidden, rows, spans, hidden)
        for _ in range(WARM_RUNS):
            run()
        before = torch.cuda.memory_reserved(self._device)
        graph, _ = capture(run, self._stream, self._pool)
        return _Captured(graph, spans), max(0, torch.cuda.memory_reserved(self._device) - before)

    def _shrink(self, shape: SpansShape) -> None:
        """Memory that graphs share is theirs until the last is gone: give up all, and those of such a size for good."""
        self.num_evicted += len(self._graphs)
        self._graphs.clear()
        self._max_patches = min(self._max_patches, shape.num_patches - 1)
        self._pool = torch.cuda.graph_pool_handle()
        self._pool_bytes = 0
        torch.cuda.empty_cache()


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
