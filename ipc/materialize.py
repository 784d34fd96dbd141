"""Deferred slices to one encoder input: copied, shown to observers and converted, in one pass over the bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

BLOCK_BYTES = 256 << 10  # of scratch: small enough to stay in a processor's second-level cache
# More values at once are split over torch's threads, who wait for each other after every block: ten times as long
# where other processes keep the cores busy, and little gained where they are idle.
SERIAL_VALUES = 32768

DTYPES = {"uint8": torch.uint8, "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
"""What slices may hold, by name."""

Observer: TypeAlias = Callable[[memoryview], object]
"""Is shown a slice's bytes in order, block by block. A block is valid during the call only."""


class Slice(NamedTuple):
    """Rows that somebody staged.

    Attributes:
        data: their bytes, uint8 `[num_rows · width · bytes of a value]`, contiguous, at any address, only read.
        dtype: a name of `DTYPES`.
        num_rows: how many there are; a row has as many values as one of the input has.
    """

    data: Bytes
    dtype: str
    num_rows: int


def materialize(slices: Sequence[Slice], out: torch.Tensor, observe: Sequence[Observer | None] | None = None) -> None:
    """Convert the slices' rows, one slice after another, into `out` `[sum of num_rows, width]`, contiguous, on the CPU.

    `out` is memory that no other process or thread writes to meanwhile. Values are those of `.to(out.dtype)` of each
    slice and `torch.cat`, bit for bit (a NaN stays a NaN). Extra memory: one block of `BLOCK_BYTES` at any size.

    `observe` has an observer, or None, for each slice. What it is shown is what was converted, even while the owner of
    the memory writes to it: every byte is read from there once, into private memory. So a checksum over what was
    observed is one over what is in `out`.

    Raises ValueError if a slice or `out` is not as described; nothing is written then. What an observer raises is
    passed on, and `out` is undefined.
    """
    _check(slices, out)
    observers = [None] * len(slices) if observe is None else observe
    if len(observers) != len(slices):
        raise ValueError(f"observe: {len(slices)} slices need as many observers, got {len(observers)}")
    scratch = np.empty(BLOCK_BYTES, np.uint8)
    values = out.view(-1)
    position = 0
    for (data, dtype, num_rows), observer in zip(slices, observers, strict=True):
        target = values[position : position + num_rows * out.shape[1]]
        position += len(target)
        if DTYPES[dtype] is out.dtype:
            _copy(data, target.view(torch.uint8).numpy(), observer)
        else:
            _convert(data, target, torch.from_numpy(scratch).view(DTYPES[dtype]), scratch, observer)


def _copy(data: Bytes, target: Bytes, observer: Observer | None) -> None:
    for start in range(0, len(data), BLOCK_BYTES):
        block = target[start : start + BLOCK_BYTES]
        np.copyto(block, data[start : start + BLOCK_BYTES])
        if observer is not None:
            observer(block.data.toreadonly())


def _convert(
    data: Bytes, target: torch.Tensor, source: torch.Tensor, scratch: Bytes, observer: Observer | None
) -> None:
    """`source` is `scratch` as values of the slice's dtype."""
    targets = torch.split(target, len(source))
    for index, start in enumerate(range(0, len(data), BLOCK_BYTES)):
        block = data[start : start + BLOCK_BYTES]
        np.copyto(scratch[: len(block)], block)
        if observer is not None:
            observer(scratch[: len(block)].data.toreadonly())
        parts = torch.split(source[: len(targets[index])], SERIAL_VALUES)
        for part, converted in zip(parts, torch.split(targets[index], SERIAL_VALUES), strict=True):
            converted.copy_(part)


def _check(slices: Sequence[Slice], out: torch.Tensor) -> None:
    if out.ndim != 2 or not out.is_contiguous() or out.device.type != "cpu" or not out.is_floating_point():
        raise ValueError(f"out must be contiguous floats [rows, width] on the CPU, got {out.dtype} {list(out.shape)}")
    for index, (data, dtype, num_rows) in enumerate(slices):
        if dtype not in DTYPES:
            raise ValueError(f"slice {index}: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        expected = num_rows * out.shape[1] * DTYPES[dtype].itemsize
        if data.dtype != np.uint8 or data.shape != (expected,) or not data.flags.c_contiguous:
            raise ValueError(
                f"slice {index}: {num_rows} rows of {out.shape[1]} {dtype} are {expected} contiguous bytes, "
                f"got {data.dtype} {list(data.shape)}"
            )
    num_rows = sum(one.num_rows for one in slices)
    if num_rows != out.shape[0]:
        raise ValueError(f"out has {out.shape[0]} rows, the slices have {num_rows}")
