"""A coordinator inside a process that is another's: its loop on a thread, its rank on others, no socket in the file
system. Decoders are processes as ever, since they open files that nobody vouches for."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from mmcache.config import Settings
from mmcache.errors import SidecarUnavailable
from mmcache.server.coordinator import Coordinator
from mmcache.server.ingest import Ingest
from mmcache.server.rank_thread import spawn_thread
from mmcache.server.state import load_or_create_seed, prepare_state
from mmcache.server.stores import open_store

log = logging.getLogger(__name__)

T = TypeVar("T")


class _LastingExecutor(concurrent.futures.ThreadPoolExecutor):
    """Does what is submitted while the interpreter exits, when executors start nothing any more: at once, for once."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            done: concurrent.futures.Future[T] = concurrent.futures.Future()
            try:
                done.set_result(fn(*args, **kwargs))
            except Exception as error:  # noqa: BLE001  # it belongs to who waits
                done.set_exception(error)
            return done


class Inside:
    """Serves connections from its constructor's return to `close`, which the interpreter's exit calls too.

    Raises (constructor):
        ConfigError, CheckpointError, SidecarError: it cannot start; nothing of it is left then.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pid = os.getpid()
        self._began = threading.Event()
        self._ready: concurrent.futures.Future[Coordinator] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="mmcache", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            self._began.wait()
            self._coordinator = self._ready.result()
        except BaseException:
            self.close()
            raise

    def connect(self) -> socket.socket:
        """A connected socket, whose other end is served.

        Raises:
            SidecarUnavailable: it is over.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._loop.call_soon_threadsafe(self._coordinator.accept, theirs)
        except RuntimeError:
            ours.close()
            theirs.close()
            raise SidecarUnavailable("it was closed") from None
        return ours

    def stop(self) -> None:
        """Begin to end, without waiting for it. Any thread may call this, at any time."""
        if os.getpid() == self._pid:
            self._began.wait()
            with contextlib.suppress(RuntimeError):  # it is over
                self._loop.call_soon_threadsafe(self._stop.set)

    def close(self) -> None:
        """End: finish what waits to be stored, end threads and processes, give the memory back. Twice is harmless."""
        if os.getpid() == self._pid:  # a forked child has none of its threads
            self.stop()
            self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as fault:  # whatever it is, it belongs to who waits, and the process is another's
            if self._ready.done():
                log.critical("the coordinator inside this process has failed", exc_info=fault)
            else:
                self._ready.set_exception(fault)
        finally:
            atexit.unregister(self.close)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_default_executor(_LastingExecutor())
        self._began.set()
        settings = self._settings
        seed = load_or_create_seed(prepare_state(settings.state))
        store = await open_store(settings)
        home = Coordinator(
            settings, seed, Ingest(settings.ingest_bytes), store, spawn_rank=spawn_thread, may_spin=False
        )
        try:
            if await self._started(home):
                self._ready.set_result(home)
                await self._stop.wait()
                await home.drain(settings.drain_timeout_s)
        finally:
            await home.stop()

    async def _started(self, home: Coordinator) -> bool:
        """False if it was stopped meanwhile."""
        starting = asyncio.ensure_future(home.start())
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait((starting,))
            return False
        starting.result()
        return True
