"""The client for asyncio: what client.py does for threads, over the same core, on one event loop."""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, overload

from mmcache.aio_asking import AsyncAsking
from mmcache.aio_link import connect_pump
from mmcache.aio_pump import AsyncPump, is_quick
from mmcache.asking import Item
from mmcache.device_staging import device_items
from mmcache.encode_call import EncodeCall, Errors, Priority, check_errors, opened
from mmcache.errors import ItemError, RequestTimeout
from mmcache.foreign import ForeignModel
from mmcache.handshake import DEFAULT_TIMEOUT_S, Target, check_timeout
from mmcache.keys import ContentKey
from mmcache.lease import Lease
from mmcache.records import MAX_ITEMS
from mmcache.refs import SliceRef, StagedRef, slice_refs
from mmcache.retries import check_retries
from mmcache.staging import StageCall

if TYPE_CHECKING:
    import torch


class AsyncClient(AsyncAsking):
    """A connection to a sidecar for one event loop, asyncio's or uvloop's. An async context manager.

        async with AsyncClient.connect() as client:
            leases = await client.encode(["photo.jpg"])

    Methods take, give and raise what those of `Client` do, with the same deadlines and round trips. Any number of calls
    may be in flight at once. Cancelling a call's task cancels the request at the sidecar; what arrives later is
    released. The loop is not held up: reading files, decoding pictures of Pillow, and hashing and copying more than
    about 1 MiB are done in threads of the loop's executor. Leases may be released from any thread.
    """

    @classmethod
    def connect(
        cls,
        socket: str | os.PathLike[str] | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        namespace: str = "",
        name: str | None = None,
        reconnect: bool = False,
        retry_overloaded: int = 0,
        device: str | torch.device | None = None,
        foreign: ForeignModel | None = None,
    ) -> Connecting:
        """Connect: `await` it for a client to `close`, or enter it with `async with`. Arguments as those of `Client`.

        Raises:
            SidecarUnavailable: nobody listens there.
            ProtocolMismatch: the sidecar speaks another protocol version.
            RequestTimeout: it does not answer.
        """
        check_timeout(timeout)
        num_retries = check_retries(retry_overloaded)
        target = Target.of(socket, name, namespace, device, foreign)

        async def connected() -> AsyncClient:
            pump = await connect_pump(target, time.monotonic() + timeout)
            return cls(pump, target, timeout, reconnect, num_retries)

        return Connecting(connected)

    @classmethod
    def local(cls, model: str | os.PathLike[str] = "moonvit-tiny", device: str = "auto", **options: Any) -> Connecting:
        """A client that is served inside this process. Arguments, effects and errors as those of `mmcache.local`.

        The loop goes on while it starts and closes. If awaiting it is cancelled, what has begun ends by itself.
        """
        from mmcache.local_aio import connecting

        return connecting(model, device, **options)

    async def encode(
        self,
        items: Sequence[Item],
        errors: Errors = "raise",
        *,
        keys: Sequence[ContentKey] | None = None,
        consumers: int = 0,
        priority: Priority = "interactive",
    ) -> list[Lease]:
        """A lease for every item, in their order. See `Client.encode`."""
        deadline = time.monotonic() + self._timeout_s
        pump = await self._usable(deadline)
        call = EncodeCall(
            pump.core, items, deadline, keys=keys, consumers=consumers, errors=errors, priority=priority,
            num_retries=self._num_retries,
        )  # fmt: skip
        try:
            await self._drive(pump, call, quick=keys is not None or is_quick(call.items))
        except BaseException:
            call.cancel()
            pump.send_what_goes()
            raise
        return call.result()

    @overload
    async def open(self, refs: SliceRef, errors: Errors = "raise") -> Lease: ...
    @overload
    async def open(self, refs: Sequence[SliceRef], errors: Errors = "raise") -> list[Lease]: ...
    async def open(self, refs: SliceRef | Sequence[SliceRef], errors: Errors = "raise") -> Lease | list[Lease]:
        """Claim a share of each reference that another process got with a lease. See `Client.open`."""
        check_errors(errors)
        wanted = slice_refs(refs)
        results: list[Lease | ItemError] = []
        try:
            for start in range(0, len(wanted), MAX_ITEMS):
                results += await self._open(wanted[start : start + MAX_ITEMS])
        except BaseException:
            for result in results:
                if isinstance(result, Lease):
                    result.release()
            raise
        return opened(refs, results, errors)

    async def stage(self, item: Any, consumers: int = 1, *, grid: tuple[int, int, int] | None = None) -> StagedRef:
        """Put pixels where the sidecar's ranks can read them, once. See `Client.stage`."""
        return (await self.stage_all([item], consumers, grids=None if grid is None else [grid]))[0]

    async def stage_all(
        self, items: Sequence[Any], consumers: int = 1, *, grids: Sequence[tuple[int, int, int]] | None = None
    ) -> list[StagedRef]:
        """Stage several. If one fails, none is staged. See `Client.stage_all`."""
        deadline = time.monotonic() + self._timeout_s
        pump = await self._usable(deadline)
        make = partial(StageCall, pump.core, items, consumers, grids, device_items(items))
        call = make() if (quick := is_quick(items)) else await pump.in_thread(make)
        writing: asyncio.Future[None] | None = None
        try:
            await self._find_room(pump, call, deadline)
            if quick:
                call.write()
            else:
                writing = pump.start_thread(call.write)
                await asyncio.shield(writing)
            with pump.turn():
                return call.complete()
        except BaseException:
            give_back = partial(_give_back, pump, call)
            if writing is None or writing.done():
                give_back()
            else:  # the room is another's only once nobody writes to it
                writing.add_done_callback(give_back)
            raise

    async def close(self) -> None:
        """Acknowledge every lease but held ones, end what is unclaimed, and close the connection. Twice is harmless.

        Calls of other tasks end with `ClientClosed`. Returns when what is done for them in threads is over.

        Raises:
            CapturingError: a lease is read on a stream that is being captured into a CUDA graph; nothing has changed.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        self._core.check_release_all()
        self._is_closed = True
        await self._pump.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __del__(self, _warn: Any = warnings.warn) -> None:
        if getattr(self, "_is_closed", True) or os.getpid() != self._pid or self._loop.is_closed():
            return
        _warn(f"a client of {self._target.path} was dropped unclosed", ResourceWarning, source=self, stacklevel=1)
        self._loop.call_soon_threadsafe(self._pump.leave)  # leases that were taken from it go on

    async def _drive(self, pump: AsyncPump, call: EncodeCall, quick: bool) -> None:
        """Ask for each part as soon as it is hashed; wait at the end, and when a window is full."""
        deadline, timeout_s = call.deadline, self._timeout_s
        while True:
            while (part := call.next_part() if quick else await pump.in_thread(call.next_part)) is not None:
                with pump.turn():
                    if not call.ask(part):
                        break
            if not call.is_done:
                until = min(deadline, call.wakes_at)
                try:
                    await pump.wait(partial(call.may_go_on, until), until, timeout_s)
                except RequestTimeout:
                    if until == deadline:
                        raise
            if call.is_done:
                return

    async def _open(self, refs: Sequence[SliceRef]) -> list[Lease | ItemError]:
        deadline = time.monotonic() + self._timeout_s
        pump = await self._usable(deadline)
        await self._room(pump, deadline)
        with pump.turn() as core:
            pending = core.open(refs)
        try:
            await pump.wait(lambda: pending.is_done, deadline, self._timeout_s)
        except BaseException:
            pump.core.cancel(pending)
            pump.send_what_goes()
            raise
        return pending.give()

    async def _find_room(self, pump: AsyncPump, call: StageCall, deadline: float) -> None:
        for start in call.questions():
            await self._answer(pump, await self._begin(pump, start, deadline), deadline)


class Connecting:
    """A client that is being connected: to be awaited, or entered with `async with`. Once."""

    def __init__(self, connect: Callable[[], Awaitable[AsyncClient]]) -> None:
        self._connect = connect
        self._client: AsyncClient | None = None

    def __await__(self) -> Generator[Any, None, AsyncClient]:
        return self._connect().__await__()

    async def __aenter__(self) -> AsyncClient:
        self._client = await self._connect()
        return self._client

    async def __aexit__(self, *exc: object) -> None:
        assert self._client is not None, "it was entered"
        await self._client.close()


def _give_back(pump: AsyncPump, call: StageCall, _: object = None) -> None:
    call.cancel()
    pump.send_what_goes()
