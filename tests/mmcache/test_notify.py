"""systemd hears of the sidecar over a real datagram socket, and its unit is one that systemd understands."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mmcache.cli.app import cli
from mmcache.config import Settings
from mmcache.config_sources import load_settings
from mmcache.server.notify import Notifier
from tests.mmcache.support import SidecarProcess, eventually

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "mmcache.service"


class Manager:
    """What hears."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.setblocking(False)
        self.heard: list[dict[str, str]] = []

    def listen(self) -> list[dict[str, str]]:
        while True:
            try:
                text = self._socket.recv(4096).decode()
            except BlockingIOError:
                return self.heard
            self.heard.append(dict(line.split("=", 1) for line in text.split("\n")))

    def num(self, name: str) -> int:
        return sum(name in each for each in self.listen())

    def close(self) -> None:
        self._socket.close()


@contextmanager
def manager(address: str) -> Iterator[Manager]:
    hears = Manager(address)
    try:
        yield hears
    finally:
        hears.close()


def test_a_sidecar_is_ready_alive_and_stopping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", f"{tmp_path}/notify")
    monkeypatch.setenv("WATCHDOG_USEC", "100000")
    with manager(f"{tmp_path}/notify") as hears:
        sidecar = SidecarProcess(tmp_path)
        sidecar.launch()
        assert hears.listen() == [], "it is not ready before it is"
        sidecar.wait_ready()
        eventually(lambda: hears.num("WATCHDOG") >= 3, "its loop turns")
        assert hears.heard[0] == {"READY": "1", "STATUS": f"serving moonvit-tiny on {sidecar.socket}"}
        assert hears.num("STOPPING") == 0
        assert sidecar.stop() == 0
        assert hears.num("STOPPING") == 1
        assert hears.num("READY") == 1
        assert {"READY", "STATUS", "WATCHDOG", "STOPPING"} == set().union(*hears.heard)


def test_a_sidecar_that_cannot_start_is_never_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", f"{tmp_path}/notify")
    with manager(f"{tmp_path}/notify") as hears:
        sidecar = SidecarProcess(tmp_path, pool_bytes="10TiB")
        sidecar.launch()
        assert sidecar.wait(120) != 0
        assert hears.num("READY") == 0


def test_a_name_in_the_abstract_namespace() -> None:
    with manager(f"\0mmcache-test-{os.getpid()}") as hears:
        notifier = Notifier({"NOTIFY_SOCKET": f"@mmcache-test-{os.getpid()}"}, os.getpid())
        notifier.ready("two\nlines")
        notifier.stopping("now")
        assert hears.listen() == [{"READY": "1", "STATUS": "two lines"}, {"STOPPING": "1", "STATUS": "now"}]


@pytest.mark.parametrize(
    "environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}, {"NOTIFY_SOCKET": "/nonexistent/notify"}]
)
def test_nobody_hears(environ: dict[str, str]) -> None:
    """That is no reason to end."""
    notifier = Notifier(environ, os.getpid())
    notifier.ready("serving")
    notifier.stopping("now")
    notifier.close()


@pytest.mark.parametrize(
    ("environ", "hears_watchdog"),
    [
        ({"WATCHDOG_USEC": "1000"}, True),
        ({"WATCHDOG_USEC": "1000", "WATCHDOG_PID": str(os.getpid())}, True),
        ({"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, False),
        ({"WATCHDOG_USEC": "soon"}, False),
        ({"WATCHDOG_USEC": "-5"}, False),
        ({}, False),
    ],
)
def test_whose_watchdog_it_is(tmp_path: Path, environ: dict[str, str], hears_watchdog: bool) -> None:
    async def main() -> None:
        notifier = Notifier({"NOTIFY_SOCKET": f"{tmp_path}/notify"} | environ, os.getpid())
        notifier.ready("serving")
        if hears_watchdog:
            await asyncio.to_thread(eventually, lambda: hears.num("WATCHDOG") > 1, "it turns")
        notifier.close()

    with manager(f"{tmp_path}/notify") as hears:
        asyncio.run(main())
        assert (hears.num("WATCHDOG") > 0) == hears_watchdog


def entries() -> list[tuple[str, str]]:
    lines = UNIT.read_text().splitlines()
    return [(name, value) for name, _, value in (line.partition("=") for line in lines if line[:1] not in "#[")]


def unit_settings() -> Settings:
    found = dict(entries())
    _, command, *arguments = shlex.split(found["ExecStart"])
    assert command == "serve"
    flags = dict(cli.commands[command].make_context(command, arguments).params)
    environ = dict(value.split("=", 1) for name, value in entries() if name == "Environment")
    return load_settings(flags, environ, flags.pop("config"))


def test_the_units_command_is_understood() -> None:
    found, settings = dict(entries()), unit_settings()
    assert str(settings.state) == f"/var/lib/{found['StateDirectory']}"
    assert settings.socket.parent == Path("/run") / found["RuntimeDirectory"]
    assert float(found["TimeoutStopSec"].removesuffix("s")) > settings.drain_timeout_s
    assert found["RestartPreventExitStatus"] == "2"
    _, command, *arguments = shlex.split(found["ExecReload"])
    assert cli.commands[command].make_context(command, arguments)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("mmcache")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/mmcache/bin/mmcache", str(program)))
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
