"""Answers that take longer than one turn of the loop: a task each, none of them lost, a bounded number a connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmcache.server.connection import Connection
    from mmcache.server.stats import Stats

log = logging.getLogger(__name__)


class Background:
    """Every task that answers a client's question. A connection that closes meanwhile stops none of them."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(
        self, connection: Connection, work: Coroutine[object, object, None], on_fault: Callable[[Exception], None]
    ) -> None:
        """Run `work`, which answers; `on_fault` answers instead if a fault of ours ends it. It was admitted."""
        connection.num_asked += 1
        task = self._loop.create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and isinstance(fault := task.exception(), Exception):
                log.error("internal error", exc_info=fault)
                self._stats.errors["Internal"] += 1
                on_fault(fault)
            connection.answered()

        task.add_done_callback(ended)

    def cancel(self) -> None:
        """Drop everything: the sidecar stops."""
        for task in list(self._tasks):
            task.cancel()
