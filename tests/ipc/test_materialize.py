"""Slices to one input: the bits of `.to()` and `torch.cat`, in one pass, over memory that may change meanwhile."""

from __future__ import annotations

import itertools
import threading
import tracemalloc
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ipc.materialize import BLOCK_BYTES, DTYPES, SERIAL_VALUES, Slice, materialize
from ipc.memory_shm import ReadOnlyRegion, SharedRegion

WIDTH = 12
TARGETS = (torch.float32, torch.bfloat16, torch.float16)


def values(dtype: str, num_rows: int, seed: int = 0) -> torch.Tensor:
    """Rows of every bit pattern that is a number."""
    generator = torch.Generator().manual_seed(seed + num_rows)
    itemsize = DTYPES[dtype].itemsize
    raw = torch.randint(0, 256, (num_rows * WIDTH * itemsize,), dtype=torch.uint8, generator=generator)
    rows = raw.view(DTYPES[dtype]).view(num_rows, WIDTH)
    return torch.nan_to_num(rows, nan=1.5, posinf=torch.inf, neginf=-torch.inf) if dtype != "uint8" else rows


def data(rows: torch.Tensor, shift: int = 0) -> np.ndarray:
    """The rows' bytes at an address that is `shift` bytes off."""
    raw = rows.contiguous().view(-1).view(torch.uint8).numpy()
    shifted = np.empty(len(raw) + shift, np.uint8)[shift:]
    shifted[:] = raw
    shifted.flags.writeable = False
    return shifted


def sliced(rows: torch.Tensor, shift: int = 0) -> Slice:
    dtype = next(name for name, dtype in DTYPES.items() if dtype is rows.dtype)
    return Slice(data(rows, shift), dtype, len(rows))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def number_of_rows(num_bytes: int, dtype: str) -> int:
    return -(-num_bytes // (WIDTH * DTYPES[dtype].itemsize))


@pytest.mark.parametrize(("dtype", "target"), list(itertools.product(DTYPES, TARGETS)))
@pytest.mark.parametrize(
    "num_bytes", [1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 77, 5_000_000]
)
def test_one_slice_has_the_bits_of_to(dtype: str, target: torch.dtype, num_bytes: int) -> None:
    rows = values(dtype, number_of_rows(num_bytes, dtype))
    out = torch.full((len(rows), WIDTH), torch.nan, dtype=target)
    materialize([sliced(rows)], out)
    assert same_bits(out, rows.to(target))


@pytest.mark.parametrize("target", TARGETS)
def test_slices_of_differing_dtype_and_length_have_the_bits_of_to_and_cat(target: torch.dtype) -> None:
    lengths = (1, 2, 700, 1, 40_000, 3, SERIAL_VALUES // WIDTH, 12_345)
    rows = [values(dtype, n) for n, dtype in zip(lengths, itertools.cycle(DTYPES), strict=False)]
    out = torch.empty(sum(lengths), WIDTH, dtype=target)
    materialize([sliced(item, shift=index % 4) for index, item in enumerate(rows)], out)
    assert same_bits(out, torch.cat([item.to(target) for item in rows]))


def test_a_nan_stays_one_and_nothing_else_becomes_one() -> None:
    rows = values("float32", 5000)
    rows.view(-1)[::7] = torch.nan
    out = torch.empty(5000, WIDTH, dtype=torch.bfloat16)
    materialize([sliced(rows)], out)
    assert torch.equal(out.isnan(), rows.isnan())


def test_nothing_around_the_input_is_written() -> None:
    whole = torch.full((30, WIDTH), 7.0)
    rows = values("uint8", 10)
    materialize([sliced(rows), sliced(values("uint8", 0))], whole[10:20])
    assert same_bits(whole[10:20], rows.float())
    assert (torch.cat([whole[:10], whole[20:]]) == 7.0).all()


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_observers_are_shown_every_byte_in_order_and_cannot_write(target: torch.dtype) -> None:
    rows = [values("uint8", 60_000), values("float32", 30_000), values("bfloat16", 10)]
    seen: list[list[bytes]] = [[], [], []]

    def observe(index: int, block: memoryview) -> None:
        assert block.readonly
        assert block.nbytes <= BLOCK_BYTES
        seen[index].append(bytes(block))

    out = torch.empty(90_010, WIDTH, dtype=target)
    slices = [sliced(item) for item in rows]
    materialize(slices, out, [partial(observe, 0), None, partial(observe, 2)])
    assert b"".join(seen[0]) == slices[0].data.tobytes()
    assert (seen[1], seen[2]) == ([], [slices[2].data.tobytes()])
    assert same_bits(out, torch.cat([item.to(target) for item in rows]))


@pytest.mark.parametrize(("dtype", "target"), [("uint8", torch.bfloat16), ("float32", torch.float32)])
def test_what_the_owner_writes_after_the_look_is_not_converted(dtype: str, target: torch.dtype) -> None:
    rows = values(dtype, number_of_rows(2 * BLOCK_BYTES, dtype))
    staged = data(rows).copy()
    seen = []

    def look_and_overwrite(block: memoryview) -> None:
        seen.append(bytes(block))
        staged[:] ^= 0x15

    out = torch.empty(len(rows), WIDTH, dtype=target)
    materialize([Slice(staged, dtype, len(rows))], out, [look_and_overwrite])
    shown = torch.frombuffer(bytearray(b"".join(seen)), dtype=DTYPES[dtype]).view(-1, WIDTH)
    assert same_bits(out, shown.to(target))
    assert not same_bits(shown, rows)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
def test_what_was_seen_is_what_was_converted_while_a_thread_rewrites_the_memory(dtype: str) -> None:
    num_rows = number_of_rows(2_000_000, dtype)
    size = num_rows * WIDTH * DTYPES[dtype].itemsize
    region = SharedRegion.create("torn", size)
    region.seal_resize()
    staged = ReadOnlyRegion.attach(region.fd).view(0, size)
    stop = threading.Event()

    def rewrite() -> None:
        pixels = region.array(0, size)
        for value in itertools.cycle(range(1, 60)):
            pixels[:] = value
            if stop.is_set():
                return

    writer = threading.Thread(target=rewrite)
    writer.start()
    num_torn = 0
    try:
        for _ in range(2000):
            seen: list[bytes] = []
            out = torch.empty(num_rows, WIDTH)
            materialize([Slice(staged, dtype, num_rows)], out, [lambda block, seen=seen: seen.append(bytes(block))])
            shown = b"".join(seen)
            num_torn += len(set(shown)) > 1
            assert same_bits(out.view(-1), torch.frombuffer(bytearray(shown), dtype=DTYPES[dtype]).float())
            if num_torn == 10:
                break
    finally:
        stop.set()
        writer.join()
        region.close()
    assert num_torn > 0, "the writer never got in between"


def test_an_observers_error_is_passed_on() -> None:
    def refuse(block: memoryview) -> None:
        raise KeyError("refused")

    with pytest.raises(KeyError, match="refused"):
        materialize([sliced(values("uint8", 4))], torch.empty(4, WIDTH), [refuse])


class Operations(TorchDispatchMode):
    """Which operations of torch ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def test_extra_memory_is_one_block() -> None:
    slices = [sliced(values(dtype, 100_000)) for dtype in DTYPES]
    out = torch.empty(400_000, WIDTH, dtype=torch.bfloat16)
    with Operations() as operations:
        materialize(slices, out)
    assert "copy_" in operations.names
    assert operations.names <= {"copy_", "split", "slice", "view", "detach", "lift_fresh"}  # none makes memory
    tracemalloc.start()  # sees numpy's memory
    try:
        materialize(slices, out)
        extra = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert BLOCK_BYTES <= extra < 2 * BLOCK_BYTES


ROWS = values("uint8", 4)


@pytest.mark.parametrize(
    ("one", "out", "message"),
    [
        (sliced(ROWS), torch.empty(5, WIDTH), "out has 5 rows, the slices have 4"),
        (sliced(ROWS), torch.empty(4, WIDTH + 1), "slice 0: 4 rows of 13 uint8 are 52 contiguous bytes"),
        (sliced(ROWS)._replace(dtype="float64"), torch.empty(4, WIDTH), "slice 0: dtype must be one of"),
        (sliced(ROWS)._replace(dtype="float32"), torch.empty(4, WIDTH), "are 192 contiguous bytes"),
        (sliced(ROWS)._replace(num_rows=-4), torch.empty(4, WIDTH), "slice 0: -4 rows"),
        (sliced(ROWS)._replace(data=data(ROWS).view(np.int8)), torch.empty(4, WIDTH), "got int8"),
        (sliced(ROWS)._replace(data=np.zeros(96, np.uint8)[::2]), torch.empty(4, WIDTH), "contiguous bytes"),
        (sliced(ROWS), torch.empty(WIDTH, 4).T, "out must be contiguous floats"),
        (sliced(ROWS), torch.empty(4 * WIDTH), "out must be contiguous floats"),
        (sliced(ROWS), torch.empty(4, WIDTH, dtype=torch.int32), "out must be contiguous floats"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(one: Slice, out: torch.Tensor, message: str) -> None:
    out.fill_(3)
    with pytest.raises(ValueError, match=message):
        materialize([one], out)
    assert (out == 3).all()


def test_every_slice_needs_its_observer() -> None:
    with pytest.raises(ValueError, match="1 slices need as many observers, got 2"):
        materialize([sliced(ROWS)], torch.empty(4, WIDTH), [None, None])
