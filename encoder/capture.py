"""Capturing what a device is told to do as a CUDA graph, beside threads that use the device meanwhile."""

import functools
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

T = TypeVar("T")

_ONE_AT_A_TIME: Final = threading.Lock()
"""Of the process: torch's allocator is told by process, not by graph, that a capture is under way."""


def capture(run: Callable[[], T], stream: torch.cuda.Stream, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """Return a graph of what `run` launches, and what it returned, whose memory is the graph's from then on.

    `run` has run before, so that its kernels are compiled and chosen; it is called once, on `stream`, one that
    `side_stream` made. Other threads may use the device meanwhile; captures take turns. What can not be captured
    raises `RuntimeError`, and leaves the device usable unless it raises again on the next use.
    """
    graph = torch.cuda.CUDAGraph()
    with _ONE_AT_A_TIME, torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            found = run()
        finally:
            graph.capture_end()
    return graph, found


def side_stream(device: torch.device, dtype: torch.dtype) -> torch.cuda.Stream:
    """Return a stream for captures, of the current one's priority, which the graph's launches will have.

    The workspace that products have for it is taken here: of a capture it would be a part, and go with the first. It
    stays for ever, some 32 MiB, so that there is one such stream for all.
    """
    current = torch.cuda.current_stream(device)
    stream = _made_once(device, current.priority)
    square = torch.zeros(64, 64, device=device, dtype=dtype)
    with _ONE_AT_A_TIME, torch.cuda.stream(stream):
        stream.wait_stream(current)
        torch.addmm(square[0], square, square)
        square @ square
        stream.synchronize()
    return stream


@functools.cache
def _made_once(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)
