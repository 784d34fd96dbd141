"""References: shares that other processes claim, and what ends them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mmcache
from mmcache.keys import checksum
from tests.mmcache.support import SidecarProcess, clean_environ, eventually, image

CONSUMER = """
import json, sys
import mmcache
from mmcache.keys import checksum
with mmcache.connect(sys.argv[1]) as client:
    for line in sys.stdin:
        ref = mmcache.SliceRef.of(json.loads(line))
        try:
            with client.open(ref) as lease:
                print(checksum(lease.numpy()), lease.key, lease.grid_thw, lease.num_tokens, flush=True)
        except mmcache.SliceGone as error:
            print("gone", flush=True)
"""


def consumer(sidecar: SidecarProcess) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CONSUMER, str(sidecar.socket)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=clean_environ(PYTHONPATH="."),
    )  # fmt: skip


def opened(process: subprocess.Popen[str], ref: mmcache.SliceRef) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(ref) + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_each_consumer_claims_its_share_once(sidecar: SidecarProcess) -> None:
    consumers = [consumer(sidecar) for _ in range(2)]
    try:
        with sidecar.connect() as client:
            (lease,) = client.encode([image(1)], consumers=3)
            expected = f"{checksum(lease.numpy())} {lease.key} {lease.grid_thw} {lease.num_tokens}"
            ref = lease.ref
            assert (ref.num_tokens, ref.dim, ref.dtype, ref.nbytes) == (
                lease.num_tokens, lease.dim, lease.dtype, lease.nbytes,
            )  # fmt: skip
            lease.release()
            assert [opened(process, ref) for process in consumers] == [expected, expected]
            assert opened(consumers[0], ref) == expected, "a third share, whoever takes it"
            assert opened(consumers[1], ref) == "gone"
            eventually(lambda: client.stats()["leases"]["active"] == 0, "all were released")
            assert client.stats()["pool"]["bytes_leased"] == 0
    finally:
        for process in consumers:
            process.communicate()


def test_a_hit_and_a_miss_offer_alike_and_each_position_its_own(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client, sidecar.connect() as other:
        client.encode([image(1)])[0].release()
        leases = client.encode([image(1), image(2), image(1)], consumers=1)
        refs = [lease.ref for lease in leases]
        assert len({ref.token for ref in refs}) == 3
        copies = other.open(refs)
        for lease, copy in zip(leases, copies, strict=True):
            np.testing.assert_array_equal(lease.numpy(), copy.numpy())
            assert (copy.key, copy.fingerprint, copy.origin) == (lease.key, lease.fingerprint, "pool")
            lease.release()
            copy.release()


def test_what_is_unclaimed_ends_with_its_requester(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as other:
        client = sidecar.connect()
        (lease,) = client.encode([image(1)], consumers=2)
        ref = lease.ref
        with other.open(ref) as copy:
            expected = lease.numpy().copy()
            client.close()
            with pytest.raises(mmcache.SliceGone, match="is over"):
                other.open(ref)
            np.testing.assert_array_equal(copy.numpy(), expected)
        assert other.stats()["pool"]["bytes_leased"] == 0


def test_a_killed_requester_leaves_nothing_unclaimed(sidecar: SidecarProcess) -> None:
    code = (
        "import json, sys, time, mmcache\nfrom tests.mmcache.support import image\n"
        "client = mmcache.connect(sys.argv[1])\n(lease,) = client.encode([image(1)], consumers=2)\n"
        "print(json.dumps(lease.ref), flush=True)\ntime.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(sidecar.socket)], stdout=subprocess.PIPE, text=True,
        env=clean_environ(PYTHONPATH="."),
    )  # fmt: skip
    assert process.stdout is not None
    ref = mmcache.SliceRef.of(json.loads(process.stdout.readline()))
    with sidecar.connect() as other:
        lease = other.open(ref)
        process.kill()
        process.wait()
        process.stdout.close()
        eventually(lambda: other.stats()["leases"]["connections"] == 1, "its death was seen")
        with pytest.raises(mmcache.SliceGone):
            other.open(ref)
        assert lease.numpy().shape == (lease.num_tokens, lease.dim)
        lease.release()
        assert other.stats()["pool"]["bytes_leased"] == 0


def test_cancel_ends_what_is_unclaimed_and_only_ones_own(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client, sidecar.connect() as other:
        (lease,) = client.encode([image(1)], consumers=3)
        other.cancel(lease.ref)
        first = other.open(lease.ref)
        client.cancel(lease.ref)
        client.stats()
        with pytest.raises(mmcache.SliceGone):
            other.open(lease.ref)
        client.cancel(lease.ref)
        np.testing.assert_array_equal(first.numpy(), lease.numpy())
        first.release()
        lease.release()
        assert client.stats()["pool"]["bytes_leased"] == 0


def test_a_token_is_worth_nothing_in_another_namespace_or_made_up(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client, sidecar.connect(namespace="other") as stranger, sidecar.connect() as friend:
        (lease,) = client.encode([image(1)], consumers=1)
        for ref in (lease.ref, lease.ref._replace(token=1), lease.ref._replace(token=2**64 - 1)):
            with pytest.raises(mmcache.SliceGone):
                stranger.open(ref)
        results = friend.open([lease.ref._replace(token=5), lease.ref], errors="return")
        assert isinstance(results[0], mmcache.SliceGone)
        assert results[0].index == 0
        results[1].release()
        lease.release()


def test_an_offered_extent_is_not_evicted(tmp_path: Path) -> None:
    """The requester has released; nobody has come yet; the pool is churned."""
    with SidecarProcess(tmp_path, pool_bytes="1MiB") as sidecar, sidecar.connect() as client:
        (lease,) = client.encode([image(1, 448, 448)], consumers=1)
        expected, ref = lease.numpy().copy(), lease.ref
        lease.release()
        for seed in range(2, 12):
            client.encode([image(seed, 448, 448)])[0].release()
        assert client.stats()["pool"]["evictions"] >= 7
        with sidecar.connect() as other, other.open(ref) as copy:
            np.testing.assert_array_equal(copy.numpy(), expected)
        assert client.stats()["pool"]["bytes_leased"] == 0, "once claimed and released it is evictable"


def test_a_call_that_is_given_up_offers_nothing(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        client.encode([image(1)])[0].release()
        handle = client.submit([image(1)], consumers=4)
        handle.cancel()
        client.stats()
        assert client.stats()["pool"]["bytes_leased"] == 0


def test_references_are_plain_data() -> None:
    ref = mmcache.SliceRef(2**64 - 1, "0" * 32, "1" * 32, "bfloat16", 3, 4, 24, (1, 2, 6))
    assert mmcache.SliceRef.of(json.loads(json.dumps(ref))) == ref
    assert len(json.dumps(ref)) < 200
    for wrong in ([], list(ref)[:-1], [2**64, *ref[1:]], [-1, *ref[1:]], [1, "zz", *ref[2:]], ["7", *ref[1:]]):
        with pytest.raises(ValueError, match="not a SliceRef"):
            mmcache.SliceRef.of(wrong)


def test_wrong_uses_are_named(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        with client.encode([image(1)])[0] as lease, pytest.raises(ValueError, match="consumers=N"):
            _ = lease.ref
        with pytest.raises(TypeError, match=r"SliceRef\.of"):
            client.open([(1, 2)])  # type: ignore[list-item]
        for consumers in (-1, 1025):
            with pytest.raises(ValueError, match="0 to 1024"):
                client.encode([image(1)], consumers=consumers)
