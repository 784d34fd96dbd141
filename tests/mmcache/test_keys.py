"""Content keys and fingerprints: golden values, and no two contents under one key."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from mmcache.keys import (
    ContentKey,
    Fingerprint,
    KeyHasher,
    checksum,
    digest_parts,
    fingerprint,
    store_key,
)

SEED = 0x0123456789ABCDEF

# Changing any of these orphans every stored embedding: raise KEY_VERSION instead.
GOLDEN = [
    ("", "encoded", b"", b"hello", "ff661f6aa8d2b6c9a01e2862e49de73b"),
    ("", "encoded", b"", b"", "db38458ca097680b93821b29326f8158"),
    ("", "encoded", b"", bytes(range(256)) * 4096, "d389f60507707593df60fc3d0e22dc22"),
    ("", "array", b"2x3x3|uint8", bytes(range(18)), "cc83daacc36a38607e61e4597977abc4"),
    ("", "image", b"RGB 2x3", bytes(range(18)), "075fb407da8296998c1923508b5e5090"),
    ("tenant-a", "encoded", b"", b"hello", "814cc2c020d2bf6d52e81108a294654d"),
]


@pytest.mark.parametrize(("namespace", "kind", "header", "raw", "expected"), GOLDEN)
def test_golden_keys(namespace: str, kind: str, header: bytes, raw: bytes, expected: str) -> None:
    assert str(KeyHasher(SEED, namespace).key(kind, header, raw)) == expected


def test_a_key_is_the_hash_of_length_prefixed_parts() -> None:
    parts = (b"mmcache content key", struct.pack("<Q", 1), b"ns", b"array", b"2x2", b"rgba")
    spelled = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    assert KeyHasher(SEED, "ns").key("array", b"2x2", b"rgba") == xxhash.xxh3_128_digest(spelled, seed=SEED)


PARTS: dict[str, Any] = {
    "weights_digest": b"w" * 16, "model_config": "m", "processor": "p", "decoding": "d", "dtype": "float32",
    "is_deterministic": False, "numerics_version": 1,
}  # fmt: skip


def test_golden_fingerprint_and_digests() -> None:
    made = fingerprint(**PARTS)
    assert str(made) == "113afe13620a1af47ab5d0b91d941746"
    assert digest_parts([b"a", b"bc"]).hex() == "f310f4d71be93bc46456c91685adede6"
    assert checksum(b"hello") == 0x9555E8555C62DCFD


_content = st.tuples(st.text("ab", max_size=3), st.text("ab", max_size=3), st.binary(max_size=3), st.binary(max_size=3))


@given(_content, _content)
def test_equal_keys_mean_equal_content(one: tuple[str, str, bytes, bytes], two: tuple[str, str, bytes, bytes]) -> None:
    def key(content: tuple[str, str, bytes, bytes]) -> ContentKey:
        namespace, kind, header, raw = content
        return KeyHasher(SEED, namespace).key(kind, header, raw)

    assert (key(one) == key(two)) == (one == two)


@given(st.binary(max_size=8), st.integers(0, 8), st.integers(0, 8))
def test_a_moved_boundary_changes_the_key(data: bytes, first: int, second: int) -> None:
    hasher = KeyHasher(SEED)
    keys = [hasher.key("k", data[:cut], data[cut:]) for cut in (first, second)]
    same = data[:first] == data[:second]
    assert (keys[0] == keys[1]) == same
    digests = [digest_parts([data[:cut], data[cut:]]) for cut in (first, second)]
    assert (digests[0] == digests[1]) == same


def test_seed_and_order_of_use_matter_as_they_should() -> None:
    hasher = KeyHasher(SEED)
    first = hasher.key("encoded", b"", b"one")
    assert hasher.key("encoded", b"", b"two") != first
    assert hasher.key("encoded", b"", b"one") == first
    assert KeyHasher(SEED + 1).key("encoded", b"", b"one") != first
    with pytest.raises(ValueError, match="64 bits"):
        KeyHasher(1 << 64)


def test_any_contiguous_buffer_is_hashed_by_its_bytes() -> None:
    hasher = KeyHasher(SEED)
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    assert hasher.key("array", b"", pixels) == hasher.key("array", b"", pixels.tobytes())
    assert hasher.key("array", b"", memoryview(bytearray(b"abc"))) == hasher.key("array", b"", b"abc")
    with pytest.raises(ValueError, match="C-contiguous"):
        hasher.key("array", b"", pixels[:, ::2])


@pytest.mark.parametrize("kind", [ContentKey, Fingerprint])
def test_digests_read_as_hex_and_back(kind: type[ContentKey] | type[Fingerprint]) -> None:
    digest = kind(bytes(range(16)))
    assert str(digest) == "000102030405060708090a0b0c0d0e0f"
    assert repr(digest) == f"{kind.__name__}(000102030405060708090a0b0c0d0e0f)"
    assert kind.from_hex(str(digest)) == digest
    assert {digest: 1}[bytes(range(16))] == 1
    with pytest.raises(ValueError, match="16 bytes"):
        kind(b"short")
    for text in ("00" * 15, "zz" * 16, "0" * 30 + "  "):
        with pytest.raises(ValueError, match=r"hex|16 bytes"):
            kind.from_hex(text)


def test_every_part_of_a_fingerprint_counts() -> None:
    variants = [
        PARTS,
        PARTS | {"numerics_version": 2},
        PARTS | {"is_deterministic": True},
        PARTS | {"adapter": "lora"},
        PARTS | {"dtype": "bfloat16"},
        PARTS | {"processor": "q"},
        PARTS | {"decoding": "e"},
        PARTS | {"processor": "pd", "decoding": ""},
        PARTS | {"model_config": "mp", "processor": ""},
        PARTS | {"weights_digest": b"v" * 16},
    ]
    assert len({fingerprint(**variant) for variant in variants}) == len(variants)


def test_a_store_key_is_fingerprint_then_key() -> None:
    assert store_key(Fingerprint(b"f" * 16), ContentKey(b"k" * 16)) == b"f" * 16 + b"k" * 16
