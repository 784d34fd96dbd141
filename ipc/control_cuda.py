"""Acknowledgements in stream order: the device itself writes the word, after the last read.

The host neither waits nor polls. The control memory is registered with CUDA once, for all devices.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch

from ipc.control import GENERATION_MAX, WORD_BYTES, ControlMemory
from ipc.cuda_driver import CAPTURE_ERRORS, call, driver, is_capturing, primary_context, relaxed
from ipc.cuda_host import device_address, lock_pages, unlock_pages
from ipc.cuda_mapping import await_device
from ipc.cuda_waiting import EventWaiter
from ipc.errors import CapturingError, CudaFailed, OutOfBounds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words: TypeAlias = NDArray[np.uint32]

T = TypeVar("T")


class StreamAcknowledger:
    """Acknowledges the shares of one connection in stream order. Thread-safe; a finalizer may come in the middle.

    Where a device has no stream memory operations, or `by_stream` is False, an event and a thread do it: the thread
    looks every 0.2 ms while something is pending, and stores the word once the event is done.

    Attributes:
        num_stream_writes: acknowledgements that a stream writes.
        num_fallbacks: acknowledgements that the thread stores.
    """

    def __init__(self, control: ControlMemory, device: torch.device, *, by_stream: bool = True) -> None:
        """Registers `control`, whose memory stays mapped until `close()`; `control` itself stays the caller's.

        One that is dropped is closed by a thread of its own, in which nobody waits.

        `device` is the consumer's own, with its number; streams of its other devices may be used too. Raises
        `DeviceUnavailable` without a device, and `CudaFailed` if the memory cannot be registered.
        """
        self.num_stream_writes = 0
        self.num_fallbacks = 0
        self._control = control
        self._by_stream = by_stream
        self._ordinal = device.index
        self._lock = threading.RLock()  # what is done under it may collect garbage, and that may acknowledge
        self._devices: dict[int, int | None] = {}
        self._waiting = EventWaiter(control)
        lock_pages(control.words, device.index)
        self._close = weakref.finalize(self, _retire, self._devices, control.words, device.index, self._waiting)
        self._close.atexit = False

    def acknowledge(self, slot: int, generation: int, streams: Sequence[torch.cuda.Stream]) -> None:
        """The share's last reads are those that are queued on `streams` now. Returns at once.

        The word of `slot` becomes `generation` when the work that all of them have queued so far is done: the first
        waits for the others, and later work on it waits too.

        Raises `CapturingError` if one of them is being captured into a graph, whose replays would acknowledge the
        wrong share; `OutOfBounds` for a slot, a generation or streams that cannot be; `CudaFailed` if the device
        failed. Nothing is acknowledged then.
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
                _joined(first, others)
                self._write(first, words, slot, generation)

    def close(self) -> None:
        """Wait until every word is written, and unregister the memory. Twice is harmless.

        Waits for all work of the devices that acknowledged; not to be called while a graph is captured on one.
        """
        with self._lock:
            detached = self._close.detach()
        if detached is not None:
            _unregister(_used(self._devices), self._control.words, self._ordinal, self._waiting)

    def _words_on(self, ordinal: int) -> int | None:
        """The words as the device sees them, or None where a thread has to store. The lock is held."""
        if ordinal not in self._devices:
            writes = self._by_stream and _has_stream_writes(ordinal)
            self._devices[ordinal] = device_address(self._control.words, ordinal) if writes else None
        return self._devices[ordinal]

    def _write(self, stream: torch.cuda.Stream, words: int | None, slot: int, generation: int) -> None:
        if words is None:
            self._waiting.add(_done(stream.record_event), stream.device_index, slot, generation)
            self.num_fallbacks += 1
            return
        try:
            call(driver.cuStreamWriteValue32, stream.cuda_stream, words + slot * WORD_BYTES, generation, 0)
        except CudaFailed as error:
            raise _refused(error) from error
        self.num_stream_writes += 1


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


def _joined(stream: torch.cuda.Stream, others: Iterable[torch.cuda.Stream]) -> None:
    """What is queued on `stream` later comes after what is queued on the others now."""
    for other in others:
        _done(stream.wait_event, _done(other.record_event))


def _done(method: Callable[..., T], *arguments: object) -> T:
    """What a method of torch returns; it raises as the driver's calls do."""
    try:
        return method(*arguments)
    except RuntimeError as error:  # torch's own class has the code
        raise _refused(CudaFailed(str(error), int(getattr(error, "error_code", 0)))) from error


def _refused(error: CudaFailed) -> CudaFailed | CapturingError:
    return CapturingError(f"a CUDA graph is being captured: {error}") if error.code in CAPTURE_ERRORS else error


def _retire(devices: Iterable[int], words: Words, ordinal: int, waiting: EventWaiter) -> None:
    """In a thread, for which nobody waits: whoever dropped the last reference may be capturing a graph."""
    work = (_used(devices), words, ordinal, waiting)
    with suppress(RuntimeError):  # the interpreter exits: no thread can start, and all goes with the process
        threading.Thread(target=_give_back, args=work, name="cuda-unregister", daemon=True).start()


def _give_back(used: Sequence[tuple[int, int]], words: Words, ordinal: int, waiting: EventWaiter) -> None:
    with suppress(CudaFailed):  # a device that failed gives nothing back before the process ends
        _unregister(used, words, ordinal, waiting)


def _used(devices: Iterable[int]) -> list[tuple[int, int]]:
    """The devices, each with the stream that is current in this thread."""
    return [(each, torch.cuda.current_stream(each).cuda_stream) for each in list(devices)]


def _unregister(used: Sequence[tuple[int, int]], words: Words, ordinal: int, waiting: EventWaiter) -> None:
    """Whoever calls keeps `words`: the memory must stay mapped until the devices are done with it."""
    waiting.finish()
    for each, stream in used:
        with primary_context(each), relaxed():
            await_device(stream)
    unlock_pages(words, ordinal)


def _has_stream_writes(ordinal: int) -> bool:
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
    return bool(call(driver.cuDeviceGetAttribute, attribute, call(driver.cuDeviceGet, ordinal)))
