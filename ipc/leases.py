"""Leases: who may still read which extent.

A share is one consumer's right to read one extent. It ends by its acknowledgement or by its holder's death, and by
nothing else: a closed socket or a limit only quarantines it. Time is injected; the states are in ipc/shares.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from ipc.control import GENERATION_MAX, ControlMemory
from ipc.errors import BadTransition, ControlExhausted
from ipc.offers import Offer, Offers
from ipc.shares import HELD_BY, HOLDER_TRANSITIONS, HolderState, Leasable, Share, ShareState

if TYPE_CHECKING:
    from numpy.typing import NDArray


# A name of a module is much cheaper to read than a member of an enumeration (150 ns on Python 3.11).
_HELD = ShareState.HELD
_ACKNOWLEDGED = ShareState.ACKNOWLEDGED
_CONNECTED = HolderState.CONNECTED


class Holder:
    """All shares of one connection, and what it offers to others.

    Attributes:
        name, pid: who it is, for people.
        state: CONNECTED; QUARANTINED once its socket is closed; DEAD once its process died.
        num_active: shares that have not ended.
        num_granted, num_acknowledged, num_died: totals of shares.
        num_strays: acknowledgements that were late, doubled or meant for another share. They change nothing.
        offers: its offers, with totals of their own; none is part of `num_active`.
    """

    def __init__(
        self, control: ControlMemory, name: str, pid: int, *, clock: Callable[[], float] = time.monotonic,
        on_ended: Callable[[Sequence[Share]], None] | None = None,
    ) -> None:  # fmt: skip
        """The holder reads `control` until its last share ended; closing it stays the caller's task.

        `on_ended` is told of shares that have ended, some at a time.
        """
        self.control = control
        self.name = name
        self.pid = pid
        self.state = HolderState.CONNECTED
        self.num_active = 0
        self.num_granted = 0
        self.num_acknowledged = 0
        self.num_died = 0
        self.num_strays = 0
        self.offers = Offers()
        self._clock = clock
        self._on_ended = on_ended
        # By slot, in the order of grants: a slot is deleted when its share ends.
        self._shares: dict[int, Share] = {}
        # By slot, as long as the highest slot ever granted. Slot 0 is never granted.
        self._generations: list[int] = [0]
        self._free: list[int] = []
        self._words = control.scalars
        self._seen: NDArray[np.uint32] = np.zeros(64, np.uint32)  # grows with the slots: most holders need few
        self._seen_words = self._seen.data  # the same memory; quicker for one word

    def grant(self, extent: Leasable, now: float | None = None) -> Share:
        """Begin a share on `extent`. `now`: the time on the holder's clock, for who grants many at once.

        Raises `ControlExhausted` if every word is in use (`sweep` may free some), and `BadTransition` if the holder is
        not connected or the extent may not be leased. Nothing changes then.
        """
        if self.state is not _CONNECTED:
            raise self._not_connected()
        now = self._clock() if now is None else now
        if not self._free and len(self._generations) == self.control.num_words:
            raise ControlExhausted(
                f"holder {self.name} (pid {self.pid}) has {self.num_active} shares, one for every word"
            )
        extent.share_granted(now)
        slot = self._free.pop() if self._free else self._new_slot()
        generation = self._generations[slot] = self._generations[slot] % GENERATION_MAX + 1  # never 0
        # A word written ahead of its grant acknowledges nothing.
        self._words[slot] = 0
        self._seen_words[slot] = 0
        share = self._shares[slot] = Share(self, slot, generation, extent, now)
        self.num_active += 1
        self.num_granted += 1
        return share

    def grant_all(self, extents: Sequence[Leasable], now: float) -> list[Share]:
        """Begin a share on each of `extents`, as `grant` does, until no word is left: those from there on have none.

        Raises `BadTransition` as `grant` does; the shares that were begun before are ended again then.
        """
        if self.state is not _CONNECTED:
            raise self._not_connected()
        free, generations, words, seen = self._free, self._generations, self._words, self._seen_words
        shares: list[Share] = []
        for extent in extents[: len(free) + self.control.num_words - len(generations)]:
            try:
                extent.share_granted(now)
            except BadTransition:
                self._take_back(shares)
                raise
            if free:
                slot = free.pop()
            else:
                slot = self._new_slot()
                seen = self._seen_words
            generation = generations[slot] = generations[slot] % GENERATION_MAX + 1  # never 0
            words[slot] = seen[slot] = 0  # a word written ahead of its grant acknowledges nothing
            share = self._shares[slot] = Share(self, slot, generation, extent, now)
            shares.append(share)
        self.num_active += len(shares)
        self.num_granted += len(shares)
        return shares

    def now(self) -> float:
        """The time on its clock, in seconds."""
        return self._clock()

    def offer(self, extent: Leasable, num_shares: int) -> Offer:
        """Set aside `num_shares` shares on `extent` for others, who claim them one by one.

        They take no words of this holder. What is unclaimed ends with its socket or process, or by `Offer.cancel`.
        Raises `BadTransition` as `grant` does.
        """
        if self.state is not _CONNECTED:
            raise self._not_connected()
        return self.offers.add(self, extent, num_shares, self._clock())

    def sweep(self) -> list[Share]:
        """Read the control memory and end every share whose word is its generation. Returns the shares that ended."""
        ended: list[Share] = []
        words, seen, find = self._words, self._seen_words, self._shares.get
        # Most of what is done for a hit is here: as `_end`, with nothing called that need not be.
        for slot in self.control.acknowledged(self._seen[: len(self._generations)]):
            word = seen[slot] = words[slot]
            share = find(slot)
            if share is None or share.generation != word:
                self.num_strays += 1
                continue
            if share.state is _HELD:
                share.state = _ACKNOWLEDGED
            else:
                share.move(_ACKNOWLEDGED)
            del self._shares[slot]
            self._free.append(slot)
            share.extent.share_ended()
            ended.append(share)
        self.num_active -= len(ended)
        self.num_acknowledged += len(ended)
        if ended and self._on_ended is not None:
            self._on_ended(ended)
        return ended

    def acknowledge(self, slot: int, generation: int) -> bool:
        """End a share by message. False, and a counted stray, unless `slot` has a share of just that generation."""
        if (share := self._match(slot, generation)) is None:
            return False
        self._end(share, _ACKNOWLEDGED)
        return True

    def find(self, slot: int, generation: int) -> Share | None:
        """The share that has this word, unless it has ended, as far as was swept."""
        share = self._shares.get(slot)
        return share if share is not None and share.generation == generation else None

    def quarantine(self) -> None:
        """The socket closed and the process lives: no more grants, and its shares stay until acknowledged or death.

        Its offers end: nobody would answer for them.
        Raises `BadTransition` if the holder is quarantined or dead already.
        """
        self._move(HolderState.QUARANTINED)
        for share in self.shares():
            if share.state is _HELD:
                share.quarantine()
        self.offers.end_all()

    def end_all(self) -> int:
        """The process died: end shares and offers. Returns how many shares. Raises `BadTransition` the second time."""
        self._move(HolderState.DEAD)
        shares = self.shares()
        for share in shares:
            self._end(share, ShareState.DIED)
        self.offers.end_all()
        return len(shares)

    def shares(self) -> Collection[Share]:
        """The shares that have not ended, oldest first."""
        return list(self._shares.values())

    def older_than(self, granted_before: float) -> list[Share]:
        """The shares granted before that time on the holder's clock, oldest first. Costs nothing when there is none."""
        return list(takewhile(lambda share: share.granted_at < granted_before, self._shares.values()))

    @property
    def bytes_held(self) -> int:
        """Bytes of the extents it has shares on, an extent as often as it has shares. Walks over the shares."""
        return sum(share.extent.nbytes for share in self._shares.values())

    @property
    def num_offered(self) -> int:
        """Shares it ever offered to others."""
        return self.offers.num_offered

    @property
    def num_claimed(self) -> int:
        """Shares that others ever claimed of its offers."""
        return self.offers.num_claimed

    @property
    def num_unclaimed_ended(self) -> int:
        """Shares it offered that ended without a claim."""
        return self.offers.num_unclaimed_ended

    def check(self) -> None:
        """Assert that slots, counters and states agree."""
        shares = self.shares()
        states = {share.state for share in shares}
        assert states <= HELD_BY[self.state], "a share's state does not go with its holder's"
        assert all(self._shares[share.slot] is share for share in shares), "a share is in another's slot"
        ages = [share.granted_at for share in shares]
        assert ages == sorted(ages), "shares are not in the order of grants"
        assert len(shares) == self.num_active, "num_active differs from the shares"
        ended = self.num_acknowledged + self.num_died
        assert self.num_active == self.num_granted - ended, "shares were granted and neither ended nor kept"
        slots = self._free + [share.slot for share in shares]
        assert sorted(slots) == list(range(1, len(self._generations))), "a slot is lost, free and used, or 0"
        self.offers.check()
        assert self.state is _CONNECTED or not self.offers.open(), "an offer outlived its requester"

    def _new_slot(self) -> int:
        if len(self._generations) == len(self._seen):
            self._seen = np.concatenate((self._seen, np.zeros_like(self._seen)))
            self._seen_words = self._seen.data
        self._generations.append(0)
        return len(self._generations) - 1

    def _not_connected(self) -> BadTransition:
        return BadTransition(f"holder {self.name} (pid {self.pid}) is {self.state.name}; it gets no shares")

    def _match(self, slot: int, generation: int) -> Share | None:
        share = self.find(slot, generation)
        if share is None:
            self.num_strays += 1
        return share

    def _end(self, share: Share, state: ShareState) -> None:
        share.move(state)
        del self._shares[share.slot]
        self._free.append(share.slot)
        self.num_active -= 1
        if state is _ACKNOWLEDGED:
            self.num_acknowledged += 1
        else:
            self.num_died += 1
        share.extent.share_ended()
        if self._on_ended is not None:
            self._on_ended((share,))

    def _take_back(self, shares: Sequence[Share]) -> None:
        """Shares that were begun and not counted were never granted."""
        for share in shares:
            del self._shares[share.slot]
            self._free.append(share.slot)
            share.extent.share_ended()

    def _move(self, to: HolderState) -> None:
        if to not in HOLDER_TRANSITIONS[self.state]:
            raise BadTransition(f"holder {self.name} (pid {self.pid}): {self.state.name} to {to.name}")
        self.state = to
