"""The reader of safetensors against the format's own library, and against files that are damaged or change."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from encoder.errors import CheckpointError
from encoder.tensors import opened_tensors

TENSORS = {
    "a": torch.randn(5, 7, generator=torch.Generator().manual_seed(1)),
    "b": torch.arange(12).reshape(3, 4).bfloat16(),
    "c": torch.tensor(2.5, dtype=torch.float16),
    "d": torch.zeros(0, 4),
    "e": torch.arange(5),
}
SMALL = torch.empty(16, dtype=torch.uint8)
"""A buffer of a few values: every tensor takes several turns."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "x.safetensors", metadata={"format": "pt"})
    return tmp_path / "x.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_those_of_the_library(path: Path, dtype: torch.dtype) -> None:
    expected = load_file(path)
    with opened_tensors(path) as tensors:
        assert {tensor.name for tensor in tensors} == expected.keys()
        for tensor in tensors:
            assert tensor.shape == tuple(expected[tensor.name].shape)
            if tensor.dtype != "I64":
                out = torch.full(tensor.shape, torch.nan, dtype=dtype)
                tensor.read_into(out, SMALL)
                assert torch.equal(out, expected[tensor.name].to(dtype))


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def entry(name: str, **changes: object) -> Callable[[Path], None]:
    return lambda path: rewrite_header(path, lambda header: header[name].update(changes))


def header_of(text: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(struct.pack("<Q", len(text)) + text)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "seven bytes": lambda path: path.write_bytes(b"1234567"),
    "a header beyond the end": lambda path: path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}"),
    "a header as long as 2**64": lambda path: path.write_bytes(b"\xff" * 8 + b"{}"),
    "a huge header": lambda path: (path.write_bytes(struct.pack("<Q", 65 << 20)), os.truncate(path, 66 << 20)),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut in the header": lambda path: os.truncate(path, 40),
    "more": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "no json": header_of(b"{"),
    "deep": header_of(b"[" * 100_000),
    "a list": header_of(b"[]"),
    "a name twice": header_of(b'{"a": {}, "a": {}}'),
    "no entry": header_of(b'{"a": 5}'),
    "an entry too few": lambda path: rewrite_header(path, lambda header: header["a"].pop("dtype")),
    "negative shape": entry("a", shape=[-5, -7]),
    "huge shape": entry("a", shape=[1 << 62, 4]),
    "a shape of truth values": entry("c", shape=[True]),
    "a shape of floats": entry("a", shape=[5.0, 7]),
    "a shape of text": entry("a", shape="57"),
    "a dtype that is a number": entry("a", dtype=5),
    "other bytes than the shape": entry("a", shape=[5, 8]),
    "another dtype of other bytes": entry("a", dtype="F16"),
    "offsets backwards": lambda path: rewrite_header(path, lambda h: h["a"]["data_offsets"].reverse()),
    "one offset": entry("a", data_offsets=[0]),
    "offsets beyond the end": entry("e", data_offsets=[1 << 40, (1 << 40) + 40]),
    "overlapping": lambda path: rewrite_header(path, lambda h: h["e"].update(data_offsets=h["a"]["data_offsets"])),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_named(path: Path, damage: Callable[[Path], object]) -> None:
    damage(path)
    with pytest.raises(CheckpointError, match=r"x\.safetensors: ") as caught, opened_tensors(path):
        pass
    assert len(str(caught.value)) < 1000


def test_damage_of_any_byte_of_the_header(path: Path) -> None:
    """Refused, or read as something that lies within the file: never another exception."""
    good = path.read_bytes()
    (length,) = struct.unpack("<Q", good[:8])
    outcomes = set()
    for at in range(8 + length):
        for bit in (1, 4, 64):
            path.write_bytes(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
            try:
                with opened_tensors(path) as tensors:
                    outcomes.add("read")
                    assert all(tensor.start + tensor.nbytes <= len(good) for tensor in tensors)
            except CheckpointError:
                outcomes.add("refused")
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as stored", "converted"])
def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    """An error where a mapped file would be SIGBUS."""
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(1 << 16)}, path)
    with opened_tensors(path) as (tensor,):
        os.truncate(path, 100_000)
        with pytest.raises(CheckpointError, match="became shorter while it was read: it ends within a"):
            tensor.read_into(torch.empty(1 << 16, dtype=dtype), SMALL)


def test_no_descriptor_is_left_open(path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with opened_tensors(path):
        pass
    DAMAGES["more"](path)
    with pytest.raises(CheckpointError), opened_tensors(path):
        pass
    assert os.listdir("/proc/self/fd") == before
