"""A thread that waits for events of devices and acknowledges then: for devices whose streams cannot write words."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from ipc.control import ControlMemory
from ipc.cuda_driver import is_event_done, primary_context, relaxed
from ipc.errors import CudaFailed

if TYPE_CHECKING:
    import torch

_POLL_SECONDS = 2e-4


class _Pending(NamedTuple):
    """What is stored once the work before `event` is done; the event is of the device `ordinal`."""

    event: torch.cuda.Event
    ordinal: int
    slot: int
    generation: int


class EventWaiter:
    """Stores words whose events are done, in no particular order. Its thread begins with the first."""

    def __init__(self, control: ControlMemory) -> None:
        self._control = control
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()  # put may come in the middle of a put
        self._thread: threading.Thread | None = None
        self._is_started = False

    def add(self, event: torch.cuda.Event, ordinal: int, slot: int, generation: int) -> None:
        """Store `generation` once the event is done. Never after the device has failed: somebody may be reading."""
        self._queue.put(_Pending(event, ordinal, slot, generation))
        if not self._is_started:
            self._is_started = True
            self._thread = threading.Thread(target=self._run, name="cuda-acknowledge", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Returns when all that was added is stored. Nothing may be added any more."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        pending: list[_Pending] = []
        is_finishing = False
        with relaxed():
            while pending or not is_finishing:
                if not pending and not is_finishing:
                    is_finishing = self._take(pending, block=True)
                while not is_finishing and not self._queue.empty():
                    is_finishing = self._take(pending, block=False)
                pending = [waiting for waiting in pending if not self._is_over(waiting)]
                if pending:
                    time.sleep(_POLL_SECONDS)

    def _take(self, pending: list[_Pending], *, block: bool) -> bool:
        """Moves one into `pending`. True if it was the last."""
        item = self._queue.get(block=block)
        if item is not None:
            pending.append(item)
        return item is None

    def _is_over(self, waiting: _Pending) -> bool:
        try:
            with primary_context(waiting.ordinal):
                if not is_event_done(waiting.event.cuda_event):
                    return False
        except CudaFailed:  # the device failed: the share goes on until this process ends
            return True
        self._control.acknowledge(waiting.slot, waiting.generation)
        return True
