"""What tests of the asyncio client share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

from mmcache import AsyncClient

Run: TypeAlias = Callable[[Coroutine[Any, Any, None]], None]


async def soon(is_true: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + 20
    while not await is_true():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


async def idle(client: AsyncClient) -> bool:
    stats = await client.stats()
    return bool(stats["leases"]["active"] == 0 and stats["ingest"]["bytes_used"] == 0)
