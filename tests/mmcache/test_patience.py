"""Clients that do not send what they were asked for: the next one is asked, where there is one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from mmcache.server import patience
from mmcache.server.flight import Flight
from mmcache.server.flows import INTERACTIVE
from tests.mmcache.scheduling import on_loop


@dataclass(eq=False)
class Waiting:
    """As much of a request as a flight needs to know whose it is."""

    connection: str
    priority: int = INTERACTIVE
    call: Any = field(default_factory=lambda: SimpleNamespace(order=0))
    open: dict[int, Flight] = field(default_factory=dict)


def test_whoever_else_waits_is_asked_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "SUPPLY_PATIENCE_S", 0.01)

    async def test() -> None:
        waiting: Any = Waiting
        asked = patience.Patience()
        supplied = [asyncio.get_running_loop().create_future() for _ in range(3)]
        flights = [Flight(key, b"") for key in (b"shared", b"alone", b"answered")]
        slow, quick = waiting("slow"), waiting("quick")
        for position, (flight, future) in enumerate(zip(flights, supplied, strict=True)):
            flight.join(slow, position)
            asked.begin(flight, future)
        flights[0].join(quick, 0)
        supplied[2].set_result("bytes")
        assert await supplied[0] is None
        assert flights[0].first() == (quick, 0)
        await asyncio.sleep(0.05)
        assert not supplied[1].done(), "there is nobody else to ask"
        flights[1].join(quick, 1)
        assert await supplied[1] is None
        assert flights[1].first() == (quick, 1)
        assert supplied[2].result() == "bytes"

    on_loop(test)
