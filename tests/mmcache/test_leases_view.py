"""Who holds what since when, what is quarantined and why, and what the lease limit does about it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.mmcache.support import MMCACHE, SidecarProcess, clean_environ, eventually, image, is_alive

HOLDER = """
import sys
import mmcache
from tests.mmcache.support import image
client = mmcache.connect(sys.argv[1], name="engine")
leases = client.encode([image(seed) for seed in range(3)])
tensor = leases[0].hold()
exec(sys.argv[2])
print("holding", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Engine:
    """A client process that holds three leases, the first in a tensor, and does what it is told."""

    def __init__(self, sidecar: SidecarProcess, first: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(sidecar.socket), first],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_environ(),
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    def holds(self) -> None:
        assert self._line() == "holding\n"

    def do(self, code: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{code}\n")
        self.process.stdin.flush()
        assert self._line() == "done\n"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@contextmanager
def engine(sidecar: SidecarProcess, first: str = "", *, lives: bool = True) -> Iterator[Engine]:
    made = Engine(sidecar, first)
    try:
        if lives:
            made.holds()
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


def of(found: dict[str, Any], pid: int) -> dict[str, Any]:
    """A process's row among the holders."""
    (row,) = [row for row in found["holders"] if row["pid"] == pid]
    assert isinstance(row, dict)
    return row


def command(sidecar: SidecarProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MMCACHE, "leases", "--socket", str(sidecar.socket), *arguments],
        capture_output=True, text=True, timeout=60, env=clean_environ(), check=False,
    )  # fmt: skip


def test_who_holds_what_since_when(sidecar: SidecarProcess) -> None:
    with engine(sidecar) as process, sidecar.connect(name="observer") as client:
        (mine,) = client.encode([image(1)])
        found = client.leases(check=True)
        assert found["problems"] == []
        assert (found["num_leases"], found["quarantined"]) == (
            4,
            {"holders": 0, "leases": 0, "bytes": 0, "bytes_staged": 0},
        )
        row = of(found, process.pid)
        assert (row["name"], row["state"], row["why"], row["leases"]) == ("engine", "connected", "", 3)
        assert row["bytes"] == 3 * mine.nbytes
        assert of(found, os.getpid())["leases"] == 1
        ages = [lease["seconds"] for lease in found["leases"]]
        assert ages == sorted(ages, reverse=True), "the oldest first"
        assert row["oldest_seconds"] == ages[0]
        youngest = found["leases"][-1]
        assert youngest == {
            "key": str(mine.key), "bytes": mine.nbytes, "tokens": mine.num_tokens, "pool": youngest["pool"],
            "seconds": youngest["seconds"], "state": "held", "why": "", "pid": os.getpid(), "holder": "observer",
        }  # fmt: skip
        assert {lease["key"] for lease in found["leases"]} == {str(client.key(image(seed))) for seed in range(3)}
        limited = client.leases(2)
        assert (limited["num_leases"], [lease["pid"] for lease in limited["leases"]]) == (4, [process.pid] * 2)
        mine.release()
        assert client.leases(0)["num_leases"] == 3


def test_a_closed_socket_quarantines_until_the_last_read(sidecar: SidecarProcess) -> None:
    with engine(sidecar) as process, sidecar.connect() as client:
        process.do("client.close()")
        eventually(lambda: of(client.leases(), process.pid)["state"] == "quarantined", "its socket is closed")
        found = client.leases(check=True)
        row = of(found, process.pid)
        assert (row["leases"], row["quarantined"], row["why"]) == (1, 1, "its socket is closed and it lives")
        assert found["quarantined"] == {"holders": 1, "leases": 1, "bytes": row["bytes"], "bytes_staged": 0}
        (lease,) = found["leases"]
        assert (lease["state"], lease["why"], lease["holder"]) == ("quarantined", row["why"], "engine")
        assert found["problems"] == []
        process.do("del tensor, leases")
        eventually(lambda: client.leases()["num_holders"] == 1, "the tensor's end acknowledges it")


def test_offers_are_counted(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        (lease,) = client.encode([image(1)], consumers=3)
        assert of(client.leases(), os.getpid())["offered_unclaimed"] == 3
        client.open(lease.ref).release()
        found = client.leases(check=True)
        assert (of(found, os.getpid())["offered_unclaimed"], found["problems"]) == (2, [])
        client.cancel(lease.ref)
        lease.release()
        assert of(client.leases(), os.getpid())["offered_unclaimed"] == 0


def test_what_is_staged_is_counted(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        ref = client.stage(image(1))
        found = client.leases(check=True)
        row = of(found, os.getpid())
        assert (row["staged"], row["why"], found["problems"]) == (1, "", [])
        assert row["bytes_staged"] >= ref.nbytes
        client.cancel(ref)
        assert of(client.leases(), os.getpid())["staged"] == 0


def test_over_the_limit_is_quarantined_once_and_still_reads(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, lease_limit_s="0.3") as sidecar, sidecar.connect() as client:
        leases = client.encode([image(1), image(2)])
        expected = leases[0].numpy().copy()
        eventually(lambda: client.stats()["leases"]["over_limit"] == 2, "both are over the limit")
        stats = client.stats()["leases"]
        assert (stats["active"], stats["quarantined"], stats["killed"]) == (2, 2, 0)
        found = client.leases(check=True)
        row = of(found, os.getpid())
        assert (row["state"], row["quarantined"]) == ("connected", 2)
        assert row["why"] == "held longer than lease_limit_s = 0.3"
        assert {lease["why"] for lease in found["leases"]} == {row["why"]}
        assert (found["quarantined"]["leases"], found["problems"]) == (2, [])
        np.testing.assert_array_equal(leases[0].numpy(), expected)
        leases[0].release()
        (third,) = client.encode([image(3)])
        eventually(lambda: client.stats()["leases"]["over_limit"] == 3, "and so is the next")
        for lease in (leases[1], third):
            lease.release()
        eventually(lambda: client.stats()["leases"]["quarantined"] == 0, "an acknowledgement ends it")
        assert client.stats()["leases"]["over_limit"] == 3
    logged = re.findall(r"has (\d) leases .*\(lease_limit_s\): they are quarantined", sidecar.log())
    assert sum(map(int, logged)) == 3, "each is logged once"


@pytest.mark.parametrize("first", ["", "client.close()"])
def test_over_the_limit_is_killed(tmp_path: Path, first: str) -> None:
    """Also when its socket is closed: its pidfd is not. Who holds nothing is left alone."""
    with (
        SidecarProcess(tmp_path, lease_limit_s="1", lease_limit_action="kill") as sidecar,
        sidecar.connect() as client,
        engine(sidecar, first, lives=False) as process,
    ):
        eventually(lambda: not is_alive(process.pid), "it is killed")
        eventually(lambda: client.stats()["leases"]["active"] == 0, "its leases end with it")
        stats, found = client.stats()["leases"], client.leases(check=True)
    assert (stats["killed"], stats["active"], stats["quarantined"], found["problems"]) == (1, 0, 0, [])
    assert 1 <= stats["over_limit"] <= 3, "what it held when it was killed"
    assert re.search(rf"engine \(pid {process.pid}\) has \d leases .*its process is killed", sidecar.log())


def test_the_command(sidecar: SidecarProcess) -> None:
    done = command(sidecar, "--check")
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (
        0, ["nothing is held", "", "the books agree"], "",
    )  # fmt: skip
    with engine(sidecar) as process, sidecar.connect(name="of\x1btest") as client:
        (mine,) = client.encode([image(1)])
        done = command(sidecar)
        assert done.returncode == 0, done.stderr
        heads, first, second, empty, lease_heads, *leases = done.stdout.splitlines()
        assert heads.split()[:4] == ["HOLDER", "PID", "STATE", "LEASES"]
        assert first.split()[:4] == ["engine", str(process.pid), "connected", "3"], "who holds most comes first"
        assert second.split()[:4] == ["of?test", str(os.getpid()), "connected", "1"], "no terminal obeys a name"
        assert (empty, lease_heads.split()[0], len(leases)) == ("", "KEY", 4)
        assert leases[-1].split()[0] == str(mine.key)[:12]
        assert "and 3 younger leases" in command(sidecar, "--limit", "1").stdout
        found = json.loads(command(sidecar, "--json", "--check", "--pid", str(process.pid)).stdout)
        assert [row["pid"] for row in found["holders"]] == [process.pid]
        assert {lease["pid"] for lease in found["leases"]} == {process.pid}
        assert (found["num_leases"], found["problems"]) == (4, [])
        process.do("client.close()")
        eventually(lambda: client.leases()["quarantined"]["leases"] == 1, "its socket is closed")
        done = command(sidecar, "--pid", str(process.pid))
        assert "its socket is closed and it lives" in done.stdout
        assert "quarantined: 1 leases" in done.stdout
        mine.release()


def test_help() -> None:
    done = subprocess.run(
        [*MMCACHE, "leases", "--help"], capture_output=True, text=True, env=clean_environ(), check=False
    )
    assert done.returncode == 0
    for flag in ("--json", "--limit", "--check", "--pid", "--socket", "--timeout"):
        assert flag in done.stdout


def test_without_a_sidecar_it_is_one_clear_line(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path) as sidecar:
        sidecar.kill()
        done = command(sidecar)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert "mmcache serve" in done.stderr


@pytest.mark.parametrize("limit", ["-1", "10001", "x"])
def test_a_wrong_limit_is_status_2(tmp_path: Path, limit: str) -> None:
    assert command(SidecarProcess(tmp_path), "--limit", limit).returncode == 2


def test_a_long_list_fits_into_a_frame(sidecar: SidecarProcess) -> None:
    """Names of the longest kind, each character six bytes of JSON."""
    with sidecar.connect(name="\x01" * 128) as client:
        leases = client.encode([image(1)] * 10_000)
        found = client.leases(10_000, check=True)
        assert (found["num_leases"], found["problems"]) == (10_000, [])
        assert 1000 < len(found["leases"]) < 10_000
        for lease in leases:
            lease.release()
