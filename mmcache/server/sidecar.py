"""The sidecar's life: claim the socket, start everything, announce, serve, drain, leave nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
from collections.abc import Awaitable, Callable

import uvloop

from mmcache.config import Settings
from mmcache.server.coordinator import Coordinator
from mmcache.server.front import Front, serving
from mmcache.server.ingest import Ingest
from mmcache.server.listener import Listener
from mmcache.server.notify import Notifier
from mmcache.server.state import load_or_create_seed, prepare_state
from mmcache.server.stores import open_store
from mmcache.transport import raise_descriptor_limit

log = logging.getLogger(__name__)

ACCEPT_PAUSE_S = 0.5
COLLECT_RARELY = (50_000, 20, 100)
"""Leases are many small objects and no cycles: looking for cycles every 700 of them takes as long as granting them."""


def run(settings: Settings, announce: Callable[[Coordinator], None]) -> None:
    """Serve until SIGTERM or SIGINT. `announce` is called when a request would succeed.

    Raises:
        ConfigError, CheckpointError, SidecarError: it cannot start.
    """
    raise_descriptor_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, announce))


async def _serve(settings: Settings, announce: Callable[[Coordinator], None]) -> None:
    state = prepare_state(settings.state)
    listener = Listener(settings.socket)
    try:
        async with _Signals() as signals, serving(settings) as front:
            seed = load_or_create_seed(state)
            opening = asyncio.ensure_future(open_store(settings))
            if not await signals.before(opening):
                return
            coordinator = Coordinator(settings, seed, Ingest(settings.ingest_bytes), opening.result())
            try:
                await _serve_until(signals, coordinator, listener, front, announce)
            finally:
                await coordinator.stop()
    finally:
        listener.close()


async def _serve_until(
    signals: _Signals, coordinator: Coordinator, listener: Listener, front: Front,
    announce: Callable[[Coordinator], None],
) -> None:  # fmt: skip
    if not await signals.before(coordinator.start()):
        return
    listener.listen()
    _accept_from(listener, coordinator)
    gc.collect()
    gc.freeze()  # what was imported and built so far stays: collections need not walk it
    gc.set_threshold(*COLLECT_RARELY)
    coordinator.front, front.home = front, coordinator
    announce(coordinator)
    notifier = Notifier(os.environ, os.getpid())
    notifier.ready(f"serving {coordinator.facts.model} on {coordinator.settings.socket}")
    await signals.stop.wait()
    front.is_stopping = True
    notifier.stopping("finishing what is in flight")
    log.info("stopping: finishing what is in flight; once more to stop at once")
    asyncio.get_running_loop().remove_reader(listener.fileno())
    listener.stop()
    await signals.before(coordinator.drain(coordinator.settings.drain_timeout_s), num_signals=2)
    notifier.close()


def _accept_from(listener: Listener, coordinator: Coordinator) -> None:
    """Accept clients as they come; after a failure (no descriptor is left) not at once again, or it would spin."""
    loop = asyncio.get_running_loop()

    def accept() -> None:
        if listener.is_listening and not listener.accept(coordinator.accept):
            loop.remove_reader(listener.fileno())
            loop.call_later(ACCEPT_PAUSE_S, _accept_from, listener, coordinator)

    if listener.is_listening:
        loop.add_reader(listener.fileno(), accept)


class _Signals:
    """SIGTERM and SIGINT as events: the first asks to drain, the second to stop at once."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self._now = asyncio.Event()

    async def before(self, work: Awaitable[object], num_signals: int = 1) -> bool:
        """Run `work`; False when that many signals came first, and it was cancelled."""
        task = asyncio.ensure_future(work)
        signalled = asyncio.ensure_future((self.stop if num_signals == 1 else self._now).wait())
        await asyncio.wait((task, signalled), return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if task.done():
            task.result()
            return True
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return False

    def _received(self) -> None:
        (self._now if self.stop.is_set() else self.stop).set()

    async def __aenter__(self) -> _Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._received)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
