"""What one connection asks to have encoded: requests in flight, the bytes for them, and how they are given up."""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import count
from typing import TYPE_CHECKING

from ipc.leases import Holder
from ipc.shares import ShareState
from mmcache.errors import ProtocolError, TooManyRequests
from mmcache.framing import Frame, Kind, close_all, pack_frame, parse
from mmcache.protocol import Cancel, Supply, Unsettled
from mmcache.records import ACKNOWLEDGEMENT, KEY_BYTES, MAX_REQUESTS, RESULTS_HEAD, EncodeFrame, parse_encode
from mmcache.server.decoders import SharedDescriptor, Supplied
from mmcache.server.flight import Flight
from mmcache.server.requests import Request
from mmcache.server.supply import check_supply
from mmcache.transport import take_descriptors

if TYPE_CHECKING:
    from mmcache.server.connection import Connection
    from mmcache.server.coordinator import Coordinator

RECENT_REQUESTS = 8
MAX_CALLS = 2 * MAX_REQUESTS
"""Remembered until they are over; what is then left of the oldest counts as a call of its own."""
MAX_SETTLED = MAX_REQUESTS
"""Settled parts of calls that are not over, of one connection; what the oldest was granted is then not recalled."""
SWEEP_ABOVE = 256
"""A request sweeps its connection's control memory in passing when it holds more shares than this."""

_arrivals = count()


class Call:
    """What the client's user asked for at once: one request or several.

    Until all of it is settled its user has none of it: so long its grants may be recalled.

    Attributes:
        order: of its arrival among all calls; room in the pool is given in this order.
        call_id: names it on its connection.
        requests: its parts that are open or have grants, in the order of their arrival; none once it is over.
    """

    __slots__ = ("_has_more", "_num_unfinished", "call_id", "order", "requests")

    def __init__(self, order: int, call_id: int = 0) -> None:
        self.order = order
        self.call_id = call_id
        self.requests: dict[Request, None] = {}
        self._has_more = True
        self._num_unfinished = 0

    def begin(self, request: Request, has_more: bool) -> None:
        """One more part, after which there are more or not."""
        self.requests[request] = None
        self._has_more = has_more
        self._num_unfinished += 1

    def reopen(self) -> None:
        """A part that was finished is not."""
        self._num_unfinished += 1

    def finish(self) -> bool:
        """A part is finished. True if that was the last, and the call is over."""
        self._num_unfinished -= 1
        return self.is_over

    def end(self) -> None:
        """There are no more parts than have come."""
        self._has_more = False

    @property
    def is_over(self) -> bool:
        """Whether all parts came and are finished."""
        return not self._has_more and not self._num_unfinished


class Calls:
    """The requests of one connection. A call of the client's user is one request or several, its parts."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._requests: dict[int, Request] = {}
        self._recent: deque[Request] = deque(maxlen=RECENT_REQUESTS)
        self._calls: OrderedDict[int, Call] = OrderedDict()
        self._settled: OrderedDict[Request, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def on_encode(self, connection: Connection, holder: Holder, frame: Frame) -> None:
        """Begin a request, or refuse it.

        Raises:
            ProtocolError: it is none, its id is in use, or far too many have come.
        """
        if frame.fds:
            close_all(frame.fds)
        encode = parse_encode(frame)
        self._check_new(encode.request_id)
        try:
            connection.admission.check(len(self._requests))
        except TooManyRequests as error:
            self._refuse(connection, encode, error)
            return
        call = self._call(encode.call_id)
        request = Request(connection, holder, call, encode)
        call.begin(request, encode.has_more)
        self._requests[encode.request_id] = request
        self._coordinator.serve_batch(request)
        if encode.has_more:
            self._coordinator.poller.expect_more()
        if holder.num_active > SWEEP_ABOVE:
            holder.sweep()

    def stand_in(self, connection: Connection, holder: Holder, ask_id: int, flight: Flight) -> Request:
        """A request of one item that waits with a flight and is given up as others are; whoever made it answers.

        Raises:
            ProtocolError: the id is in use.
        """
        self._check_new(ask_id)
        asked = EncodeFrame(ask_id, 0, 0, 0, has_more=False, keys=flight.key, staged={})
        call = Call(next(_arrivals))
        request = self._requests[ask_id] = Request(connection, holder, call, asked)
        call.begin(request, has_more=False)
        flight.join(request, 0)
        return request

    def on_supply(self, connection: Connection, frame: Frame) -> None:
        """Bytes came: hand them to whom they were asked for. What nobody waits for any more is dropped."""
        (fd,) = take_descriptors(frame, 1)
        memory = SharedDescriptor(fd)
        try:
            supply = parse(Supply, frame)
            check_supply(supply, fd, self._coordinator.settings.max_item_bytes)
            self._hand_over(connection, supply, memory)
        finally:
            memory.release()

    def on_cancel(self, holder: Holder, cancel: Cancel) -> None:
        """The client gives positions up, or all of a request with the grants that are still on their way to it."""
        request = self._requests.get(cancel.request_id)
        if request is not None:
            request.cancel(cancel.positions)
        if cancel.positions:
            return
        given_up = [recent for recent in self._recent if recent.request_id == cancel.request_id]
        holder.sweep()
        for token in [token for recent in given_up for token in recent.tokens.values()]:
            self._coordinator.offers.withdraw(token, holder)
        for share in [share for recent in given_up for share in (*recent.shares.values(), *recent.recalled)]:
            if share.state not in (ShareState.ACKNOWLEDGED, ShareState.DIED):
                holder.acknowledge(share.slot, share.generation)

    def finished(self, request: Request) -> None:
        """A request is settled, or given up. Its grants are remembered a while, for a CANCEL that crosses them."""
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]
        self._recent.append(request)
        if request.call.finish():
            self._over(request.call)
        elif request.shares:
            self._settled[request] = None
            if len(self._settled) > MAX_SETTLED:
                oldest, _ = self._settled.popitem(last=False)
                del oldest.call.requests[oldest]
        else:
            request.call.requests.pop(request, None)

    def reopen(self, request: Request) -> None:
        """A request that was settled has open positions again."""
        self._requests[request.request_id] = request
        if request in self._recent:
            self._recent.remove(request)
        self._settled.pop(request, None)
        request.call.reopen()

    def flush(self) -> None:
        """Send what is settled."""
        for request in list(self._requests.values()):
            request.flush()

    def cancel(self) -> None:
        """The client has left: nobody wants anything any more."""
        for request in list(self._requests.values()):
            request.cancel([])

    def forget(self) -> None:
        """Nothing of the connection is left. What is remembered of it refers to it, and to itself in circles."""
        for request in self._settled:
            request.call.requests.clear()
        self._settled.clear()
        self._recent.clear()
        self._calls.clear()

    def _check_new(self, request_id: int) -> None:
        if request_id in self._requests:
            raise ProtocolError(f"request {request_id} is in flight already")

    def _refuse(self, connection: Connection, encode: EncodeFrame, error: TooManyRequests) -> None:
        """Every position fails; nothing of it is begun. If it was to be the last part of a call, the call ends too."""
        kind, num_keys = type(error).__name__, len(encode.keys) // KEY_BYTES
        for _ in range(num_keys):
            connection.count_error(kind)
        refused = Unsettled(failed=list(range(num_keys)), errors=[kind] * num_keys, reasons=[error.reason] * num_keys)
        connection.send(pack_frame(Kind.RESULTS, refused, RESULTS_HEAD.pack(encode.request_id)))
        if not encode.has_more and (call := self._calls.get(encode.call_id)) is not None:
            call.end()
            if call.is_over:
                self._over(call)

    def _over(self, call: Call) -> None:
        for request in call.requests:
            self._settled.pop(request, None)
        call.requests.clear()
        if self._calls.get(call.call_id) is call:
            del self._calls[call.call_id]

    def _call(self, call_id: int) -> Call:
        call = self._calls.get(call_id)
        if call is None:
            call = self._calls[call_id] = Call(next(_arrivals), call_id)
            if len(self._calls) > MAX_CALLS:
                self._calls.popitem(last=False)
        return call

    def _hand_over(self, connection: Connection, supply: Supply, memory: SharedDescriptor) -> None:
        request = self._requests.get(supply.request_id)
        columns = (supply.positions, supply.kinds, supply.headers, supply.offsets, supply.sizes)
        for position, kind, header, offset, size in zip(*columns, strict=True):
            supplied = Supplied(memory, connection.namespace, kind, header, offset, size)
            if request is None or position not in request.asked:
                self._coordinator.verifier.supply(connection, supply.request_id, position, supplied)
            elif (flight := request.open.get(position)) is not None and flight.supply(request, position, supplied):
                memory.share()


def acknowledgements(frame: Frame, holder: Holder) -> set[tuple[int, int]]:
    """Slots and generations in a frame's body.

    Raises:
        ProtocolError: not whole records, or more than the holder can have shares.
    """
    num_records, rest = divmod(len(frame.body), ACKNOWLEDGEMENT.size)
    if rest or num_records > holder.control.num_words:
        raise ProtocolError(f"acknowledgements of {len(frame.body)} bytes are not whole records, or too many")
    return {(slot, generation) for slot, generation in ACKNOWLEDGEMENT.iter_unpack(frame.body)}
