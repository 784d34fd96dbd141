"""`mmcache leases --check` over books that are wrong, as no sidecar's should ever be."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ipc.control import ControlMemory
from ipc.leases import Holder
from ipc.pool import Extent, Pool
from mmcache.cli import leases as command
from mmcache.cli.app import run
from mmcache.server.books import problems
from mmcache.server.ingest import Ingest
from mmcache.server.staging import StagingDesk


class Home:
    """What the check looks at: a pool of three entries, of which one is leased and one offered."""

    def __init__(self) -> None:
        self.pool = Pool(1, 1 << 16, on_evict=lambda _: None)
        self.holder = Holder(ControlMemory.create(64), "engine", 7)
        self.memories = {1: SimpleNamespace(pool=self.pool)}
        self.pools = SimpleNamespace(pools=[self.pool], memories=self.memories, num_to_discard=0, index={})
        self.connections = [SimpleNamespace(holder=self.holder), SimpleNamespace(holder=None)]
        self.ingest = Ingest(1 << 16)
        self.staging = StagingDesk(1 << 16, 1 << 16)
        self.pools.index = self.index = {bytes([number]) * 16: self.entry(bytes([number]) * 16) for number in range(3)}
        first, second, self.third = self.index.values()
        self.holder.grant(first)
        self.holder.offer(second, 2)

    def entry(self, key: bytes) -> Extent:
        extent = self.pool.reserve(1000)
        assert extent is not None
        self.pool.publish(extent, key, 1.0, b"")
        return extent

    def lose_an_entry(self) -> None:
        del self.index[bytes([2]) * 16]

    def keep_one_too_many(self) -> None:
        self.pool.discard(self.third)

    def miscount_shares(self) -> None:
        self.third.num_shares = 1

    def forget_a_holder(self) -> None:
        self.connections.clear()

    def miscount_ingest(self) -> None:
        self.ingest.bytes_used += 1

    def miscount_holder(self) -> None:
        self.holder.num_granted += 1


@pytest.mark.parametrize(
    ("harm", "places"),
    [
        (lambda _: None, []),
        (Home.lose_an_entry, ["index"]),
        (Home.keep_one_too_many, ["index"]),
        (Home.miscount_shares, ["pool 1", "leases"]),
        (Home.forget_a_holder, ["leases"]),
        (Home.miscount_ingest, ["ingest region"]),
        (Home.miscount_holder, ["holder engine (pid 7)"]),
    ],
)
def test_what_does_not_agree_is_said(harm: Callable[[Home], None], places: list[str]) -> None:
    home: Any = Home()
    harm(home)
    assert [problem.split(": ")[0] for problem in problems(home)] == places


def test_extents_of_a_replaced_model_are_no_problem() -> None:
    """They are given up a few at a time, and found by nobody meanwhile."""
    home: Any = Home()
    home.lose_an_entry()
    home.pools.num_to_discard = 1
    assert problems(home) == []


def test_problems_are_an_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        "holders": [],
        "leases": [],
        "kept": [],
        "quarantined": {"leases": 0, "bytes_staged": 0},
        "problems": ["pool 1: torn"],
    }

    class Client:
        def leases(self, limit: int, *, pid: int | None, check: bool) -> dict[str, Any]:
            assert check
            return found

    monkeypatch.setattr(command, "connect", lambda *_, **__: contextlib.nullcontext(Client()))
    assert run(["leases", "--check"]) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("nothing is held\n", "mmcache: pool 1: torn\n")
