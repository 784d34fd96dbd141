"""Acknowledgements in stream order: the device itself writes the word, after the last read.

The host neither waits nor polls. The control memory is registered with CUDA once, for all devices.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from ipc.control import GENERATION_MAX, WORD_BYTES, ControlMemory
from ipc.cuda_driver import call, driver, is_capturing, primary_context, relaxed
from ipc.cuda_mapping import await_device
from ipc.errors import CapturingError, OutOfBounds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words: TypeAlias = NDArray[np.uint32]

_POLL_SECONDS = 2e-4
_Pending: TypeAlias = tuple[Callable[[], bool], int, int]
"""Whether the work is done, and the slot and generation to store then."""


class StreamAcknowledger:
    """Acknowledges the shares of one connection in stream order. Thread-safe.

    Where a device has no stream memory operations, or `by_stream` is False, an event and a thread do it: the thread
    looks every 0.2 ms while something is pending, and stores the word once the event is done.

    Attributes:
        num_stream_writes: acknowledgements that a stream writes.
        num_fallbacks: acknowledgements that the thread stores.
    """

    def __init__(self, control: ControlMemory, device: torch.device, *, by_stream: bool = True) -> None:
        """Registers `control`, whose memory stays mapped until `close()`; `control` itself stays the caller's.

        `device` is the consumer's own, with its number; streams of its other devices may be used too. Raises
        `DeviceUnavailable` without a device, and `CudaFailed` if the memory cannot be registered.
        """
        self.num_stream_writes = 0
        self.num_fallbacks = 0
        self._control = control
        self._by_stream = by_stream
        self._lock = threading.Lock()
        self._devices: dict[int, int | None] = {}
        self._waiting: _Waiting | None = None
        _register(control.words, device.index)
        self._close = weakref.finalize(self, _unregister, self._devices, control.words, device.index)
        self._close.atexit = False

    def acknowledge(self, slot: int, generation: int, streams: Sequence[torch.cuda.Stream]) -> None:
        """The share's last reads are those that are queued on `streams` now. Returns at once.

        The word of `slot` becomes `generation` when the work that all of them have queued so far is done: the first
        waits for the others, and later work on it waits too.

        Raises `CapturingError` if one of them is being captured into a graph, whose replays would acknowledge the
        wrong share; `OutOfBounds` for a slot, a generation or streams that cannot be. Nothing is changed then.
        """
        if not 0 < slot < self._control.num_words:
            raise OutOfBounds(f"slot {slot} is not one of 1..{self._control.num_words - 1}")
        if not 0 < generation <= GENERATION_MAX:
            raise OutOfBounds(f"generation {generation} is not one of 1..{GENERATION_MAX}")
        if not streams:
            raise OutOfBounds("an acknowledgement in stream order needs at least one stream")
        first, *others = streams
        ordinal = first.device_index
        with primary_context(ordinal):
            refuse_captures(streams, ordinal)
            with self._lock:
                if not self._close.alive:
                    raise OutOfBounds("the acknowledger is closed")
                words = self._words_on(ordinal)
                for other in others:
                    first.wait_event(other.record_event())
                self._write(first, words, slot, generation)

    def close(self) -> None:
        """Wait until every word is written, and unregister the memory. Twice is harmless.

        Waits for all work of the devices that acknowledged; not to be called while a graph is captured on one.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, None
            if waiting is not None:
                waiting.finish()
            self._close()

    def _words_on(self, ordinal: int) -> int | None:
        """The words as the device sees them, or None where a thread has to store. The lock is held."""
        if ordinal not in self._devices:
            writes = self._by_stream and _has_stream_writes(ordinal)
            self._devices[ordinal] = _device_address(self._control.words, ordinal) if writes else None
        return self._devices[ordinal]

    def _write(self, stream: torch.cuda.Stream, words: int | None, slot: int, generation: int) -> None:
        if words is None:
            if self._waiting is None:
                self._waiting = _Waiting(self._control)
            self._waiting.add(stream.record_event().query, slot, generation)
            self.num_fallbacks += 1
        else:
            call(driver.cuStreamWriteValue32, stream.cuda_stream, words + slot * WORD_BYTES, generation, 0)
            self.num_stream_writes += 1


class _Waiting:
    """The thread that stores words whose events are done, in no particular order."""

    def __init__(self, control: ControlMemory) -> None:
        self._control = control
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="cuda-acknowledge", daemon=True)
        self._thread.start()

    def add(self, is_done: Callable[[], bool], slot: int, generation: int) -> None:
        self._queue.put((is_done, slot, generation))

    def finish(self) -> None:
        """Returns when all that was added is stored."""
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
                pending = [waiting for waiting in pending if not self._store(*waiting)]
                if pending:
                    time.sleep(_POLL_SECONDS)

    def _take(self, pending: list[_Pending], *, block: bool) -> bool:
        """Moves one into `pending`. True if it was the last."""
        item = self._queue.get(block=block)
        if item is not None:
            pending.append(item)
        return item is None

    def _store(self, is_done: Callable[[], bool], slot: int, generation: int) -> bool:
        if not is_done():
            return False
        self._control.acknowledge(slot, generation)
        return True


def refuse_captures(streams: Iterable[torch.cuda.Stream], current: int = -1) -> None:
    """Raise `CapturingError` if one of them is being captured. `current`: the device whose context is current."""
    for stream in streams:
        ordinal = stream.device_index
        if ordinal == current:
            is_refused = is_capturing(stream.cuda_stream)
        else:
            with primary_context(ordinal):
                is_refused = is_capturing(stream.cuda_stream)
        if is_refused:
            raise CapturingError(
                f"{stream} is being captured into a CUDA graph: every replay would write this share's generation "
                "again. Acknowledge outside the capture"
            )


def _register(words: Words, ordinal: int) -> None:
    flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
    with primary_context(ordinal), relaxed():
        call(driver.cuMemHostRegister, _host_address(words), words.nbytes, flags)


def _unregister(devices: dict[int, int | None], words: Words, ordinal: int) -> None:
    """The finalizer keeps `words`: the memory must stay mapped until the devices are done with it."""
    for each in devices:
        with primary_context(each):
            await_device(torch.cuda.current_stream(each).cuda_stream)
    with primary_context(ordinal), relaxed():
        call(driver.cuMemHostUnregister, _host_address(words))


def _device_address(words: Words, ordinal: int) -> int:
    with primary_context(ordinal):
        return int(call(driver.cuMemHostGetDevicePointer, _host_address(words), 0))


def _host_address(words: Words) -> int:
    address: int = words.__array_interface__["data"][0]
    return address


def _has_stream_writes(ordinal: int) -> bool:
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
    return bool(call(driver.cuDeviceGetAttribute, attribute, call(driver.cuDeviceGet, ordinal)))
