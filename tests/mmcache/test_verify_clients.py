"""Verification with clients that send nothing, too late, lies, or die; and processes that die meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

import mmcache
from mmcache.media import describe
from mmcache.server.verify import PATIENCE_S
from mmcache.supplying import Supplying
from tests.mmcache.support import SidecarProcess, clean_environ, eventually, image
from tests.mmcache.verifications import counts, encode, is_at_rest, verifying


def misbehave(client: mmcache.Client, verify: Callable[[Supplying], None]) -> None:
    """Have a client do something else than send the bytes of hits."""
    core = client._core
    supply = core.supply
    core.supply = lambda core, asked: verify(asked) if asked.verify else supply(core, asked)


def send(client: mmcache.Client, asked: Supplying) -> None:
    """What a client does with bytes that are asked for."""
    asked.prepare()
    client._core.supplied(asked)


def test_a_client_that_sends_too_late_or_never(tmp_path: Path) -> None:
    asked: list[Supplying] = []
    with verifying(tmp_path) as sidecar, sidecar.connect() as client:
        misbehave(client, asked.append)
        encode(client, 1)
        assert encode(client, 1)[0] == "pool"
        assert asked
        assert counts(sidecar)["dropped"] == 0
        eventually(lambda: counts(sidecar)["dropped"] == 1, "it is not waited for", PATIENCE_S + 20)
        send(client, asked[0])
        assert encode(client, 1)[0] == "pool", "bytes that nobody waits for any more do no harm"
        assert counts(sidecar)["matched"] == 0


def test_a_liar_is_dropped_and_removes_nothing(tmp_path: Path) -> None:
    with verifying(tmp_path) as sidecar, sidecar.connect() as client:

        def lie(asked: Supplying) -> None:
            for position in asked.verify:
                asked.pending.part._media[position] = describe(image(99), 0, 1 << 20)
            send(client, asked)

        encode(client, 1)
        misbehave(client, lie)
        assert encode(client, 1)[0] == "pool"
        eventually(lambda: counts(sidecar)["dropped"] == 1, "the lie is dropped")
        assert encode(client, 1)[0] == "pool"
        stats = sidecar.stats()
        assert (stats["verify"]["mismatched"], stats["errors"]) == (0, {})


DYING = """
import os, sys, time
import mmcache
from tests.mmcache.support import image
client = mmcache.connect(sys.argv[1])
client.encode([image(1)])[0].release()
def verify(core, asked):
    assert asked.verify
    if sys.argv[2] == "supplied":
        asked.prepare()
        core.supplied(asked)
        client._pump.channel.send_all(client._core.outbox, time.monotonic() + 10)
    print("asked", flush=True)
    time.sleep(600)
client._core.supply = verify
client.encode([image(1)])
"""


@pytest.mark.parametrize("sent", ["nothing", "supplied"])
def test_the_death_of_a_client_in_between_leaves_nothing(tmp_path: Path, sent: str) -> None:
    with verifying(tmp_path) as sidecar:
        process = subprocess.Popen(
            [sys.executable, "-c", DYING, str(sidecar.socket), sent],
            stdout=subprocess.PIPE, text=True, env=clean_environ(),
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"
        process.kill()
        process.communicate()
        outcome = "matched" if sent == "supplied" else "dropped"
        eventually(lambda: counts(sidecar)[outcome] == 1, "the verification ends")
        eventually(lambda: is_at_rest(sidecar) and sidecar.stats()["leases"]["active"] == 0, "nothing is left")
        with sidecar.connect() as client:
            assert encode(client, 1)[0] == "pool"


def is_back(sidecar: SidecarProcess, num_restarts: int) -> bool:
    ranks = sidecar.stats()["ranks"]
    return bool(ranks["restarts"] == num_restarts and ranks["ready"] == 1)


def test_a_rank_killed_in_between_is_no_mismatch(tmp_path: Path) -> None:
    with verifying(tmp_path) as sidecar, sidecar.connect() as client:
        for round_ in range(4):
            encode(client, 1)
            encode(client, 1)
            os.kill(sidecar.stats()["ranks"]["pids"][0], signal.SIGKILL)
            eventually(partial(is_back, sidecar, round_ + 1), "the rank is replaced")
        eventually(lambda: is_at_rest(sidecar), "nothing is left")
        assert counts(sidecar)["mismatched"] == 0


def test_a_shutdown_does_not_wait_for_it(tmp_path: Path) -> None:
    with verifying(tmp_path, drain_timeout_s="60") as sidecar, sidecar.connect() as client:
        asked: list[Sequence[int]] = []
        misbehave(client, lambda supplying: asked.append(supplying.verify))
        encode(client, 1)
        encode(client, 1)
        assert asked == [[0]]
        assert sidecar.stop() == 0
        assert "Traceback" not in sidecar.log()
