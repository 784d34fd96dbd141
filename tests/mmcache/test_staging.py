"""Deferred slices: pixels staged once, read once or never, by reference from any process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmcache
from mmcache.keys import KeyHasher
from tests.mmcache.staging_clients import CONSUMER, child, is_idle, staging, told
from tests.mmcache.support import SidecarProcess, eventually, image


def test_four_images_and_eight_ranks_are_four_reads_and_then_none(sidecar: SidecarProcess) -> None:
    """Each of the eight, reading eagerly, would read all four: 32."""
    pictures = [image(seed) for seed in range(4)]
    consumers = [child(CONSUMER, sidecar.socket) for _ in range(8)]
    try:
        with sidecar.connect() as client:
            misses = client.stage_all(pictures, consumers=8)
            found = [told(process, misses) for process in consumers]
            assert all(sums == found[0] for sums in found)
            assert staging(sidecar)["reads"] == 4
            hits = client.stage_all(pictures, consumers=8)
            again = [told(process, hits) for process in consumers]
            assert again == found
            counts = staging(sidecar)
            assert (counts["reads"], counts["unread"], counts["staged"]) == (4, 4, 8)
            assert sidecar.stats()["items"]["encoded"] == 4
            eventually(lambda: is_idle(sidecar), "all their consumers came: nothing is kept")
    finally:
        for process in consumers:
            process.communicate()


def test_consumers_at_the_same_time_share_one_read(sidecar: SidecarProcess) -> None:
    consumers = [child(CONSUMER, sidecar.socket) for _ in range(4)]
    try:
        with sidecar.connect() as client:
            for turn in range(5):
                refs = client.stage_all([image(100 * turn + seed, 112, 112) for seed in range(3)], consumers=4)
                with ThreadPoolExecutor(4) as threads:
                    results = list(threads.map(partial(told, line=refs), consumers))
                assert all(sums == results[0] for sums in results)
            assert staging(sidecar)["reads"] == 15
            eventually(lambda: is_idle(sidecar), "nothing is kept")
    finally:
        for process in consumers:
            process.communicate()


@pytest.mark.parametrize("kind", ["rgb", "gray", "chunk", "strided", "tensor"])
def test_staged_pixels_give_the_embedding_of_the_same_pixels(
    sidecar: SidecarProcess, tmp_path: Path, kind: str
) -> None:
    picture: Any = image(1, 70, 98)
    picture = {
        "rgb": picture, "gray": picture[..., 0], "chunk": np.stack([picture, image(2, 70, 98)]),
        "strided": np.asfortranarray(picture)[::-1, ::2], "tensor": torch.from_numpy(picture),
    }[kind]  # fmt: skip
    with sidecar.connect() as client:
        ref = client.stage(picture)
        assert client.key(ref) == client.key(picture)
        with client.encode([ref])[0] as lease:
            assert lease.origin == "encoded"
            staged = lease.numpy().copy()
        with client.encode([picture])[0] as lease:
            assert lease.origin == "pool"
            np.testing.assert_array_equal(lease.numpy(), staged)
    with (
        SidecarProcess(other_folder(tmp_path)) as other,
        other.connect() as client,
        client.encode([picture])[0] as lease,
    ):
        assert lease.origin == "encoded"
        np.testing.assert_array_equal(lease.numpy(), staged)


def other_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "other"
    folder.mkdir()
    return folder


def test_patch_rows_of_every_type(sidecar: SidecarProcess) -> None:
    """Rows that a processor of one's own made, in one request with pixels and each other."""
    rows = torch.randn(24, 3, 14, 14, generator=torch.Generator().manual_seed(1))
    staged = [rows, rows.flatten(1).half(), rows.bfloat16(), rows.numpy()]
    with sidecar.connect() as client:
        refs = client.stage_all(staged, grids=[(1, 4, 6), (1, 4, 6), (1, 6, 4), (1, 4, 6)])
        leases = client.encode([*refs, image(1)])
        assert [lease.grid_thw for lease in leases[:4]] == [(1, 4, 6), (1, 4, 6), (1, 6, 4), (1, 4, 6)]
        assert refs[0].key == refs[3].key, "a tensor and an array of the same bytes"
        exact, half = leases[0].numpy(), leases[1].numpy()
        np.testing.assert_array_equal(exact, leases[3].numpy())
        assert 0 < np.linalg.norm(exact - half) / np.linalg.norm(exact) < 1e-2
        for lease in leases:
            lease.release()
        assert is_idle(sidecar)


def test_a_false_claim_fails_its_owner_and_poisons_nobody(sidecar: SidecarProcess, monkeypatch: Any) -> None:
    truth, lie = image(1), image(2)
    with sidecar.connect() as liar, sidecar.connect() as honest:
        key = honest.key(truth)
        with monkeypatch.context() as patched:
            patched.setattr(KeyHasher, "key", lambda *_: key)
            false = liar.stage(lie)
        assert false.key == str(key)
        true = honest.stage(truth)
        handle = honest.submit([true, image(3)])
        results = liar.encode([false, image(3)], errors="return")
        if isinstance(results[0], mmcache.ItemError):
            assert isinstance(results[0], mmcache.ContentMismatch)
        else:
            results[0].release()  # the honest one came first: the lie was never read
        results[1].release()
        leases = handle.result()
        with sidecar.connect() as other:
            (lease,) = other.encode([truth])
            np.testing.assert_array_equal(lease.numpy(), leases[0].numpy())
            lease.release()
        for lease in leases:
            lease.release()
        assert is_idle(sidecar)


def test_a_lie_that_is_read_fails_alone(sidecar: SidecarProcess, monkeypatch: Any) -> None:
    with sidecar.connect() as liar, sidecar.connect() as honest:
        key = honest.key(image(1))
        with monkeypatch.context() as patched:
            patched.setattr(KeyHasher, "key", lambda *_: key)
            false = liar.stage(image(2), consumers=2)
        good = liar.stage(image(4))
        results = liar.encode([false, good], errors="return")
        assert isinstance(results[0], mmcache.ContentMismatch)
        results[1].release()
        (again,) = liar.encode([false], errors="return")
        assert isinstance(again, mmcache.SliceGone)
        assert honest.stats()["items"]["encoded"] == 1
        with honest.encode([image(1)])[0] as lease:
            assert lease.origin == "encoded"
        assert is_idle(sidecar)


def test_pixels_that_change_after_they_were_staged_are_caught(sidecar: SidecarProcess) -> None:
    """The region stays writable for its client: what a rank hashed is what it encodes."""
    with sidecar.connect() as client:
        ref = client.stage(image(1))
        assert client._core.staging is not None
        client._core.staging.array(0, 100)[:] = 7
        (result,) = client.encode([ref], errors="return")
        assert isinstance(result, mmcache.ContentMismatch)
        assert is_idle(sidecar)


def test_a_slice_serves_as_many_as_it_was_staged_for(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        ref = client.stage(image(1), consumers=2)
        for _ in range(2):
            client.encode([ref])[0].release()
        assert staging(sidecar)["bytes_used"] == 0
        client.encode([ref])[0].release()  # whoever knows the key is served what is cached
        other = client.stage(image(2))
        client.encode([other])[0].release()
        assert client.lookup([client.key(image(2))]) == ["pool"]


def test_the_embedding_stays_for_consumers_that_come_late(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, pool_bytes="1MiB") as sidecar, sidecar.connect() as client:
        ref = client.stage(image(1, 448, 448), consumers=2)
        client.encode([ref])[0].release()
        for seed in range(2, 12):
            client.encode([image(seed, 448, 448)])[0].release()
        with client.encode([ref])[0] as lease:
            assert lease.origin == "pool"
        assert staging(sidecar)["reads"] == 1


def test_cancel_frees_and_whoever_comes_then_is_told(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client, sidecar.connect() as other:
        ref = client.stage(image(1), consumers=3)
        other.cancel(ref)
        assert staging(sidecar)["bytes_used"] > 0, "only who staged it may"
        client.cancel(ref)
        client.stats()
        assert (staging(sidecar)["bytes_used"], staging(sidecar)["cancelled"]) == (0, 1)
        results = other.encode([ref, image(2)], errors="return")
        assert isinstance(results[0], mmcache.SliceGone)
        results[1].release()


def test_a_reference_is_worth_nothing_in_another_namespace_or_under_another_key(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client, sidecar.connect(namespace="other") as stranger:
        ref = client.stage(image(1))
        for wrong in (ref, ref._replace(token=1)):
            assert isinstance(stranger.encode([wrong], errors="return")[0], mmcache.SliceGone)
        assert isinstance(client.encode([ref._replace(key="0" * 32)], errors="return")[0], mmcache.SliceGone)
        client.encode([ref])[0].release()
        assert is_idle(sidecar)


def test_any_number_of_references_at_once(sidecar: SidecarProcess) -> None:
    """None, and more than one frame takes: neither costs the connection."""
    with sidecar.connect() as client:
        client.cancel()
        assert client.stage_all([]) == []
        refs = client.stage_all([np.full((4, 4, 3), number % 250, np.uint8) for number in range(1100)])
        assert len(refs) == 1100
        client.encode(refs[-1:])[0].release()
        client.cancel(*refs)
        assert client.stats()["staging"]["bytes_used"] == 0
