"""The stored format: what goes in comes out, and whatever else is there is refused."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcache.keys import checksum
from mmcache.tiers.base import ITEM_BYTES, Entry
from mmcache.tiers.codec import HEADER_BYTES, DamagedEntryError, Header, pack_header, unpack_header

KEY = bytes(range(32))
ENTRY = Entry(KEY, b"tenant-1", (3, 8), "float32", (1, 2, 6), 96, 0xFEDCBA9876543210, 1_700_000_000.25, 0.5)
RECORD = pack_header(ENTRY, 4096)

# A later release must still read this, or refuse it cleanly: raise FORMAT_VERSION when it changes.
GOLDEN = (
    "6d6d63616368650002007800"
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "74656e616e742d31"
    "01000000" "0300000008000000" "010000000200000006000000"
    "6000000000000000" "00100000" "1032547698badcfe"
    "00001040fc54d941" "000000000000e03f"
)  # fmt: skip


def _resealed(record: bytes) -> bytes:
    return record[:-8] + struct.pack("<Q", checksum(record[:-8]))


def test_golden_record() -> None:
    assert HEADER_BYTES == len(RECORD) == 120
    assert RECORD[:-8].hex() == GOLDEN
    assert unpack_header(KEY, memoryview(RECORD)) == Header(ENTRY, 4096)


@st.composite
def _entries(draw: st.DrawFn) -> Entry:
    shape = (draw(st.integers(1, 1 << 16)), draw(st.integers(1, 1 << 14)))
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    grid = draw(st.tuples(*[st.integers(1, 1 << 20)] * 3))
    seconds = st.floats(0, 1e9)
    nbytes = shape[0] * shape[1] * ITEM_BYTES[dtype]
    digest = draw(st.integers(0, (1 << 64) - 1))
    return Entry(
        draw(st.binary(min_size=32, max_size=32)),
        draw(st.binary(min_size=8, max_size=8)),
        shape,
        dtype,
        grid,
        nbytes,
        digest,
        draw(seconds),
        draw(seconds),
    )


@given(_entries(), st.integers(1, 4 << 20))
def test_round_trip(entry: Entry, chunk_bytes: int) -> None:
    header = unpack_header(entry.key, pack_header(entry, chunk_bytes))
    assert header == Header(entry, chunk_bytes)
    assert header.chunk(0)[0] == 0
    assert header.chunk(header.num_chunks - 1)[1] == entry.nbytes


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_is_noticed(bit: int) -> None:
    record = bytearray(RECORD)
    record[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DamagedEntryError):
        unpack_header(KEY, bytes(record))


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(DamagedEntryError):
        unpack_header(KEY, data)


def test_truncated_and_prolonged_records_are_refused() -> None:
    for length in range(HEADER_BYTES):
        with pytest.raises(DamagedEntryError):
            unpack_header(KEY, RECORD[:length])
    with pytest.raises(DamagedEntryError, match="length"):
        unpack_header(KEY, RECORD + b"\0")


def test_a_record_of_another_key_or_version_is_refused() -> None:
    with pytest.raises(DamagedEntryError, match="another key"):
        unpack_header(KEY[::-1], RECORD)
    with pytest.raises(DamagedEntryError, match="format version 3, this release reads 2"):
        unpack_header(KEY, _resealed(RECORD[:8] + b"\3\0" + RECORD[10:]))


@pytest.mark.parametrize(
    ("offset", "field", "message"),
    [
        (52, b"\4\0\0\0", "unknown dtype 4"),
        (56, b"\0\0\0\0", "empty"),
        (56, b"\4\0\0\0", "size and shape disagree"),
        (72, b"\0\0\0\0", "grid out of range"),
        (72, b"\xff\xff\xff\xff", "grid out of range"),
        (84, b"\0\0\0\0", "chunk size"),
        (84, b"\xff\xff\xff\xff", "chunk size"),
        (96, struct.pack("<d", float("nan")), "time out of range"),
        (96, struct.pack("<d", -1.0), "time out of range"),
        (104, struct.pack("<d", float("inf")), "time out of range"),
    ],
)
def test_well_sealed_nonsense_is_refused(offset: int, field: bytes, message: str) -> None:
    record = RECORD[:offset] + field + RECORD[offset + len(field) :]
    with pytest.raises(DamagedEntryError, match=message):
        unpack_header(KEY, _resealed(record))


def test_a_huge_payload_is_refused() -> None:
    side = 1 << 18
    huge = _resealed(
        RECORD[:56] + struct.pack("<II", side, side) + RECORD[64:76] + struct.pack("<Q", side * side * 4) + RECORD[84:]
    )
    with pytest.raises(DamagedEntryError, match="payload too large"):
        unpack_header(KEY, huge)


@pytest.mark.parametrize(
    "wrong",
    [{"key": b"short"}, {"dtype": "int8"}, {"nbytes": 95}, {"shape": (0, 8), "nbytes": 0}, {"created_s": float("nan")}],
)
def test_what_the_format_cannot_hold_is_not_packed(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="cannot be stored"):
        pack_header(replace(ENTRY, **wrong), 4096)
