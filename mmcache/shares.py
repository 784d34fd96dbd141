"""The shares of one connection in this process: each ends once, by a store into the control memory."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ipc.control import ControlMemory
from mmcache.errors import CapturingError, DeviceUnavailable
from mmcache.stream_shares import StreamShares

if TYPE_CHECKING:
    import torch


class Shares:
    """What is leased to this process. Any thread may end a share, at any time.

    Attributes:
        control: the words that the coordinator reads.
        live: tokens (slot and generation in one number) of shares that are not acknowledged; of them
        held: those that only the death of their memory acknowledges.
        in_streams: those that are read on a device, and how they end.
    """

    def __init__(self, control_fd: int) -> None:
        """`control_fd` is closed."""
        self.control = ControlMemory.attach(control_fd)
        os.close(control_fd)
        self.live: set[int] = set()
        self.held: set[int] = set()
        self.in_streams = StreamShares(self.control)
        self._getpid = os.getpid  # also there when the interpreter goes down
        self._pid = os.getpid()
        self._late: deque[tuple[int, int]] = deque()
        ordered = self.control.store_is_ordered
        self._acknowledge = self.control.acknowledge if ordered else self._acknowledge_late

    @property
    def is_mine(self) -> bool:
        """Whether this process opened the connection; a forked child must not acknowledge its parent's shares."""
        return self._getpid() == self._pid

    def acknowledge(self, token: int, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        """A share ends. A store into the control memory; where stores are not ordered, a message with the next call.

        One that was read on a device ends there, when its streams get there: those given, or else those that were
        current when its views were taken, and the current one.

        Raises:
            CapturingError: one of them is being captured into a graph; the share goes on.
            DeviceUnavailable: the device failed; likewise.
        """
        if token not in self.live or not self.is_mine:
            return
        if token in self.in_streams.reads:
            unclaim = partial(self._unclaim, token, token in self.held)
            self.in_streams.acknowledge(token, streams, partial(self._claim, token), unclaim)
        elif self._claim(token):
            self._acknowledge(token >> 32, token & 0xFFFFFFFF)

    def let_go(self, token: int) -> None:
        """The last view died: the share ends, after a capture if one is going on. For finalizers: it raises nothing."""
        try:
            self.acknowledge(token)
        except CapturingError:
            self.in_streams.end_later(token, partial(self.acknowledge, token))
        except DeviceUnavailable:  # it goes on until this process ends
            return

    def _claim(self, token: int) -> bool:
        """Whether it is for this thread to end a share."""
        try:
            self.live.remove(token)
        except KeyError:  # another one was faster
            return False
        if self.held:
            self.held.discard(token)
        return True

    def _unclaim(self, token: int, was_held: bool) -> None:
        """It could not be ended, and goes on as it was."""
        if was_held:
            self.held.add(token)
        self.live.add(token)

    def check_release_all(self) -> None:
        """Raise `CapturingError` if `release_all` cannot end every share now. Nothing is changed."""
        self.in_streams.check(self.live - self.held)

    def release_all(self) -> None:
        """Acknowledge every share but held ones. What a capture or a device that failed keeps goes on, as they do."""
        for token in self.live - self.held:
            with contextlib.suppress(CapturingError, DeviceUnavailable):
                self.acknowledge(token)

    def _acknowledge_late(self, slot: int, generation: int) -> None:
        self._late.append((slot, generation))

    def going_on(self) -> list[int]:
        """Shares that go on when the connection is over."""
        live = list(self.live)  # first: a share leaves it for the others
        return list(dict.fromkeys(live + self.in_streams.going_on()))
