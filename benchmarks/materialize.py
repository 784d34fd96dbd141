"""Deferred slices to one encoder input: time and memory against `.to()` of each item and `torch.cat`.

    python -m benchmarks.materialize [--threads N]

Items of differing length and dtype lie in one shared memory, as clients stage them. The two ways take turns in one
process; extra memory is the peak beyond the items and the result, as the kernel counts it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from ipc.materialize import DTYPES, Slice, materialize
from ipc.memory_shm import ReadOnlyRegion, SharedRegion, round_up

WIDTH = 588  # values of a patch: 3 · 14 · 14
ROWS = (256, 1024, 1656, 4784, 10764)  # patches of pictures from 224×224 to 1904×1104
MIB = 2**20


def staged(dtypes: Sequence[str], repeats: int) -> list[Slice]:
    """Items of every length, with the dtypes in turn, side by side in a memory that is mapped for reading."""
    kinds = [dtypes[index % len(dtypes)] for index in range(repeats * len(ROWS))]
    shapes = list(zip(kinds, ROWS * repeats, strict=True))
    sizes = [num_rows * WIDTH * DTYPES[dtype].itemsize for dtype, num_rows in shapes]
    region = SharedRegion.create("benchmark", sum(round_up(size, 256) for size in sizes))
    region.seal_resize()
    reader = ReadOnlyRegion.attach(region.fd)
    slices = []
    offset = 0
    for (dtype, num_rows), size in zip(shapes, sizes, strict=True):
        values = torch.randint(0, 256, (num_rows * WIDTH,), dtype=torch.uint8).to(DTYPES[dtype])
        region.array(offset, size)[:] = values.view(torch.uint8).numpy()
        view = reader.view(offset, size, writable_flag=True)
        slices.append(Slice(view, dtype, num_rows))
        offset += round_up(size, 256)
    return slices


def by_cat(slices: Sequence[Slice], dtype: torch.dtype) -> torch.Tensor:
    """The alternative: convert each item, then put them together."""
    tensors = [torch.from_numpy(one.data).view(DTYPES[one.dtype]).view(one.num_rows, WIDTH) for one in slices]
    return torch.cat([tensor.to(dtype) for tensor in tensors])


def in_one_pass(slices: Sequence[Slice], dtype: torch.dtype) -> torch.Tensor:
    """What is measured."""
    out = torch.empty(sum(one.num_rows for one in slices), WIDTH, dtype=dtype)
    materialize(slices, out)
    return out


def resident(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def extra_bytes(call: Callable[[], torch.Tensor]) -> int:
    """Peak memory of a call beyond what was there and its result."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier calls freed would hide what this one takes
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets the peak back to what is resident now
    before = resident("VmRSS")
    result = call()
    return resident("VmHWM") - before - result.nbytes


def compare(name: str, dtypes: Sequence[str], dtype: torch.dtype, num_rounds: int) -> None:
    slices = staged(dtypes, repeats=2)
    ways = (by_cat, in_one_pass)
    wanted, got = (way(slices, dtype) for way in ways)
    assert torch.equal(wanted.view(torch.uint8), got.view(torch.uint8)), "the two ways differ"
    nbytes = got.nbytes
    del wanted, got
    times: dict[str, list[float]] = {way.__name__: [] for way in ways}
    for _ in range(num_rounds):
        for way in ways:
            start = time.perf_counter()
            way(slices, dtype)
            times[way.__name__].append(time.perf_counter() - start)
    cat, one = (statistics.median(times[way.__name__]) * 1e3 for way in ways)
    extra_cat, extra_one = (extra_bytes(partial(way, slices, dtype)) / MIB for way in ways)
    print(
        f"  {name:34} {nbytes / MIB:6.1f} MiB  cat {cat:6.2f} ms  one pass {one:6.2f} ms  ratio {one / cat:4.2f}"
        f"  extra {extra_cat:6.1f} MiB and {extra_one:4.1f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"{2 * len(ROWS)} items of {min(ROWS)} to {max(ROWS)} rows of {WIDTH}, {arguments.threads} threads; medians")
    everything = ("uint8", "float32", "float16", "bfloat16")
    for target in (torch.bfloat16, torch.float32):
        short = str(target).removeprefix("torch.")
        compare(f"uint8 to {short}", ("uint8",), target, arguments.rounds)
        compare(f"four dtypes in turn to {short}", everything, target, arguments.rounds)
        compare(f"{short} to {short}", (short,), target, arguments.rounds)


if __name__ == "__main__":
    main()
