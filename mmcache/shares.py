"""The shares of one connection in this process: each ends once, by a store into the control memory."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator

from ipc.control import ControlMemory
from mmcache.device_memory import StreamAcknowledgements, Streams
from mmcache.errors import CapturingError


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
        self.in_streams = StreamAcknowledgements(self.control)
        self._getpid = os.getpid  # also there when the interpreter goes down
        self._pid = os.getpid()
        self._late: deque[tuple[int, int]] = deque()
        ordered = self.control.store_is_ordered
        self._acknowledge = self.control.acknowledge if ordered else self._acknowledge_late

    @property
    def is_mine(self) -> bool:
        """Whether this process opened the connection; a forked child must not acknowledge its parent's shares."""
        return self._getpid() == self._pid

    def acknowledge(self, token: int, streams: Streams = None) -> None:
        """A share ends. A store into the control memory; where stores are not ordered, a message with the next call.

        One that was read on a device ends there, when its streams (those given, or else the current one) get there.

        Raises:
            CapturingError: one of them is being captured into a graph; the share goes on.
        """
        if token not in self.live or not self.is_mine:
            return
        if token in self.in_streams.reads:
            self.in_streams.acknowledge(token, streams, lambda: self._claim(token), lambda: self.live.add(token))
        elif self._claim(token):
            self._acknowledge(token >> 32, token & 0xFFFFFFFF)

    def _claim(self, token: int) -> bool:
        """Whether it is for this thread to end a share."""
        try:
            self.live.remove(token)
        except KeyError:  # another one was faster
            return False
        if self.held:
            self.held.discard(token)
        return True

    def check_release_all(self) -> None:
        """Raise `CapturingError` if `release_all` cannot end every share now. Nothing is changed."""
        self.in_streams.check(self.live - self.held)

    def release_all(self) -> None:
        """Acknowledge every share but held ones. What is read on a stream that is being captured goes on, as they do"""
        for token in self.live - self.held:
            with contextlib.suppress(CapturingError):
                self.acknowledge(token)

    def _acknowledge_late(self, slot: int, generation: int) -> None:
        self._late.append((slot, generation))

    def going_on(self) -> Iterator[int]:
        """Shares that go on when the connection is over."""
        yield from tuple(self.live)
        yield from self.in_streams.pending()
