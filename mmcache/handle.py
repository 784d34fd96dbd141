"""A call that goes on by itself: what `client.submit` returns."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from mmcache.errors import ConnectionLost, MMCacheError, ProtocolError, RequestCancelled, RequestTimeout
from mmcache.lease import Lease

if TYPE_CHECKING:
    from mmcache.core import ClientCore
    from mmcache.encode_call import EncodeCall
    from mmcache.parts import Part
    from mmcache.pump import Pump


class Handle:
    """Items on their way to leases. Nothing here waits but `result`. Threads may share it.

    A long call (more than 256 MiB of items, or 1,024 of them) goes on only while somebody polls it or waits for its
    result, and so does one whose items were refused and are asked for again. A handle that is dropped is cancelled.
    """

    def __init__(self, pump: Pump, call: EncodeCall) -> None:
        self._pump = pump
        self._call: EncodeCall | None = call
        self._results: list[Lease] | None = None
        self._error: MMCacheError | None = None

    def poll(self) -> bool:
        """Receive what has come, without waiting. True once `result` gives its leases or its error at once."""
        call = self._call
        if call is None:
            return True
        try:
            self._pump.poll()
            self._go_on(call)
        except (ConnectionLost, ProtocolError):
            return True
        is_over = call.is_done or self._pump.lost is not None or time.monotonic() >= call.deadline
        return is_over or self._call is None

    def result(self, timeout: float | None = None) -> list[Lease]:
        """Wait for the leases. They are given out once: a second time gives the same list.

        Args:
            timeout: in seconds; by default until the deadline that the call was submitted with. When it passes, the
                call goes on.

        Raises:
            EncodeError: some items failed, unless it was submitted with `errors="return"`.
            TimeoutError: not yet. If it is a `RequestTimeout`, the call's own deadline has passed and it is over.
            RequestCancelled: it was cancelled.
            ConnectionLost, ClientClosed: the connection ended.
        """
        self._pump.check_process()
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout must be None or not negative, got {timeout}")
        while (call := self._call) is not None:
            now = time.monotonic()
            until = call.deadline if timeout is None else min(call.deadline, now + timeout)
            try:
                drive(self._pump, call, until, max(0.0, until - now))
            except RequestTimeout as error:
                if until < call.deadline:
                    raise TimeoutError(f"not done within {timeout:g} s; the call goes on") from None
                self._end(call, error)
            except MMCacheError as error:
                self._end(call, error)
            else:
                self._settle(call)
        if self._error is not None:
            raise self._error
        assert self._results is not None, "a call ends with results or an error"
        return self._results

    def cancel(self) -> bool:
        """Give the call up: its leases are released, what others wait for goes on. False if it was over already."""
        call = self._call
        if call is None:
            return False
        self._end(call, RequestCancelled("the call was cancelled"))
        return isinstance(self._error, RequestCancelled)

    def _go_on(self, call: EncodeCall) -> None:
        if call.lock.acquire(blocking=False):
            try:
                ask_parts(self._pump, call)
            finally:
                call.lock.release()

    def _settle(self, call: EncodeCall) -> None:
        def settle(_: ClientCore) -> None:
            if self._call is call and not call.is_over:
                self._call = None
                try:
                    self._results = call.result()
                except MMCacheError as error:
                    self._error = error

        self._pump.do(settle)

    def _end(self, call: EncodeCall, error: MMCacheError) -> None:
        def end(_: ClientCore) -> None:
            if self._call is call:
                self._call, self._error = None, error
                call.cancel()

        self._pump.check_process()
        self._pump.tell(end)

    def __del__(self) -> None:
        call = getattr(self, "_call", None)
        if call is not None and self._pump.core.is_mine:
            self._pump.drop(call.cancel)


def drive(pump: Pump, call: EncodeCall, deadline: float, timeout_s: float) -> None:
    """Ask for each part as soon as it is hashed; wait at the end, and when a window is full.

    Raises:
        RequestTimeout, ConnectionLost, ClientClosed: the call is not over by that.
    """
    while True:
        with call.lock:
            ask_parts(pump, call)
        if call.is_done or call.is_over:
            return
        until = min(deadline, call.wakes_at)
        try:
            pump.wait(partial(call.may_go_on, until), until, timeout_s)
        except RequestTimeout:
            if until == deadline:
                raise
        if call.is_done or call.is_over:
            return


def ask_parts(pump: Pump, call: EncodeCall) -> None:
    """Read, hash and ask for parts until the answers come first. The caller has the call's lock."""
    while (part := call.next_part()) is not None:
        if not pump.turn(partial(_ask, call, part)):
            return


def _ask(call: EncodeCall, part: Part, _: ClientCore) -> bool:
    return call.ask(part)


def give_up(pump: Pump, call: EncodeCall) -> None:
    """Cancel a call, and say so as far as that goes without waiting."""
    pump.tell(lambda _: call.cancel())
