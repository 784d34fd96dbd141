"""The loop's lag: what holds it up is seen."""

from __future__ import annotations

import asyncio
import time

from mmcache.server.lag import PERIOD_S, LoopLag
from tests.mmcache.support import SidecarProcess


def test_what_blocks_the_loop_is_seen() -> None:
    async def run() -> dict[str, float]:
        lag = LoopLag()
        assert lag.counters() == {"p50_ms": 0.0, "p99_ms": 0.0, "max_ms": 0.0}
        lag.start()
        await asyncio.sleep(3 * PERIOD_S)
        asyncio.get_running_loop().call_soon(time.sleep, 5 * PERIOD_S)
        await asyncio.sleep(0)
        await asyncio.sleep(2 * PERIOD_S)
        return lag.counters()

    counters = asyncio.run(run())
    assert counters["max_ms"] >= 3.5 * PERIOD_S * 1e3
    assert counters["p50_ms"] <= counters["p99_ms"] <= counters["max_ms"]


def test_it_is_in_the_counters(shared_sidecar: SidecarProcess) -> None:
    lag = shared_sidecar.stats()["loop_lag"]
    assert set(lag) == {"p50_ms", "p99_ms", "max_ms"}
