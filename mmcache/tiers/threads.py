"""For tiers that work in threads: threads that can be left, memory that can be taken back, waiting, and a gate."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mmcache.tiers.base import LeftBehindError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    work: Callable[[], object]
    future: asyncio.Future[Any]
    ends_thread: bool = False

    def run(self) -> None:
        if self.future.cancelled():
            return
        result: object = None
        error: BaseException | None = None
        try:
            result = self.work()
        except BaseException as raised:  # noqa: BLE001  # whatever it is, it belongs to the one who waits
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.future.get_loop().call_soon_threadsafe(self._resolve, result, error)

    def _resolve(self, result: object, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class Threads:
    """Daemon threads that work for an event loop, in order of submission. Used on the loop.

    Other than an executor's, they can be left behind when they hang, and the interpreter's exit does not wait for them.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._unfinished: set[asyncio.Future[Any]] = set()
        self._ends: list[asyncio.Future[Any]] = []
        self._num_threads = num_threads
        for number in range(num_threads):
            threading.Thread(target=_work, args=(self._jobs,), name=f"{name}-{number}", daemon=True).start()

    def submit(self, work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Run `work` in a thread. Cancelling the future prevents what has not begun, and else only ends the wait."""
        return self._submit(lambda: work(*arguments))

    def end(self) -> None:
        """Let the threads end after what is submitted; waits for nothing. Submitting afterwards is an error."""
        assert not self._ends, "threads end once"
        self._ends = [self._submit(_nothing, ends_thread=True) for _ in range(self._num_threads)]

    async def close(self, timeout_s: float) -> bool:
        """End the threads. False when one hangs: it is left behind, and its calls fail with LeftBehindError."""
        if not self._ends:
            self.end()
        _, hung = await asyncio.wait(self._ends, timeout=max(0.0, timeout_s))
        for future in list(self._unfinished):
            future.set_exception(LeftBehindError("closed while it hung; a thread was left behind"))
            future.exception()  # whether anybody waits for it or not
        return not hung

    def _submit(self, work: Callable[[], object], *, ends_thread: bool = False) -> asyncio.Future[Any]:
        assert ends_thread or not self._ends, "nothing is submitted after the end"
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        self._jobs.put(_Job(work, future, ends_thread))
        return future


def _work(jobs: SimpleQueue[_Job]) -> None:
    ended = False
    while not ended:
        job = jobs.get()
        job.run()
        ended = job.ends_thread
        del job  # its arguments are not kept until the next one comes


def _nothing() -> None:
    return None


class Outcome(Enum):
    """How a read into a landing ended."""

    READ = auto()
    GONE = auto()
    DAMAGED = auto()
    ABANDONED = auto()


class Step(NamedTuple):
    """What one transaction of a purge came to. `after`: where the next one goes on, None at the end."""

    num_entries: int
    nbytes: int
    num_damaged: int
    after: bytes | None


@dataclass(slots=True, eq=False)
class Landing:
    """A destination that its owner can take back from a thread that may still be writing to it."""

    into: memoryview
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def write(self, offset: int, source: memoryview) -> bool:
        """Copy without the GIL. Returns False, writing nothing, once the landing is closed."""
        with self._lock:
            if self._closed:
                return False
            target = np.frombuffer(self.into, np.uint8)[offset : offset + source.nbytes]
            np.copyto(target, np.frombuffer(source, np.uint8))
            return True

    def close(self) -> None:
        """Take it back: waits for the write in progress, if any, and lets no other begin."""
        with self._lock:
            self._closed = True


async def settled(future: asyncio.Future[T]) -> T:
    """The result of work in a thread; a cancellation takes effect only once the thread has let go of its arguments."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return future.result()


class Gate:
    """Many threads share it, or one has it alone."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._num_shared = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Beside others that share it."""
        with self._condition:
            self._num_shared += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_shared -= 1
                self._condition.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Alone; waits for those that share it. A thread that shares it already would wait for ever."""
        with self._condition:
            self._condition.wait_for(lambda: self._num_shared == 0)
            yield
