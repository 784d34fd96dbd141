"""What one connection asks to have encoded: requests in flight, the bytes for them, and how they are given up."""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import count
from typing import TYPE_CHECKING

from ipc.leases import Holder, ShareState
from mmcache.errors import ProtocolError
from mmcache.framing import Frame, close_all, parse
from mmcache.protocol import Cancel, Supply
from mmcache.records import ACKNOWLEDGEMENT, MAX_REQUESTS, parse_encode
from mmcache.server.decoders import SharedDescriptor, Supplied
from mmcache.server.requests import Call, Request
from mmcache.server.supply import check_supply
from mmcache.transport import take_descriptors

if TYPE_CHECKING:
    from mmcache.server.connection import Connection
    from mmcache.server.coordinator import Coordinator

RECENT_REQUESTS = 8
RECENT_CALLS = 2 * MAX_REQUESTS
SWEEP_ABOVE = 256
"""A request sweeps its connection's control memory in passing when it holds more shares than this."""

_arrivals = count()


class Calls:
    """The requests of one connection. A call of the client's user is one request or several, its parts."""

    def __init__(self, connection: Connection, coordinator: Coordinator) -> None:
        self._connection = connection
        self._coordinator = coordinator
        self._requests: dict[int, Request] = {}
        self._recent: deque[Request] = deque(maxlen=RECENT_REQUESTS)
        self._calls: OrderedDict[int, Call] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def on_encode(self, holder: Holder, frame: Frame) -> None:
        """Begin a request."""
        if frame.fds:
            close_all(frame.fds)
        encode = parse_encode(frame)
        if encode.request_id in self._requests or len(self._requests) == MAX_REQUESTS:
            raise ProtocolError(f"request {encode.request_id} is in flight already, or {MAX_REQUESTS} others are")
        request = Request(self._connection, holder, self._call(encode.call_id), encode)
        self._requests[encode.request_id] = request
        self._coordinator.serve_batch(request)
        if encode.has_more:
            self._coordinator.poller.expect_more()
        if holder.num_active > SWEEP_ABOVE:
            holder.sweep()

    def on_supply(self, frame: Frame) -> None:
        """Bytes came: hand them to whom they were asked for. What nobody waits for any more is dropped."""
        (fd,) = take_descriptors(frame, 1)
        memory = SharedDescriptor(fd)
        try:
            supply = parse(Supply, frame)
            check_supply(supply, fd, self._coordinator.settings.max_item_bytes)
            self._hand_over(supply, memory)
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
        for share in [share for recent in given_up for share in recent.shares.values()]:
            if share.state not in (ShareState.ACKNOWLEDGED, ShareState.DIED):
                holder.acknowledge(share.slot, share.generation)

    def finished(self, request: Request) -> None:
        """A request is settled, or given up. Its grants are remembered a while, for a CANCEL that crosses them."""
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]
        self._recent.append(request)

    def flush(self) -> None:
        """Send what is settled."""
        for request in list(self._requests.values()):
            request.flush()

    def cancel(self) -> None:
        """The client has left: nobody wants anything any more."""
        for request in list(self._requests.values()):
            request.cancel([])

    def _call(self, call_id: int) -> Call:
        call = self._calls.get(call_id)
        if call is None:
            call = self._calls[call_id] = Call(next(_arrivals))
            if len(self._calls) > RECENT_CALLS:
                self._calls.popitem(last=False)
        return call

    def _hand_over(self, supply: Supply, memory: SharedDescriptor) -> None:
        request = self._requests.get(supply.request_id)
        columns = (supply.positions, supply.kinds, supply.headers, supply.offsets, supply.sizes)
        for position, kind, header, offset, size in zip(*columns, strict=True):
            supplied = Supplied(memory, self._connection.namespace, kind, header, offset, size)
            if request is None or position not in request.asked:
                self._coordinator.verifier.supply(self._connection, supply.request_id, position, supplied)
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
