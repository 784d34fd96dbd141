"""What a client waits for: requests that are settled position by position, and questions with one answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

from pydantic import BaseModel

from mmcache.errors import ItemError, Overloaded, ProtocolError, SliceGone
from mmcache.framing import Frame, Kind, parse
from mmcache.keys import ContentKey
from mmcache.lease import Lease, Served
from mmcache.parts import Part
from mmcache.records import LOOKUP_HEAD
from mmcache.refs import SliceRef

ANSWERS = frozenset(
    {
        Kind.STATS_REPLY,
        Kind.LEASES_REPLY,
        Kind.LOOKUP_REPLY,
        Kind.PUT_REPLY,
        Kind.STAGE_PLACES,
        Kind.RELOADED,
        Kind.FETCHED,
        Kind.EVICT_REPLY,
    }
)
"""Kinds of frames that answer an `Ask`."""

Result: TypeAlias = "Lease | ItemError"


class Pending:
    """A request in flight.

    Attributes:
        request_id: names it on its connection.
        keys: content key of each position.
        results: fills in place: a lease or an error for each position.
        num_open: positions without a result.
        has_failed: whether a position has an error.
    """

    __slots__ = ("has_failed", "keys", "num_open", "request_id", "results")

    def __init__(self, request_id: int, keys: Sequence[ContentKey]) -> None:
        self.request_id = request_id
        self.keys = keys
        self.results: list[Result | None] = [None] * len(keys)
        self.num_open = len(keys)
        self.has_failed = False

    @property
    def is_done(self) -> bool:
        """Whether every position is settled."""
        return self.num_open == 0

    def granted(self) -> None:
        """Positions have got their leases."""

    def give(self) -> list[Result]:
        """The results are the user's from now on. All are there."""
        for result in self.results:
            if isinstance(result, Lease):
                result.is_given = True
        return cast("list[Result]", self.results)

    def settled(self) -> Sequence[Pending]:
        """It is done: the requests whose grants are their user's from now on, and are not recalled any more."""
        return (self,)

    def fail(self, position: int, kind: type[ItemError], reason: str, retry_after_s: float = 0.0) -> None:
        """A position has its error. `retry_after_s`: if it is `Overloaded`."""
        self.has_failed = True
        if self.results[position] is None:
            self.num_open -= 1
        error = self._error(position, kind, reason)
        if isinstance(error, Overloaded):
            error.retry_after_s = retry_after_s
        self.results[position] = error

    def _error(self, position: int, kind: type[ItemError], reason: str) -> ItemError:
        return kind(reason, index=position)

    def offer(self, position: int, token: int) -> None:
        """A position's grant has shares for others."""
        result = self.results[position]
        if not isinstance(result, Lease):
            raise ProtocolError("shares are offered of what was not granted")
        result.offer = token

    def recall(self, positions: Sequence[int]) -> None:
        """The sidecar takes grants back before the user has them: their positions are open again."""
        for position in positions:
            result = self.results[position]
            if isinstance(result, Lease):
                result.release()
                self.results[position] = None
                self.num_open += 1


class PendingEncode(Pending):
    """A part of a call.

    Attributes:
        part: its items.
        call_settled: told that it is done; gives the parts of its call once all of them are.
    """

    __slots__ = ("call_settled", "part")

    def __init__(self, request_id: int, part: Part) -> None:
        super().__init__(request_id, part.keys)
        self.part = part
        self.call_settled: Callable[[PendingEncode], Sequence[Pending]] | None = None

    def settled(self) -> Sequence[Pending]:
        """A call's grants are given out together."""
        return (self,) if self.call_settled is None else self.call_settled(self)

    def _error(self, position: int, kind: type[ItemError], reason: str) -> ItemError:
        """It names the item."""
        return kind(reason, index=self.part.places[position], source=self.part.source(position))


class PendingOpen(Pending):
    """Claims of shares of references."""

    __slots__ = ("_now", "_refs")

    def __init__(self, request_id: int, refs: Sequence[SliceRef], now: Served) -> None:
        super().__init__(request_id, [ContentKey.from_hex(ref.key) for ref in refs])
        self._refs = refs
        self._now = now

    def granted(self) -> None:
        """A lease is of the model that its reference names, which need not be the one that is served.

        A reference that does not fit what it names is not believed; what was granted for it ends.
        """
        for position, (ref, lease) in enumerate(zip(self._refs, self.results, strict=True)):
            if not isinstance(lease, Lease):
                continue
            fault = ref.mismatch(lease.num_tokens, lease.nbytes, lease.grid_thw)
            now = (self._now.dtype, self._now.dim or ref.dim)
            if ref.fingerprint == self._now.fingerprint and (ref.dtype, ref.dim) != now:
                fault = f"the reference says {ref.dtype} of width {ref.dim}, its model has {self._now.dtype}"
                fault += f" of width {self._now.dim}: it was edited"
            if fault:
                lease.release()
                self.fail(position, SliceGone, fault)
            else:
                lease.is_of(Served(ref.fingerprint, ref.dtype, ref.dim, ""))


class Ask:
    """A question in flight.

    Attributes:
        answer: the frame that answers it, once it is there.
        is_given_up: nobody waits for it any more.
        undo: gives back what the answer to a question that was given up brings.
    """

    __slots__ = ("answer", "ask_id", "is_given_up", "undo")

    def __init__(self, ask_id: int, undo: Callable[[Frame], None] = lambda _: None) -> None:
        self.ask_id = ask_id
        self.answer: Frame | None = None
        self.is_given_up = False
        self.undo = undo

    @property
    def is_done(self) -> bool:
        """Whether the answer is there."""
        return self.answer is not None

    @staticmethod
    def id_of(answer: Frame) -> int:
        """Of the question that a frame answers."""
        if answer.kind == Kind.LOOKUP_REPLY:
            if len(answer.body) < LOOKUP_HEAD.size:
                raise ProtocolError("a LOOKUP_REPLY without a head")
            (ask_id,) = LOOKUP_HEAD.unpack_from(answer.body)
            return int(ask_id)
        return parse(_AnyAnswer, answer).ask_id


class _AnyAnswer(BaseModel):
    """What every other answer has."""

    ask_id: int


def frame_of(ask: Ask) -> Frame:
    """The answer, which is there."""
    assert ask.answer is not None, "it was waited for"
    return ask.answer
