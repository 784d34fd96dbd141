"""What containers do to a sidecar and its clients, done without any: each in process, mount, network, IPC and host
name namespaces of its own, with nothing in common but the folder of the socket."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mmcache
from tests.mmcache.places import digest
from tests.mmcache.support import SidecarProcess, clean_environ, eventually, image, is_alive

NAMESPACES = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--ipc", "--uts", "--net"]
if os.geteuid() != 0:
    NAMESPACES += ["--user", "--map-root-user"]
ROOT = Path(__file__).parents[2]

ENGINE = """
import hashlib, os, sys
import mmcache
from tests.mmcache.support import image
client = mmcache.connect(sys.argv[1], name="engine")
(lease,) = client.encode([image(7)])
print(os.getpid(), hashlib.sha256(lease.numpy().tobytes()).hexdigest(), flush=True)
sys.stdin.readline()
view = lease.numpy()
lease.release()
client.close()
print("done", flush=True)
"""
READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && ! touch "$0/x" 2>/dev/null && exec "$@"'


def can_unshare() -> bool:
    try:
        return subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not can_unshare(), reason="namespaces may not be made here")


def child_of(pid: int) -> int:
    """The process that is the first of its namespace."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 1, children
    return int(children[0])


class Contained(SidecarProcess):
    """A sidecar that is process 1 of namespaces of its own, as in a container without an init."""

    def __init__(self, folder: Path, **settings: str) -> None:
        super().__init__(folder, **settings)
        self._command = [*NAMESPACES, *self._command]

    def send_signal(self, number: int) -> None:
        os.kill(child_of(self.pid), number)


@pytest.fixture(scope="module")
def contained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with Contained(tmp_path_factory.mktemp("contained"), lease_limit_s="1", lease_limit_action="kill") as sidecar:
        yield sidecar


@contextmanager
def engine(sidecar: SidecarProcess, *prefix: str) -> Iterator[subprocess.Popen[str]]:
    """A client in namespaces of its own, which ends with the test."""
    command = [*NAMESPACES, *prefix, sys.executable, "-c", ENGINE, str(sidecar.socket)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=clean_environ()
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def answer(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def active(sidecar: SidecarProcess) -> int:
    number = sidecar.stats()["leases"]["active"]
    assert isinstance(number, int)
    return number


def expected(sidecar: SidecarProcess) -> str:
    """What a client beside the sidecar gets."""
    with sidecar.connect() as client:
        (lease,) = client.encode([image(7)])
        found = digest(lease)
        lease.release()
    return found


def test_descriptors_cross_containers(contained: SidecarProcess) -> None:
    with engine(contained) as process:
        pid, found = answer(process)
        assert int(pid) < 10, "its processes are numbered anew"
        assert found == expected(contained)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert answer(process) == ["done"]
        eventually(lambda: active(contained) == 0, "its lease ends by its acknowledgement")


def test_the_socket_may_be_mounted_read_only(contained: SidecarProcess) -> None:
    with engine(contained, "sh", "-c", READ_ONLY, str(contained.folder)) as process:
        _, found = answer(process)
        assert found == expected(contained)


def test_the_death_of_a_container_ends_its_leases(contained: SidecarProcess) -> None:
    with engine(contained) as process:
        answer(process)
        assert active(contained) == 1
        os.kill(child_of(process.pid), signal.SIGKILL)
        eventually(lambda: active(contained) == 0, "its process is known to be dead")


def holders(client: mmcache.Client) -> list[dict[str, Any]]:
    return [each for each in client.leases()["holders"] if each["name"] == "engine"]


def test_a_process_of_another_container_has_no_number_and_is_not_killed(contained: SidecarProcess) -> None:
    """The lease limit counts it; to kill it, the two must see each other's processes."""
    with engine(contained) as process, contained.connect() as client:
        answer(process)
        eventually(lambda: bool(client.stats()["leases"]["over_limit"]), "the lease meets the limit", 60)
        assert [holder["pid"] for holder in holders(client)] == [0]
        assert client.stats()["leases"]["killed"] == 0
        assert is_alive(child_of(process.pid))
    assert "its process cannot be killed" in contained.log()


def test_it_drains_as_the_first_process(tmp_path: Path) -> None:
    """Signals reach process 1 only if it handles them, and nobody else waits for its children."""
    sidecar = Contained(tmp_path).start()
    with sidecar.connect() as client:
        client.encode([image(1)])[0].release()
    assert sidecar.stop() == 0
    assert not sidecar.socket.exists()
    assert "stopping" in sidecar.log()
