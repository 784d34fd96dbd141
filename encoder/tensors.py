"""Reads safetensors files: eight bytes with the length of a JSON header, the header, then the tensors' bytes.

Files are read, not mapped: one that becomes shorter meanwhile is an error here, and would be a signal that ends the
process there. Nothing of a file is believed before it is checked, so that a header cannot make the reader allocate.
"""

import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from encoder.errors import CheckpointError
from encoder.files import MAX_JSON_BYTES, opened, parse_json, read_at, shown

READABLE_DTYPES: Final = MappingProxyType({"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16})
BUFFER_BYTES: Final = 16 << 20
"""A size for the buffer of `read_into`."""
_LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of an open file. Its bytes lie within the file, and are as many as its shape and dtype need."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    descriptor: int
    start: int
    nbytes: int

    def read_into(self, out: torch.Tensor, buffer: torch.Tensor) -> None:
        """Fill a contiguous CPU tensor of as many values, converted to its dtype.

        `buffer` holds stored values before they are converted: bytes, a multiple of four, of any content. Raises
        `CheckpointError` if the file has become shorter or cannot be read.
        """
        stored = READABLE_DTYPES[self.dtype]
        assert out.is_contiguous(), "filled from its first byte to its last"
        assert out.numel() * stored.itemsize == self.nbytes, "shapes were compared"
        flat = out.view(-1)
        if out.dtype == stored:
            self._read_bytes(flat, 0)
            return
        values = buffer.view(stored)
        for begin in range(0, len(flat), len(values)):
            part = flat[begin : begin + len(values)]
            self._read_bytes(values[: len(part)], begin * stored.itemsize)
            part.copy_(values[: len(part)])

    def _read_bytes(self, out: torch.Tensor, offset: int) -> None:
        memory = out.view(torch.uint8).numpy().data
        done = 0
        while done < len(memory):
            try:
                read = os.preadv(self.descriptor, [memory[done:]], self.start + offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {self.name}: {error.strerror}") from error
            if read == 0:
                raise CheckpointError(f"{self.path}: it became shorter while it was read: it ends within {self.name}")
            done += read


@contextmanager
def opened_tensors(path: Path) -> Iterator[list[StoredTensor]]:
    """Open a safetensors file and yield its tensors, which can be read within the `with`.

    Raises `CheckpointError` naming the path if it is not a whole file of this format, by its header and its size.
    """
    assert sys.byteorder == "little", "as the format is"
    with opened(path) as descriptor:
        nbytes = os.fstat(descriptor).st_size
        header, start = _header(path, descriptor, nbytes)
        tensors = [_tensor(path, name, entry, descriptor, start) for name, entry in header.items() if name != _METADATA]
        _check_layout(path, tensors, start, nbytes)
        yield tensors


def _header(path: Path, descriptor: int, nbytes: int) -> tuple[Mapping[str, Any], int]:
    """The header, and where the tensors' bytes begin."""
    length = int.from_bytes(read_at(descriptor, 0, _LENGTH_BYTES), "little")
    start = _LENGTH_BYTES + length
    if nbytes < _LENGTH_BYTES or start > nbytes:
        raise CheckpointError(f"{path}: {nbytes} bytes, too few for its header: not a safetensors file, or cut")
    if length > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: a header of {length} bytes, more than {MAX_JSON_BYTES}")
    return parse_json(read_at(descriptor, _LENGTH_BYTES, length), f"{path}: header"), start


def _tensor(path: Path, name: str, entry: Any, descriptor: int, start: int) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{path}: {shown(name)} must have dtype, shape and data_offsets, got {shown(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise CheckpointError(f"{path}: {shown(name)} has a damaged entry: {shown(entry)}")
    begin, end = offsets
    if dtype in READABLE_DTYPES and math.prod(shape) * READABLE_DTYPES[dtype].itemsize != end - begin:
        raise CheckpointError(f"{path}: {shown(name)}: {end - begin} bytes, not those of {dtype} {shown(shape)}")
    return StoredTensor(path, name, dtype, tuple(shape), descriptor, start + begin, end - begin)


def _are_sizes(values: Any) -> bool:
    """Whether it is a list of whole numbers that a file can have, as few as a shape has."""
    return (
        isinstance(values, list)
        and len(values) <= 64
        and all(type(size) is int and 0 <= size < 1 << 63 for size in values)
    )


def _check_layout(path: Path, tensors: list[StoredTensor], start: int, nbytes: int) -> None:
    """Tensors lie end to end, from the header to the end of the file."""
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.nbytes)):
        if tensor.start != start or tensor.nbytes < 0:
            raise CheckpointError(f"{path}: {shown(tensor.name)} overlaps another tensor, or there is a gap before it")
        start += tensor.nbytes
    if start != nbytes:
        raise CheckpointError(f"{path}: {nbytes} bytes, its header says {start}: cut, or more was added")
