"""References that arrive otherwise than they were made: nothing of them is believed that can be checked."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import mmcache
from tests.mmcache.support import image

REF = mmcache.SliceRef(7, "0" * 32, "1" * 32, "bfloat16", 3, 4, 24, (1, 2, 6))


@pytest.mark.parametrize(
    "edit",
    [
        {"dtype": "int8"},
        {"dtype": None},
        {"dtype": "float32"},
        {"num_tokens": 2},
        {"num_tokens": 0, "nbytes": 0},
        {"num_tokens": -3, "dim": -4},
        {"num_tokens": 3.0},
        {"num_tokens": "3"},
        {"dim": 8},
        {"nbytes": 1 << 40},
        {"grid_thw": (1, 2)},
        {"grid_thw": (1, 2, 6.5)},
        {"grid_thw": "126"},
        {"fingerprint": "1" * 31},
        {"fingerprint": 1},
        {"key": b"0" * 16},
    ],
)
def test_fields_that_cannot_be_are_refused(edit: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a SliceRef"):
        mmcache.SliceRef.of(REF._replace(**edit))


def test_numbers_of_numpy_become_plain_ones() -> None:
    ref = mmcache.SliceRef.of([*REF[:4], np.int64(3), np.int32(4), np.uint64(24), np.array([1, 2, 6])])
    assert ref == REF
    assert mmcache.SliceRef.of(json.loads(json.dumps(ref))) == REF


def test_a_staged_refs_numbers_are_integers() -> None:
    staged = mmcache.StagedRef(7, "0" * 32, (2, 2, 3), 12)
    assert mmcache.StagedRef.of(json.loads(json.dumps(staged))) == staged
    for wrong in (staged._replace(shape=(2, 2, 3.5)), staged._replace(nbytes="12")):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="not a StagedRef"):
            mmcache.StagedRef.of(wrong)


@pytest.mark.parametrize(
    "edit",
    [
        lambda ref: {"num_tokens": 2 * ref.num_tokens, "nbytes": 2 * ref.nbytes},
        lambda ref: {"dim": 2 * ref.dim, "nbytes": 2 * ref.nbytes},
        lambda ref: {"grid_thw": ref.grid_thw[::-1]},
        lambda ref: {"dtype": "bfloat16", "dim": 2 * ref.dim},
    ],
)
def test_a_reference_that_does_not_fit_what_it_names_is_refused(client: mmcache.Client, edit: Any) -> None:
    """Whoever edited it; the others of the call are not touched, and nothing stays leased."""
    (lease,) = client.encode([image(801)], consumers=3)
    with lease:
        ref = lease.ref
        edited = ref._replace(**edit(ref))
        with pytest.raises(mmcache.SliceGone, match="it was edited"):
            client.open(edited)
        bad, good = client.open([edited, ref], errors="return")
        assert isinstance(bad, mmcache.SliceGone)
        with good:
            np.testing.assert_array_equal(good.numpy(), lease.numpy())
    assert client.stats()["leases"]["active"] == 0


def test_fields_that_cannot_be_are_refused_by_open_too(client: mmcache.Client) -> None:
    with pytest.raises(ValueError, match="not a SliceRef"):
        client.open(REF._replace(dtype="int8"))
