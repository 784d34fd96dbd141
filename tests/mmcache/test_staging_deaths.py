"""Who staged pixels, or reads them, dies or stops in the middle; and frames that lie about what was staged."""

from __future__ import annotations

import json
import mmap
import os
import signal
from typing import Any

import numpy as np
import pytest

import mmcache
from tests.mmcache.staging_clients import child, is_idle, staging
from tests.mmcache.support import SidecarProcess, eventually, image

STAGER = """
import sys, time, os, json
import mmcache
from tests.mmcache.support import image
client = mmcache.connect(sys.argv[1])
if sys.argv[2] == "torn":
    client.stage(image(3))
if sys.argv[2] in ("writing", "torn"):
    from mmcache.staging import StageCall
    def complete(self):
        if sys.argv[2] == "torn":
            client._pump.channel.close()
        print(json.dumps([self._places[0][0], str(self._keys[0]), [56, 84, 3], 14112]), flush=True)
        time.sleep(600)
    StageCall.complete = complete
ref = client.stage(image(1), consumers=2)
if sys.argv[2] == "closed":
    client._pump.channel.close()
print(json.dumps(ref), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("state", ["staged", "writing"])
def test_the_death_of_a_stager_frees_and_tells(sidecar: SidecarProcess, state: str) -> None:
    process = child(STAGER, sidecar.socket, state)
    assert process.stdout is not None
    ref = mmcache.StagedRef.of(json.loads(process.stdout.readline()))
    assert staging(sidecar)["bytes_used"] > 0
    with sidecar.connect() as client:
        handle = client.submit([ref, image(2)], errors="return") if state == "writing" else None
        process.kill()
        process.communicate()
        eventually(lambda: staging(sidecar)["regions"] == 0, "its region is gone")
        results = handle.result() if handle is not None else client.encode([ref, image(2)], errors="return")
        assert isinstance(results[0], mmcache.SliceGone)
        results[1].release()
        assert staging(sidecar)["died"] == 1
        assert is_idle(sidecar)


def test_a_socket_that_closes_while_a_live_process_writes_quarantines_that_alone(sidecar: SidecarProcess) -> None:
    process = child(STAGER, sidecar.socket, "torn")
    assert process.stdout is not None
    ref = mmcache.StagedRef.of(json.loads(process.stdout.readline()))
    with sidecar.connect() as client:

        def row() -> dict[str, Any]:
            return next(row for row in client.leases()["holders"] if row["pid"] == process.pid)

        eventually(lambda: row()["bytes_staged_quarantined"] > 0, "it may still write")
        eventually(lambda: row()["bytes_region"] <= 6 * mmap.PAGESIZE, "the rest of its 64 MiB is given back")
        found = row()
        assert (found["state"], found["staged"], found["region_seconds"] >= 0) == ("quarantined", 1, True)
        assert found["bytes_staged_quarantined"] == found["bytes_staged"] == 14336
        assert isinstance(client.encode([ref], errors="return")[0], mmcache.SliceGone)
        assert client.leases(check=True)["problems"] == []
        process.kill()
        process.communicate()
        eventually(lambda: staging(sidecar)["regions"] == 0, "it cannot write any more")
        assert (staging(sidecar)["bytes_quarantined"], staging(sidecar)["bytes_total"]) == (0, 0)


def test_a_closed_socket_of_a_live_process_that_wrote_all_of_it_keeps_nothing(sidecar: SidecarProcess) -> None:
    process = child(STAGER, sidecar.socket, "closed")
    assert process.stdout is not None
    ref = mmcache.StagedRef.of(json.loads(process.stdout.readline()))
    eventually(lambda: staging(sidecar)["regions"] == 0, "nobody needs its region")
    with sidecar.connect() as client:
        assert isinstance(client.encode([ref], errors="return")[0], mmcache.SliceGone)
        assert client.leases()["quarantined"]["holders"] == 0
        assert (staging(sidecar)["died"], process.poll()) == (1, None)
    process.kill()
    process.communicate()


def test_a_stopped_stager_is_waited_for_and_others_are_not_held_up(sidecar: SidecarProcess) -> None:
    process = child(STAGER, sidecar.socket, "writing")
    assert process.stdout is not None
    ref = mmcache.StagedRef.of(json.loads(process.stdout.readline()))
    os.kill(process.pid, signal.SIGSTOP)
    with sidecar.connect() as client, sidecar.connect(timeout=2.0) as waiting:
        handle = waiting.submit([ref], errors="return")
        with client.encode([image(1)])[0] as lease:
            assert lease.origin == "encoded", "who has the bytes of the same key is asked for them"
        for result in handle.result():
            result.release()
    process.kill()
    process.communicate()
    eventually(lambda: is_idle(sidecar), "nothing is left")


def test_a_rank_that_dies_while_it_reads_is_replaced(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        refs = client.stage_all([image(seed, 840, 1120) for seed in range(8)])
        handle = client.submit(refs)
        eventually(lambda: handle.poll() or staging(sidecar)["reads"] > 0, "it reads")
        os.kill(sidecar.stats()["ranks"]["pids"][0], signal.SIGKILL)
        leases = handle.result()
        expected = [client.encode([image(seed, 840, 1120)])[0] for seed in range(8)]
        for ours, theirs in zip(leases, expected, strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-3, atol=1e-4)
            ours.release()
            theirs.release()
        eventually(lambda: is_idle(sidecar), "nothing is left")


def test_frames_that_lie_about_staging(sidecar: SidecarProcess) -> None:
    """Tokens that were never given, of others, or twice; a header that does not fit the size it asks for."""
    with sidecar.connect() as client, sidecar.connect() as other:
        from mmcache.framing import Kind
        from mmcache.protocol import Staged, Withdraw
        from mmcache.records import TOKEN

        ref = client.stage(image(1))
        tokens = TOKEN.pack(ref.token) + TOKEN.pack(99)
        other._pump.turn(lambda core: core.tell(Kind.STAGED, Staged(), tokens))
        other._pump.turn(lambda core: core.tell(Kind.WITHDRAW, Withdraw(), tokens))
        client._pump.turn(lambda core: core.tell(Kind.STAGED, Staged(), TOKEN.pack(ref.token)))
        client.encode([ref])[0].release()
        assert is_idle(sidecar)


def test_a_slice_whose_embedding_went_with_its_rank_is_over(sidecar: SidecarProcess) -> None:
    """Its bytes were freed when it was first encoded, and have been given to another since."""
    with sidecar.connect() as client:
        ref = client.stage(image(1), consumers=3)
        client.encode([ref])[0].release()
        os.kill(sidecar.stats()["ranks"]["pids"][0], signal.SIGKILL)
        eventually(lambda: sidecar.stats()["ranks"]["restarts"] == 1, "its death was seen")
        other = client.stage(image(2))
        results = client.encode([ref, other], errors="return")
        assert isinstance(results[0], mmcache.SliceGone)
        assert "went with its rank" in results[0].reason
        results[1].release()
        assert sidecar.stats()["errors"] == {"SliceGone": 1}
        assert is_idle(sidecar)
