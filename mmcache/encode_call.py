"""One call of encode, whichever face makes it: its parts, its window, and what becomes of it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Literal, cast

from mmcache.core import ClientCore
from mmcache.errors import EncodeError, ItemError
from mmcache.keys import ContentKey
from mmcache.lease import Lease
from mmcache.parts import Part, checked_keys, cut, cut_keys, is_one_item
from mmcache.pending import PendingEncode, Result
from mmcache.records import MAX_CONSUMERS, PRIORITIES
from mmcache.refs import SliceRef
from mmcache.retries import Retries

WINDOW_BYTES = 256 << 20
WINDOW_PARTS = 32
"""Items are read and hashed this far ahead of the answers, so that a long list of files is never in memory at once."""
SERVER_MARGIN_S = 0.25
"""The sidecar is told to give up this much before the client does, so that its error says more than a timeout."""

Errors = Literal["raise", "return"]
Priority = Literal["interactive", "bulk"]


class EncodeCall:
    """Items on their way to leases. Does no I/O: a face takes `next_part`, hands it to `ask`, and moves the frames.

    Attributes:
        deadline: of the call, on the monotonic clock.
        items: what is to be encoded.
        lock: held by whoever cuts and asks; threads may share a call.
        is_over: whether its results were taken, or it was given up.
    """

    def __init__(
        self,
        core: ClientCore,
        items: Sequence[object],
        deadline: float,
        *,
        keys: Sequence[ContentKey] | None = None,
        consumers: int = 0,
        errors: Errors = "raise",
        priority: Priority = "interactive",
        num_retries: int = 0,
    ) -> None:
        check_errors(errors)
        if priority not in PRIORITIES:
            raise ValueError(f'priority must be "interactive" or "bulk", got {priority!r}')
        if is_one_item(items):
            what = type(items).__name__
            raise TypeError(f"items must be a list of items; for one {what} give [item], for a batch list(batch)")
        if not 0 <= consumers <= MAX_CONSUMERS:
            raise ValueError(f"consumers must be 0 to {MAX_CONSUMERS}, got {consumers}")
        items = list(items)
        self.deadline = deadline
        self.items = items
        self.lock = threading.Lock()
        self.is_over = False
        self._core = core
        self._errors = errors
        self._consumers = consumers
        self._priority = PRIORITIES.index(priority)
        self._retries = Retries(num_retries, deadline)
        self._call_id = core.new_id()
        self._results: list[Result | None] = [None] * len(items)
        self._requests: list[PendingEncode] = []
        self._has_failed = False
        self._has_more = True
        self._window_parts = self._window_bytes = 0
        self._kept: Part | None = None
        self._parts = self._cut(items, keys)

    def next_part(self) -> Part | None:
        """Read and hash the next part; None when there is none, or when the answers to earlier ones come first.

        A part of items that were refused and are due again comes first.
        """
        if self.is_over:
            return None
        if (again := self._retries.due()) is not None:
            return None if self._core.is_full else again
        is_full = self._window_bytes >= WINDOW_BYTES or self._window_parts == WINDOW_PARTS
        if (is_full and not self._is_answered()) or self._core.is_full:
            return None
        if is_full:
            self._window_bytes = self._window_parts = 0
        part, self._kept = self._kept or next(self._parts, None), None
        if part is None:
            self._has_more = False
        return part

    def ask(self, part: Part) -> bool:
        """Send a part. False, and it is the next one still, if the connection has no room for a request by now."""
        if self.is_over:
            return False
        if self._core.is_full:
            self._kept = self._kept if part.attempt else part
            return False
        timeout_s = sidecar_time_s(self.deadline - time.monotonic())
        call_id = self._call_id
        if part.attempt:  # to the sidecar it comes after the call, which may be over there
            call_id = self._core.new_id()
        else:
            self._has_more = part.has_more
            self._window_parts += 1
            self._window_bytes += part.nbytes
        request = self._core.encode(part, timeout_s, call_id, self._consumers, self._priority)
        request.call_settled = self._settled
        self._requests.append(request)
        self._retries.began(part)
        return True

    @property
    def is_done(self) -> bool:
        """Whether every item is settled, and none is to be asked for again."""
        return not self._has_more and self._is_answered() and not self._retries

    def may_go_on(self, until: float) -> bool:
        """Whether there is something to do besides waiting `until` then.

        The call is done or over, its window has room again, or items were refused: they are due, or sooner than that.
        """
        if self.is_over or self.is_done:
            return True
        if self.wakes_at < until:
            return True
        return not self._core.is_full and (self._retries.is_due or (self._has_more and self._is_answered()))

    @property
    def wakes_at(self) -> float:
        """When it may go on whether an answer comes or not, on the monotonic clock; infinite if it waits for one."""
        return math.inf if self._retries.is_due else self._retries.next_at

    def result(self) -> list[Lease]:
        """Leases in the order of the items; with `errors="return"` exceptions among them. The call is over.

        Raises:
            EncodeError: some items failed, with `errors="raise"`.
        """
        self._core.settle(self._requests)  # the last part may have been done before it was known to be the last
        results = self._results
        for request in self._requests:
            places = request.part.places
            if isinstance(places, range):
                results[places.start : places.stop] = request.give()
            else:
                for place, result in zip(places, request.give(), strict=True):
                    results[place] = result
        self._let_go()
        settled = cast("list[Result]", results)
        may_have_failed = self._has_failed or any(request.has_failed for request in self._requests)
        if self._errors == "raise" and may_have_failed and any(isinstance(result, ItemError) for result in settled):
            raise EncodeError(settled)
        return cast("list[Lease]", settled)

    def cancel(self) -> None:
        """Give the call up; what it got is released."""
        self._has_more = False
        for request in self._requests:
            self._core.cancel(request)
        self._let_go()

    def _let_go(self) -> None:
        """Requests and call refer to each other: leases and items would live on until cycles are looked for."""
        self.is_over = True
        self._retries.clear()
        for request in self._requests:
            request.call_settled = None

    def _settled(self, request: PendingEncode) -> Sequence[PendingEncode]:
        self._retries.refused(request)
        return self._requests if self.is_done else ()

    def _is_answered(self) -> bool:
        return not any(request.num_open for request in self._requests)

    def _failed(self, index: int, error: ItemError) -> None:
        self._results[index] = error
        self._has_failed = True

    def _cut(self, items: Sequence[object], keys: Sequence[ContentKey] | None) -> Iterator[Part]:
        max_item_bytes = self._core.welcome.max_item_bytes
        if keys is None:
            return cut(items, self._core.hasher.key, max_item_bytes, self._failed)
        return cut_keys(items, checked_keys(keys, len(items)), max_item_bytes)


def check_errors(errors: str) -> None:
    """Raise ValueError unless it is one of `Errors`."""
    if errors not in ("raise", "return"):
        raise ValueError(f'errors must be "raise" or "return", got {errors!r}')


def opened(
    refs: SliceRef | Sequence[SliceRef], results: list[Lease | ItemError], errors: Errors
) -> Lease | list[Lease]:
    """What `open` gives for the results of `refs`; with `errors="return"` errors are among them."""
    if isinstance(refs, SliceRef) and isinstance(results[0], ItemError):
        raise results[0]
    if errors == "raise" and any(isinstance(result, ItemError) for result in results):
        raise EncodeError(results)
    return cast("list[Lease]", results)[0] if isinstance(refs, SliceRef) else cast("list[Lease]", results)


def sidecar_time_s(remaining_s: float) -> float:
    """What of the time that is left a sidecar is given."""
    return max(0.0, remaining_s - min(SERVER_MARGIN_S, remaining_s / 4))
