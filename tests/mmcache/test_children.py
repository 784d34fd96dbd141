"""How a process of the sidecar ended, as it is told: by its own status, if it was ending by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mmcache.server import children
from mmcache.server.channel import Poller
from mmcache.server.children import Child

CLOSES_AND_ENDS = "import os, sys, time\nos.close(int(sys.argv[1]))\ntime.sleep(0.3)\nsys.exit(3)\n"
CLOSES_AND_STAYS = "import os, sys, time\nos.close(int(sys.argv[1]))\ntime.sleep(600)\n"
RAISES = "import sys\nraise SystemExit(5)\n"


def reason_of(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> str:
    """Run a child of this code to its end."""
    (folder / "the_child.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))

    async def run() -> str:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        Child(Poller(loop), "the_child", lambda _: None, ended.set_result, {})
        return str(await asyncio.wait_for(ended, 60))

    return asyncio.run(run())


def test_a_child_that_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter closes its sockets some time before it is gone."""
    assert reason_of(tmp_path, monkeypatch, CLOSES_AND_ENDS).endswith(") ended with status 3")
    assert reason_of(tmp_path, monkeypatch, RAISES).endswith(") ended with status 5")


def test_a_child_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "END_GRACE_S", 0.2)
    reason = reason_of(tmp_path, monkeypatch, CLOSES_AND_STAYS)
    assert "ended with SIGKILL, which was sent because the other end closed the connection" in reason
