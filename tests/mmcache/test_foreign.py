"""Embeddings of another model than the sidecar's: kept apart from its own and others', and never encoded here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import mmcache
from mmcache.keys import Fingerprint
from tests.mmcache.support import SidecarProcess, eventually, image
from tests.mmcache.weights import write_checkpoint

GRID = (1, 1, 1)
MODELS = {
    dtype: mmcache.ForeignModel(Fingerprint(bytes([number]) * 16), dtype)
    for number, dtype in enumerate(("float32", "bfloat16", "float16"))
}


def rows(seed: int, dtype: str, num_tokens: int = 5, dim: int = 24) -> torch.Tensor:
    return torch.randn((num_tokens, dim), generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with SidecarProcess(tmp_path_factory.mktemp("foreign"), store="auto") as sidecar:
        yield sidecar


@pytest.mark.parametrize("dtype", sorted(MODELS))
def test_what_is_put_is_read_bit_for_bit_by_another_client(stored: SidecarProcess, dtype: str) -> None:
    expected = rows(1, dtype)
    with stored.connect(foreign=MODELS[dtype]) as writer, stored.connect(foreign=MODELS[dtype]) as reader:
        key = writer.named_key("test", "picture one")
        assert reader.lookup([key]) == [None]
        assert writer.put(key, expected, GRID)
        assert not writer.put(key, rows(2, dtype), GRID), "it is cached, and stays"
        assert reader.lookup([key]) == ["pool"]
        with reader.encode([None], keys=[key])[0] as lease:
            assert (lease.dtype, lease.dim, lease.num_tokens, lease.origin) == (dtype, 24, 5, "pool")
            assert lease.fingerprint == MODELS[dtype].fingerprint
            assert torch.equal(lease.tensor, expected)
            np.testing.assert_array_equal(lease.numpy(), expected.float().numpy())
            assert torch.equal(reader.fetch(lease), expected)


def test_widths_differ_from_item_to_item(stored: SidecarProcess) -> None:
    with stored.connect(foreign=MODELS["float16"]) as client:
        for dim in (1, 24, 24 * 4):
            key = client.named_key("test", f"{dim} wide")
            assert client.put(key, rows(dim, "float16", dim=dim), GRID)
            with client.encode([None], keys=[key])[0] as lease:
                assert torch.equal(lease.tensor, rows(dim, "float16", dim=dim))


def test_models_see_nothing_of_each_other(stored: SidecarProcess) -> None:
    other = mmcache.ForeignModel(Fingerprint(b"another model's!"), "float32")
    picture = image(710)
    connect, model = stored.connect, MODELS["float32"]
    with connect() as own, connect(foreign=model) as one, connect(foreign=other) as two:
        key = own.key(picture)
        with own.encode([picture])[0] as lease:
            encoded = lease.tensor.clone()
        assert one.lookup([key]) == two.lookup([key]) == [None]
        assert one.put(key, rows(3, "float32"), GRID)
        assert two.lookup([key]) == [None]
        assert two.put(key, rows(4, "float32"), GRID)
        for client, expected in ((own, encoded), (one, rows(3, "float32")), (two, rows(4, "float32"))):
            with client.encode([None], keys=[key])[0] as lease:
                assert torch.equal(lease.tensor, expected)


def test_what_is_not_there_is_not_encoded(stored: SidecarProcess) -> None:
    with stored.connect(foreign=MODELS["float32"]) as client:
        before = client.stats()
        keys = [client.named_key("test", name) for name in "ab"]
        missed, absent = client.submit([image(711), None], "return", keys=keys).result()
        assert isinstance(missed, mmcache.NotCached)
        assert isinstance(absent, mmcache.NotCached)
        after = client.stats()
    assert after["items"]["encoded"] == before["items"]["encoded"]
    assert after["items"]["foreign_misses"] == before["items"]["foreign_misses"] + 2
    assert after["errors"] == before["errors"], "a miss is no failure"


def test_a_put_has_to_be_finite_and_of_its_dtype(stored: SidecarProcess) -> None:
    with stored.connect(foreign=MODELS["float16"]) as client:
        key = client.named_key("test", "bad")
        with pytest.raises(mmcache.WrongEmbedding, match="float16"):
            client.put(key, rows(5, "float32"), GRID)
        bad = rows(5, "float16")
        bad[3, 7] = float("inf")
        with pytest.raises(mmcache.NonFiniteEmbedding):
            client.put(key, bad, GRID)
        large = torch.full((2, 24), 60000.0, dtype=torch.float16)  # as bfloat16, these bits would be finite too
        assert client.put(key, large, GRID)
        tricky = torch.full((2, 24), 0x7C00, dtype=torch.int16).view(torch.float16)  # infinite as float16 alone
        with pytest.raises(mmcache.NonFiniteEmbedding):
            client.put(client.named_key("test", "tricky"), tricky, GRID)


def test_references_go_to_other_processes(stored: SidecarProcess) -> None:
    model = MODELS["bfloat16"]
    with stored.connect(foreign=model) as scheduler, stored.connect(foreign=model) as worker:
        key = scheduler.named_key("test", "shared")
        scheduler.put(key, rows(6, "bfloat16"), GRID)
        (lease,) = scheduler.encode([None], keys=[key], consumers=1)
        ref = mmcache.SliceRef.of(tuple(lease.ref))
        lease.release()
        with worker.open(ref) as mine:
            assert torch.equal(mine.tensor, rows(6, "bfloat16"))


def test_they_outlive_a_reload_and_a_restart(tmp_path: Path) -> None:
    model = MODELS["float16"]
    sidecar = SidecarProcess(tmp_path, store="auto", model="moonvit-tiny")
    with sidecar, sidecar.connect(foreign=model) as client:
        key = client.named_key("test", "kept")
        client.put(key, rows(7, "float16"), GRID)
        with sidecar.connect() as own:
            own.encode([image(712)])[0].release()
        eventually(lambda: client.stats()["store"]["tiers"]["lmdb"]["entries"] == 2, "both are written")
        assert not client.leases(check=True)["problems"]
    with sidecar, sidecar.connect(foreign=model) as client, sidecar.connect() as own:
        assert client.lookup([key]) == ["store"]
        with client.encode([None], keys=[key])[0] as lease:
            assert lease.origin == "store"
            assert torch.equal(lease.tensor, rows(7, "float16"))
        assert own.lookup([own.key(image(712))]) == ["store"]


def test_a_reload_drops_what_was_served_and_nothing_else(tmp_path: Path) -> None:
    first, second = (write_checkpoint(tmp_path / name, seed) for name, seed in (("one", 1), ("two", 2)))
    with SidecarProcess(tmp_path, model=str(first)) as sidecar, sidecar.connect(foreign=MODELS["float32"]) as client:
        key = client.named_key("test", "kept")
        client.put(key, rows(8, "float32"), GRID)
        with sidecar.connect() as own:
            own.encode([image(713)])[0].release()
            own.reload(second)
            assert own.lookup([own.key(image(713))]) == [None]
        assert client.lookup([key]) == ["pool"]
        assert (client.fingerprint, client.dtype) == MODELS["float32"]
        with client.encode([None], keys=[key])[0] as lease:
            assert torch.equal(lease.tensor, rows(8, "float32"))
        assert not client.leases(check=True)["problems"]


def test_a_key_is_evicted_of_its_own_model_alone(stored: SidecarProcess) -> None:
    connect = stored.connect
    with connect(foreign=MODELS["float32"]) as one, connect(foreign=MODELS["float16"]) as two:
        key = one.named_key("test", "evicted")
        one.put(key, rows(9, "float32"), GRID)
        two.put(key, rows(9, "float16"), GRID)
        one.evict([key])
        assert one.lookup([key]) == [None]
        assert two.lookup([key]) == ["pool"]
        two.evict(fingerprint=two.fingerprint)
        assert two.lookup([key]) == [None]


def test_a_model_is_checked_where_it_is_named(stored: SidecarProcess) -> None:
    with pytest.raises(ValueError, match="dtype must be one of"):
        stored.connect(foreign=mmcache.ForeignModel(Fingerprint(bytes(16)), "int8"))
