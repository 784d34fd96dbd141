"""What an asyncio client asks besides embeddings, and how it waits for one answer."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from mmcache import asks
from mmcache.aio_link import connect_again
from mmcache.aio_pump import AsyncPump, is_quick
from mmcache.asking import Informed, Item
from mmcache.core import ClientCore
from mmcache.errors import ClientClosed, ItemError
from mmcache.evicting import Eviction
from mmcache.handshake import Target
from mmcache.keys import ContentKey, Fingerprint
from mmcache.parts import checked_keys, content_key
from mmcache.planning import Plan, plan_item
from mmcache.records import MAX_ITEMS
from mmcache.refs import SliceRef, StagedRef

if TYPE_CHECKING:
    import numpy as np
    import torch

    from mmcache.lease import Lease

T = TypeVar("T")


class AsyncAsking(Informed):
    """The part of an asyncio client that is no embedding's way."""

    def __init__(self, pump: AsyncPump, target: Target, timeout: float, reconnect: bool, num_retries: int) -> None:
        """Of a connection to a target."""
        self._pump = pump
        self._target = target
        self._timeout_s = timeout
        self._reconnects = reconnect
        self._num_retries = num_retries
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._is_closed = False
        self._connecting = asyncio.Lock()

    async def cancel(self, *refs: SliceRef | StagedRef) -> None:
        """End what is unclaimed of references that this client made. No round trip. See `Client.cancel`."""
        with (await self._usable(time.monotonic() + self._timeout_s)).turn() as core:
            core.withdraw([ref.token for ref in refs])

    async def key(self, item: Item) -> ContentKey:
        """The content key of one item. No round trip. See `Client.key`."""
        make = partial(content_key, item, self._core.hasher.key, self._core.welcome.max_item_bytes)
        return make() if is_quick([item]) else await self._pump.in_thread(make)

    async def plan(self, items: Sequence[Item]) -> list[Plan | ItemError]:
        """What each item will be: grid, tokens and bytes, without encoding it. No round trip. See `Client.plan`."""
        items, welcome, served = list(items), self._core.welcome, self._core.served

        def planned() -> list[Plan | ItemError]:
            return [plan_item(item, index, welcome, served) for index, item in enumerate(items)]

        return planned() if is_quick(items) else await self._pump.in_thread(planned)

    async def lookup(self, keys: Sequence[ContentKey]) -> list[str | None]:
        """Where the embedding of each key is: "pool", "host", "store" or None. See `Client.lookup`."""
        wanted = checked_keys(keys, len(keys))
        found: list[str | None] = []
        for start in range(0, len(wanted), MAX_ITEMS):
            part = wanted[start : start + MAX_ITEMS]
            answer: list[str | None] = await self._ask(partial(asks.lookup, part))
            found += answer
        return found

    async def put(
        self,
        key: ContentKey,
        embedding: np.ndarray[Any, Any] | torch.Tensor,
        grid: tuple[int, int, int],
        *,
        cost_seconds: float = 0.0,
    ) -> bool:
        """Cache an embedding that was made elsewhere. True if it is new. See `Client.put`."""
        (checked,) = checked_keys([key], 1)
        deadline = time.monotonic() + self._timeout_s
        pump = await self._usable(deadline)
        item = await _put_item(pump, checked, embedding)
        try:
            await self._room(pump, deadline)
            pump.check()
        except BaseException:
            item.close()
            raise
        with pump.turn() as core:
            question = asks.put(core, item, grid, cost_seconds, deadline - time.monotonic())
        return await self._answer(pump, question, deadline)

    async def fetch(self, lease: Lease) -> torch.Tensor:
        """A copy of a lease's embedding as a CPU tensor. See `Client.fetch`."""
        return await self._ask(partial(asks.fetch, lease))

    async def stats(self) -> dict[str, Any]:
        """The sidecar's counters, nested. See `Client.stats`."""
        return await self._ask(lambda core, _: asks.stats(core))

    async def leases(self, limit: int = 1000, *, pid: int | None = None, check: bool = False) -> dict[str, Any]:
        """Who holds what since when, and what is quarantined and why, nested. See `Client.leases`."""
        return await self._ask(lambda core, _: asks.leases(core, limit, pid, check))

    async def evict(
        self,
        keys: Sequence[ContentKey] = (),
        *,
        namespace: str | None = None,
        fingerprint: Fingerprint | None = None,
        stale: bool = False,
        everything: bool = False,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Remove embeddings from every tier, or only count them; leases on them stay valid. See `Client.evict`."""
        eviction = Eviction.of(keys, namespace, fingerprint, stale, everything, dry_run)
        for part in eviction.parts():
            eviction.add(await self._ask(part))
        return eviction.found

    async def reload(self, model: str | os.PathLike[str] | None = None) -> Fingerprint:
        """Serve new weights, without losing a request; returns their fingerprint. See `Client.reload`."""
        return await self._ask(lambda core, _: asks.reload(core, model))

    @property
    def _core(self) -> ClientCore:
        return self._pump.core

    async def _usable(self, deadline: float) -> AsyncPump:
        """The connection, made again if it was lost and that is wanted."""
        if os.getpid() != self._pid:
            raise ClientClosed("this client belongs to the process that opened it; connect anew after a fork")
        if asyncio.get_running_loop() is not self._loop:
            raise ClientClosed("this client belongs to the event loop that opened it; connect anew on another")
        if self._is_closed:
            raise ClientClosed("the client is closed")
        if self._pump.lost is not None and self._reconnects:
            async with self._connecting:
                if self._pump.lost is not None:
                    await self._pause(0)
                    self._pump = await connect_again(self._target, deadline, self._pause)
                    if self._is_closed:  # meanwhile
                        await self._pump.close()
        self._pump.check()
        return self._pump

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self._is_closed:
            raise ClientClosed("the client is closed")

    async def _ask(self, start: asks.Start[T]) -> T:
        deadline = time.monotonic() + self._timeout_s
        pump = await self._usable(deadline)
        return await self._answer(pump, await self._begin(pump, start, deadline), deadline)

    async def _begin(self, pump: AsyncPump, start: asks.Start[T], deadline: float) -> asks.Question[T]:
        await self._room(pump, deadline)
        with pump.turn() as core:
            return start(core, deadline - time.monotonic())

    async def _room(self, pump: AsyncPump, deadline: float) -> None:
        """Return when one more thing may be in flight, without giving others a turn in between."""
        while pump.core.is_full:
            await pump.wait(lambda: not pump.core.is_full, deadline, self._timeout_s)

    async def _answer(self, pump: AsyncPump, question: asks.Question[T], deadline: float) -> T:
        try:
            await pump.wait(lambda: question.ask.is_done, deadline, self._timeout_s)
        except BaseException:
            pump.core.give_up(question.ask)
            pump.send_what_goes()
            raise
        return question.result()


async def _put_item(pump: AsyncPump, key: ContentKey, embedding: np.ndarray[Any, Any] | torch.Tensor) -> asks.PutItem:
    make = partial(asks.PutItem.of, key, embedding, pump.core.served)
    if is_quick([embedding]):
        return make()
    copying = pump.start_thread(make)
    try:
        return await asyncio.shield(copying)
    except asyncio.CancelledError:
        copying.add_done_callback(_close_item)
        raise


def _close_item(copying: asyncio.Future[asks.PutItem]) -> None:
    if not copying.cancelled() and copying.exception() is None:
        copying.result().close()
