"""Which kernel does attention on a device: named by the caller, or the fastest there of those that are right.

Shape suffixes: T patches of all items, H heads, d width of a head.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final

import torch

from encoder.attention import BACKENDS, AttentionKernel, load_attention, packed_attention
from encoder.capture import capture, side_stream
from encoder.config import EncoderConfig
from encoder.device_options import AUTO
from encoder.errors import EncoderError
from encoder.sizing import Grid
from encoder.spans import Spans, SpansShape, plan_spans

LITTLE_WORK: Final = 1 << 21
"""Patches times those of the longest item."""
NUM_TIMINGS: Final = 5
NUM_RUNS: Final = 5
MAX_ERROR: Final = 1e-2
"""Relative, from attention in float32: what rounding to bfloat16 makes is a fifth of it."""

SMALL_MIX: Final[tuple[tuple[Grid, ...], ...]] = (((1, 32, 32),), ((1, 16, 16),) * 16)
LARGE_MIX: Final[tuple[tuple[Grid, ...], ...]] = (((1, 32, 32),) * 4, ((1, 64, 64),) * 2)
UNEVEN: Final[tuple[Grid, ...]] = ((1, 2, 2), (1, 6, 26), (1, 16, 16), (1, 10, 14), (1, 2, 6), (1, 34, 46))
"""Blocks of keys and of queries that no item fills, where kernels go wrong."""


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The kernels, by their names in `BACKENDS`, of batches that are little work for attention, and of all others.

    Little work is a matter of latency, where FlashAttention-3 is not the fastest: on an H200, one layer of 1 x 1024
    patches takes 28 us with `fa3` and 22 with `triton`, 16 x 256 takes 40 and 31; 4 x 1024 takes 70 and 80, 4 x 4096
    takes 698 and 1053.
    """

    small: str
    large: str

    def __str__(self) -> str:
        return self.small if self.small == self.large else f"{self.small}, {self.large}"

    def load(self) -> AttentionKernel:
        """Return one kernel that is the one or the other. Raises `EncoderError` as `load_attention` does."""
        if self.small == self.large:
            return load_attention(self.small)
        small, large = load_attention(self.small), load_attention(self.large)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans) -> torch.Tensor:
            return (small if is_little_work(spans) else large)(q, k, v, spans)

        return attend

    def fits_graphs(self, shape: SpansShape) -> bool:
        """Whether a graph of such batches can be captured, and told other spans."""
        return BACKENDS[self.small if is_little_work(shape) else self.large].fits_graphs


def is_little_work(shape: Spans | SpansShape) -> bool:
    """Decided by bounds of the batch, not by its spans, so that it is the same for all batches of a graph."""
    return shape.num_patches * shape.max_seqlen <= LITTLE_WORK


def choose_attention(name: str, config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> AttentionChoice:
    """Return the kernel of that name for everything; or, for `auto`, the fastest of those that work on this device.

    Takes about a second, with everything compiled. Raises `EncoderError` if there is no kernel of that name, or not
    here, or if what it gives is wrong.
    """
    if name != AUTO:
        load_attention(name)
        names = [name]
    else:
        names = [one for one, backend in BACKENDS.items() if backend.is_installed() and backend.is_quick]
    tests = _Tests(config, device, dtype)
    failures = {one: failure for one in names if (failure := tests.failure(one))}
    working = [one for one in names if one not in failures]
    if not working:
        raise EncoderError("attention: " + "; ".join(f"{one}: {failure}" for one, failure in failures.items()))
    if len(working) == 1:
        return AttentionChoice(working[0], working[0])
    for_graphs = [one for one in working if BACKENDS[one].fits_graphs] or working
    small = min(for_graphs, key=lambda one: tests.seconds(one, SMALL_MIX))
    return AttentionChoice(small, min(working, key=lambda one: tests.seconds(one, LARGE_MIX)))


class _Tests:
    """Batches of random values on a device."""

    def __init__(self, config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._config = config
        self._device = device
        self._dtype = dtype

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return side_stream(self._device, self._dtype)

    def failure(self, name: str) -> str:
        """Why a kernel is of no use here, or nothing."""
        q, k, v, spans = self._batch(UNEVEN)
        try:
            found = load_attention(name)(q, k, v, spans).float()
        except (EncoderError, ImportError, NotImplementedError, RuntimeError) as error:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # a fault that has ended the context is no refusal: it raises
            return str(error).partition("\n")[0] or type(error).__name__
        truth = packed_attention(q.float(), k.float(), v.float(), spans.cu_seqlens)
        wrong = float((found - truth).norm() / truth.norm())
        return "" if wrong <= MAX_ERROR else f"its results are wrong, by {wrong:.1e}"

    def seconds(self, name: str, mix: Sequence[Sequence[Grid]]) -> float:
        """What it takes for all batches of a mix."""
        kernel = load_attention(name)
        found = 0.0
        for grids in mix:
            q, k, v, spans = self._batch(grids)
            found += self._seconds(partial(kernel, q, k, v, spans), BACKENDS[name].fits_graphs)
        return found

    def _batch(self, grids: Sequence[Grid]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Spans]:
        spans = plan_spans(grids, self._config, self._device)
        shape = (spans.num_patches, 3, self._config.num_heads, self._config.head_dim)
        q, k, v = torch.randn(shape, device=self._device, dtype=self._dtype).unbind(1)
        return q, k, v, spans

    def _seconds(self, run: Callable[[], object], fits_graphs: bool) -> float:
        """A graph of several runs leaves out what a launch costs, which is more than a small batch takes."""
        run()
        if not fits_graphs:
            return float(statistics.median(_device_seconds(run) for _ in range(NUM_TIMINGS)))
        graph, _ = capture(lambda: [run() for _ in range(NUM_RUNS)], self._stream)
        graph.replay()
        return float(statistics.median(_device_seconds(graph.replay) for _ in range(NUM_TIMINGS))) / NUM_RUNS


def _device_seconds(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
