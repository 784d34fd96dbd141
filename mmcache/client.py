"""The client: items in, leases out. One core without I/O (core.py), and the faces that move its frames."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, overload

from mmcache.asking import Asking, Item
from mmcache.device_staging import device_items
from mmcache.encode_call import EncodeCall, Errors, Priority, check_errors, opened
from mmcache.errors import ClientClosed, ItemError
from mmcache.foreign import ForeignModel
from mmcache.handle import Handle, drive, give_up
from mmcache.handshake import DEFAULT_TIMEOUT_S, Target, check_timeout
from mmcache.keys import ContentKey
from mmcache.lease import Lease
from mmcache.link import connect_again, connect_pump
from mmcache.pump import Pump
from mmcache.records import MAX_ITEMS
from mmcache.refs import SliceRef, StagedRef, slice_refs
from mmcache.retries import check_retries
from mmcache.staging import StageCall

if TYPE_CHECKING:
    import torch

__all__ = ["Client", "Lease", "connect"]


class Client(Asking):
    """A connection to a sidecar. A context manager.

    Threads may share a client, and their calls go on at the same time: whoever waits receives for all. A forked child
    must not use it: it connects anew. A call that is interrupted (Ctrl-C) ends alone while it waits; in the few
    microseconds in which it moves bytes it ends the connection, and others' calls with `ConnectionLost`. A client that
    is dropped unclosed warns; its leases go on. docs/protocol.md says how many round trips each call takes.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        namespace: str = "",
        name: str | None = None,
        reconnect: bool = False,
        retry_overloaded: int = 0,
        device: str | torch.device | None = None,
        foreign: ForeignModel | None = None,
    ) -> None:
        """Connect.

        Args:
            socket: the sidecar's socket; by default `MMCACHE_SOCKET`, else where `mmcache serve` puts it by default.
            timeout: bound of each call in seconds, of connecting too.
            namespace: tenant; part of every key.
            name: what operators see this client as; by default the program's name.
            reconnect: a call that finds the sidecar gone connects again, and tries until its timeout if it has to (at
                once, then with pauses of 10 ms to 1 s); the call in which it went away raises all the same.
            retry_overloaded: how many times an item is asked for again that the sidecar refuses with `Overloaded`:
                within the call's timeout, after random pauses around what the sidecar says, doubled each time. What
                else the call asked for is not touched by it.
            device: the CUDA device on which this process reads, as "cuda:3"; by default that of the pool. One that has
                no access to the pool's memory is told by `DeviceUnavailable` when a lease is read: `fetch` it then.
            foreign: the model that all of this client is of, if not the one that is served; see `ForeignModel`.

        Raises:
            SidecarUnavailable: nobody listens there.
            ProtocolMismatch: the sidecar speaks another protocol version.
            RequestTimeout: it does not answer.
        """
        check_timeout(timeout)
        self._target = Target.of(socket, name, namespace, device, foreign)
        self._timeout_s = timeout
        self._reconnects = reconnect
        self._num_retries = check_retries(retry_overloaded)
        self._pid = os.getpid()
        self._is_closed = False
        self._connecting = threading.Lock()
        self._pump = self._connected(time.monotonic() + timeout)

    def encode(
        self,
        items: Sequence[Item],
        errors: Errors = "raise",
        *,
        keys: Sequence[ContentKey] | None = None,
        consumers: int = 0,
        priority: Priority = "interactive",
    ) -> list[Lease]:
        """A lease for every item, in their order; every position has a lease of its own, repeats too.

        One round trip if the sidecar has everything in its pool, two if it asks for bytes.

        Args:
            items: each `bytes`, a path, a PIL image, or a uint8 numpy array or CPU tensor, H×W×3, H×W or, for a video
                chunk, T×H×W×3; or a `StagedRef`. A chunk has one embedding, with the tokens of one frame; `max_pixels`
                bounds its frames together. Arrays have keys of their own for each shape, so a chunk of one frame is not
                that frame.
            errors: "raise" throws one `EncodeError` once the rest is done, with leases and errors in `.results`;
                "return" puts the exception objects in place.
            keys: what `key` said of each item before: then an item is only read if its bytes are asked for, and may be
                None, which is `NotCached` where no tier has it.
            consumers: how many other processes may claim a share of each lease's embedding through `lease.ref`.
            priority: "interactive" if somebody waits for it; "bulk" is encoded in what time such calls leave, and a
                little of the time that they do not. What both wait for is done as the sooner one needs it.

        Raises:
            EncodeError: some items failed, with `errors="raise"`.
            RequestTimeout, ConnectionLost, ClientClosed: the call as a whole failed; it holds no leases.
        """
        deadline = time.monotonic() + self._timeout_s
        pump = self._usable(deadline)
        call = self._call(pump, items, deadline, keys, consumers, errors, priority)
        try:
            drive(pump, call, deadline, self._timeout_s)
        except BaseException:
            give_up(pump, call)
            raise
        return pump.do(lambda _: call.result())

    def submit(
        self,
        items: Sequence[Item],
        errors: Errors = "raise",
        *,
        keys: Sequence[ContentKey] | None = None,
        consumers: int = 0,
        priority: Priority = "interactive",
    ) -> Handle:
        """Begin what `encode` does and return at once, without waiting for the sidecar, however busy it is.

        Items are read and hashed here unless `keys` are given. The client's timeout is the call's deadline.

        Raises:
            ConnectionLost, ClientClosed: it could not begin.
        """
        deadline = time.monotonic() + self._timeout_s
        pump = self._usable(deadline)
        handle = Handle(pump, self._call(pump, items, deadline, keys, consumers, errors, priority))
        handle.poll()
        return handle

    @overload
    def open(self, refs: SliceRef, errors: Errors = "raise") -> Lease: ...
    @overload
    def open(self, refs: Sequence[SliceRef], errors: Errors = "raise") -> list[Lease]: ...
    def open(self, refs: SliceRef | Sequence[SliceRef], errors: Errors = "raise") -> Lease | list[Lease]:
        """Claim a share of each reference that another process got with a lease: one becomes a lease of this process.

        One round trip for up to 1,024 of them.

        Raises:
            SliceGone: of a single reference: all its shares are claimed or it is over.
            EncodeError: some of several failed, with `errors="raise"`.
            RequestTimeout, ConnectionLost, ClientClosed: the call as a whole failed.
        """
        check_errors(errors)
        wanted = slice_refs(refs)
        results: list[Lease | ItemError] = []
        try:
            for start in range(0, len(wanted), MAX_ITEMS):
                results += self._open(wanted[start : start + MAX_ITEMS])
        except BaseException:
            for result in results:
                if isinstance(result, Lease):
                    result.release()
            raise
        return opened(refs, results, errors)

    def stage(self, item: Any, consumers: int = 1, *, grid: tuple[int, int, int] | None = None) -> StagedRef:
        """Put pixels where the sidecar's ranks can read them, once; send the reference instead of the bytes.

        Args:
            item: a uint8 array or tensor as `encode` takes it, of a CUDA device too (copied after what is queued on
                this thread's current stream); or, with `grid`, patch rows that are normalised already, float32,
                float16 or bfloat16, `[t·h·w, 3, patch, patch]` or `[t·h·w, 3·patch²]`.
            consumers: how many encode positions, in any processes of the namespace, may name it. If its key has an
                embedding by the first of them, nobody reads it.
            grid: patches in time, height and width.

        Raises:
            StagingExhausted: no room within the timeout, or larger than the whole region.
            ItemError: it is no such array.
            CapturingError, RequestTimeout, ConnectionLost, ClientClosed: the call failed.
        """
        return self.stage_all([item], consumers, grids=None if grid is None else [grid])[0]

    def stage_all(
        self, items: Sequence[Any], consumers: int = 1, *, grids: Sequence[tuple[int, int, int]] | None = None
    ) -> list[StagedRef]:
        """Stage several, in one round trip for up to 64 of them. If one fails, none is staged. See `stage`."""
        deadline = time.monotonic() + self._timeout_s
        pump = self._usable(deadline)
        call = StageCall(pump.core, items, consumers, grids, device_items(items))
        try:
            for start in call.questions():
                self._wait(pump, self._begin(pump, start, deadline), deadline)
            call.write()
            return pump.turn(lambda _: call.complete())
        except BaseException:
            pump.tell(lambda _: call.cancel())
            raise

    def cancel(self, *refs: SliceRef | StagedRef) -> None:
        """End what is unclaimed of references that this client made. No round trip. What is over already is ignored."""
        tokens = [ref.token for ref in refs]
        self._usable(time.monotonic() + self._timeout_s).turn(lambda core: core.withdraw(tokens))

    def close(self) -> None:
        """Acknowledge every lease but held ones, end what is unclaimed, and close the connection. Twice is harmless.

        Held tensors stay valid and acknowledge when they die. Calls of other threads end with `ClientClosed`.

        Raises:
            CapturingError: a lease is read on a stream that is being captured into a CUDA graph; nothing has changed.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        self._core.check_release_all()
        self._is_closed = True
        self._pump.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self, _warn: Any = warnings.warn) -> None:
        pump = getattr(self, "_pump", None)
        if pump is None or self._is_closed or not pump.core.is_mine:
            return
        pump.abandon()  # leases that were taken from it go on
        _warn(f"a client of {self._target.path} was dropped unclosed", ResourceWarning, source=self, stacklevel=1)

    def _call(
        self, pump: Pump, items: Sequence[Item], deadline: float, keys: Sequence[ContentKey] | None, consumers: int,
        errors: Errors, priority: Priority,
    ) -> EncodeCall:  # fmt: skip
        return EncodeCall(
            pump.core, items, deadline, keys=keys, consumers=consumers, errors=errors, priority=priority,
            num_retries=self._num_retries,
        )  # fmt: skip

    def _open(self, refs: Sequence[SliceRef]) -> list[Lease | ItemError]:
        deadline = time.monotonic() + self._timeout_s
        pump = self._usable(deadline)
        pending = pump.begin(lambda core: core.open(refs), deadline, self._timeout_s)
        try:
            pump.wait(lambda: pending.is_done, deadline, self._timeout_s)
        except BaseException:
            pump.tell(lambda core: core.cancel(pending))
            raise
        return pending.give()

    def _connected(self, deadline: float) -> Pump:
        return connect_pump(self._target, deadline)

    def _usable(self, deadline: float) -> Pump:
        """The connection, made again if it was lost and that is wanted."""
        if os.getpid() != self._pid:
            raise ClientClosed("this client belongs to the process that opened it; connect anew after a fork")
        if self._is_closed:
            raise ClientClosed("the client is closed")
        pump = self._pump
        if self._reconnects and pump.is_gone():
            pump = self._reconnected(deadline)
        pump.check()
        return pump

    def _reconnected(self, deadline: float) -> Pump:
        with self._connecting:
            lost = self._pump
            if lost.lost is not None:
                self._pause(0)
                self._pump = connect_again(self._target, deadline, self._pause)
                lost.retire()
                if self._is_closed:  # meanwhile
                    self._pump.close()
            return self._pump

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)
        if self._is_closed:
            raise ClientClosed("the client is closed")


connect = Client
"""Connect to a sidecar; see `Client`."""
