"""Bit-identical encoding: what has to stay fixed for an item's embedding to be the same bits wherever it is made.

On a CPU three things change the order in which a product's sums are added: the number of threads that share it, how
many rows it has, and where its operands lie relative to a cache line (`benchmarks.determinism` shows each). So every
item is encoded by itself, on one thread, in aligned memory: its arithmetic is then a function of the item alone. The
threads that this leaves idle encode other items.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

import torch
from torch import nn

from encoder.errors import EncoderError

ALIGNMENT_BYTES: Final = 64
"""Of torch's own CPU memory."""

CUBLAS_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACE_SIZES: Final = (":4096:8", ":16:8")


class OneByOne:
    """Runs each item's work by itself.

    On a CPU, on threads of its own that have one thread for their arithmetic, whatever the process's setting is; as
    many items run at once as the process has threads when this is made. On CUDA, one after the other on the caller's
    thread, and torch is told, for the whole process, to use deterministic algorithms. `num_at_once`: how many items
    run side by side.

    Raises `EncoderError` on CUDA if the environment does not give cuBLAS a fixed workspace.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_at_once = torch.get_num_threads() if device.type == "cpu" else 1
        self._threads = _single_threaded(self.num_at_once) if device.type == "cpu" else None
        if device.type == "cuda":
            _fix_cuda()

    def run(self, work: Sequence[Callable[[], None]]) -> None:
        """Do all of it and return when none is running any more; raises the first error in the order of `work`."""
        if self._threads is None:
            for item in work:
                item()
            return
        futures = [self._threads.submit(_alone, item) for item in work]
        wait(futures)
        for future in futures:
            future.result()


def align_parameters(model: nn.Module) -> None:
    """Move every parameter that is not aligned into memory that is."""
    for parameter in model.parameters():
        if not is_aligned(parameter):
            parameter.data = parameter.data.clone()


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory begins where torch's own would, relative to a cache line."""
    return tensor.data_ptr() % ALIGNMENT_BYTES == 0


def _single_threaded(num_threads: int) -> ThreadPoolExecutor:
    """Start threads whose arithmetic has one thread.

    What torch is told applies to the thread that tells it, and to every thread that asks for the first time later. So
    each asks first, all are started here, and the caller's number is put back.
    """
    started = threading.Barrier(num_threads + 1)

    def prepare() -> None:
        torch.get_num_threads()
        torch.set_num_threads(1)
        started.wait()

    threads = ThreadPoolExecutor(num_threads, "encode")
    for _ in range(num_threads):
        threads.submit(prepare)
    started.wait()
    torch.set_num_threads(num_threads)
    return threads


def _alone(item: Callable[[], None]) -> None:
    assert torch.get_num_threads() == 1, "the order of sums depends on the number of threads"
    item()


def _fix_cuda() -> None:
    if os.environ.get(CUBLAS_WORKSPACE) not in CUBLAS_WORKSPACE_SIZES:
        raise EncoderError(f"deterministic: {CUBLAS_WORKSPACE} must be one of {', '.join(CUBLAS_WORKSPACE_SIZES)}")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
