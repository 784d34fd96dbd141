"""Materialization on a device against `.to()` and `torch.cat`."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

cuda = pytest.importorskip("ipc.materialize_cuda", reason="needs cuda-bindings", exc_type=ImportError)
pytestmark = pytest.mark.gpu

OUTPUTS = [torch.float16, torch.bfloat16, torch.float32]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(INTEGERS[tensor.element_size()])


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Bit for bit; a NaN for a NaN."""
    assert torch.equal(got.isnan(), wanted.isnan())
    numbers = ~wanted.isnan()
    assert torch.equal(bits_of(got)[numbers], bits_of(wanted)[numbers])


def a_slice(dtype: str, num_rows: int, width: int, offset: int, *, pinned: bool = False) -> tuple[Any, torch.Tensor]:
    """Rows of random bits, `offset` bytes into their memory, and the same rows as values."""
    nbytes = num_rows * width * cuda.DTYPES[dtype].itemsize
    memory = torch.randint(0, 256, (nbytes + offset + 64,), dtype=torch.uint8, device="cpu" if pinned else "cuda")
    memory = memory.pin_memory() if pinned else memory
    data = memory[offset : offset + nbytes]
    values = data.clone().cuda().view(cuda.DTYPES[dtype]).view(num_rows, width)
    return cuda.DeviceSlice(data, dtype, num_rows), values


def check(pairs: list[tuple[Any, torch.Tensor]], width: int, dtype: torch.dtype, out_offset: int = 0) -> int:
    num_rows = sum(one.num_rows for one, _ in pairs)
    size = num_rows * width
    memory = torch.full((size + out_offset + 64,), 7.0, dtype=dtype, device="cuda")
    out = memory[out_offset : out_offset + size].view(num_rows, width)
    launches: int = cuda.materialize([one for one, _ in pairs], out)
    if pairs:
        assert_same(out, torch.cat([values.to(dtype) for _, values in pairs]))
    around = torch.cat([memory[:out_offset], memory[out_offset + size :]])
    assert torch.equal(around, torch.full_like(around, 7.0)), "written outside of the output"
    return launches


@pytest.mark.parametrize("dtype", OUTPUTS, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_any_mix_at_any_address(dtype: torch.dtype, seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    width = chance.choice([1, 3, 7, 16, 588, 1000])
    pairs = [
        a_slice(
            chance.choice(list(cuda.DTYPES)),
            chance.choice([0, 1, 2, 5, 64, 333, 1024]),
            width,
            chance.choice([0, 0, 1, 2, 3, 4, 6, 8, 13, 16]),
            pinned=chance.random() < 0.2,
        )
        for _ in range(chance.randint(1, 40))
    ]
    check(pairs, width, dtype, out_offset=chance.choice([0, 0, 1, 2, 3, 5]))


@pytest.mark.parametrize("dtype", OUTPUTS, ids=str)
@pytest.mark.parametrize("name", ["uint8", "float16", "bfloat16"])
def test_every_value_there_is(name: str, dtype: torch.dtype) -> None:
    size = cuda.DTYPES[name].itemsize
    memory = torch.arange(256**size, device="cuda").to(INTEGERS[size]).view(torch.uint8)
    values = memory.view(cuda.DTYPES[name]).view(-1, 64)
    check([(cuda.DeviceSlice(memory, name, len(values)), values)], 64, dtype)


@pytest.mark.parametrize("dtype", OUTPUTS, ids=str)
def test_float32_at_the_edges_of_rounding(dtype: torch.dtype) -> None:
    special = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 65504.0, 65519.99, 65520.0, 1e-45, 6e-8, 3.39e38]
    ties = (torch.arange(1 << 16, device="cuda", dtype=torch.int32) << 12) + 0x3F801000
    values = torch.cat([torch.tensor(special, device="cuda"), ties.view(torch.float32)])
    values = torch.cat([values, -values]).view(-1, 1)
    check([(cuda.DeviceSlice(values.view(-1).view(torch.uint8), "float32", len(values)), values)], 1, dtype)


def test_launches_are_one_for_each_127_slices() -> None:
    pairs = [a_slice("uint8", 3, 16, 0) for _ in range(127)]
    empty = [a_slice("float32", 0, 16, 0)]
    assert check(pairs + empty, 16, torch.bfloat16) == 1
    assert check(pairs + empty + pairs[:1], 16, torch.bfloat16) == 2
    assert check([], 16, torch.bfloat16) == 0
    assert check(empty, 16, torch.bfloat16) == 0


def test_it_works_on_the_current_stream_and_in_a_graph() -> None:
    pairs = [a_slice("float32", 50, 588, 0), a_slice("uint8", 31, 588, 0)]
    out = torch.zeros(81, 588, dtype=torch.bfloat16, device="cuda")
    wanted = torch.cat([values.to(out.dtype) for _, values in pairs])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        cuda.materialize([one for one, _ in pairs], out)
        done = torch.cuda.current_stream().record_event()
    assert not done.query(), "it did not wait for its stream"
    done.synchronize()
    assert_same(out, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.materialize([one for one, _ in pairs], out)
    out.zero_()
    graph.replay()
    assert_same(out, wanted)


def test_what_is_not_as_described_is_refused_before_anything_is_written() -> None:
    good, _ = a_slice("float32", 4, 8, 0)
    out = torch.zeros(4, 8, device="cuda")
    plain = torch.zeros(128, dtype=torch.uint8)
    for slices, target, message in (
        ([good], torch.zeros(4, 8), "on CUDA"),
        ([good], torch.zeros(4, 8, device="cuda").t(), "contiguous"),
        ([good], torch.zeros(4, 8, device="cuda", dtype=torch.float64), "float32"),
        ([good, good], out, "out has 4 rows, the slices have 8"),
        ([good._replace(dtype="int8")], out, "dtype must be one of"),
        ([good._replace(num_rows=3)], out, "3 rows of 8 float32 are 96 contiguous bytes"),
        ([good._replace(data=good.data.view(torch.float32))], out, "contiguous bytes"),
        ([good._replace(data=torch.zeros(256, dtype=torch.uint8, device="cuda")[::2])], out, "contiguous bytes"),
        ([good._replace(data=plain)], out, "has to be pinned"),
    ):
        with pytest.raises(ValueError, match=message):
            cuda.materialize(slices, target)
    assert not out.any()
