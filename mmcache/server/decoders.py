"""The coordinator's side of the decoder: jobs, their answers, and what happens when it dies or hangs on one."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from ipc.memory_shm import sealed_copy
from mmcache.errors import ITEM_ERRORS, EncodeFailed, ItemError, ProtocolError, SidecarError, UndecodableImage
from mmcache.framing import Frame, Kind, close_all, pack_frame, parse
from mmcache.keys import KeyHasher
from mmcache.media import ARRAY
from mmcache.server.channel import Poller
from mmcache.server.children import Child, restart_delay_s
from mmcache.server.ingest import Ingest, IngestBusyError, IngestSlice
from mmcache.server.messages import Drop, Fill, Filled, Probe, Probed, StartDecoder, pixels_shape

log = logging.getLogger(__name__)

MAX_JOBS = 8
"""Jobs a decoder is given at once: enough that it never waits for the coordinator."""

MAX_TRIES = 6
"""Of one item, whoever was to blame for the decoders' deaths."""

MODULE = "mmcache.server.decoder_process"

OnSize: TypeAlias = "Callable[[int, int, int], None]"
"""Told the height, width and frames of an item whose pixels are to come."""


class SharedDescriptor:
    """A descriptor that several items lie in, closed when the last of them is done."""

    __slots__ = ("_num_users", "fd")

    def __init__(self, fd: int) -> None:
        """Takes the descriptor over, with one user."""
        self.fd = fd
        self._num_users = 1

    def share(self) -> None:
        """One user more."""
        self._num_users += 1

    def release(self) -> None:
        """One user is done."""
        self._num_users -= 1
        if self._num_users == 0:
            os.close(self.fd)


@dataclass(frozen=True, slots=True)
class Supplied:
    """An item's bytes as a client sent them: a claim until the decoder has hashed them."""

    memory: SharedDescriptor
    namespace: str
    kind: str
    header: bytes
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Pixels:
    """Decoded RGB pixels, uint8, in the ingest region; the holder frees the slice.

    A picture, `[height, width, 3]`, if `num_frames` is 0; else a video chunk, `[num_frames, height, width, 3]`.
    """

    part: IngestSlice
    height: int
    width: int
    num_frames: int

    @property
    def offset(self) -> int:
        """In the ingest region."""
        return self.part.offset


class _DecoderLostError(Exception):
    """The decoder died with this job in its hands; `was_at_work` if this is what it was working on."""

    def __init__(self, was_at_work: bool) -> None:
        self.was_at_work = was_at_work


class Decoders:
    """One decoder process, restarted when it dies, and another for what a decoder has died on: nobody waits behind it.

    `is_for_suspects`: it is that other one.
    """

    def __init__(
        self, poller: Poller, ingest: Ingest, seed: int, max_pixels: int, orientation: str, timeout_s: float,
        *, is_for_suspects: bool = False,
    ) -> None:  # fmt: skip
        self._is_for_suspects = is_for_suspects
        self._make_other = partial(
            Decoders, poller, ingest, seed, max_pixels, orientation, timeout_s, is_for_suspects=True
        )
        self._other: Decoders | None = None
        self._poller = poller
        self._ingest = ingest
        self._start = StartDecoder(seed=seed, max_pixels=max_pixels, orientation=orientation)
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(MAX_JOBS)
        self._answers: dict[int, asyncio.Future[Probed | Filled]] = {}
        self._unanswered: deque[int] = deque()  # the order in which the process works: its head is what it works on
        self._watchdog: asyncio.TimerHandle | None = None
        self._last_job = 0
        self._stopping = False
        self._deaths_in_a_row = 0
        self._up = asyncio.Event()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._child: Child | None = None
        self.num_restarts = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the decoders that are alive."""
        others = self._other.pids if self._other is not None else []
        return [self._child.pid, *others] if self._child is not None else others

    @property
    def is_idle(self) -> bool:
        """Whether nothing is decoded or waits to be."""
        return not self._answers and not self._slots.locked() and (self._other is None or self._other.is_idle)

    async def decode(
        self, item: Supplied, key: bytes, *, is_urgent: bool = True, on_size: OnSize | None = None
    ) -> Pixels:
        """Check an item against its key and decode it. Not to be cancelled: the process may be writing.

        What is not urgent waits for no room. `on_size(height, width, num_frames)` is called as soon as the header is
        read; an `ItemError` that it raises ends the decoding.

        Raises:
            ItemError: as the decoder says; `ContentMismatch` when the bytes are not those of the key.
            IngestBusyError: there is no room to spare for what is not urgent.
        """
        async with self._slots:
            for _ in range(MAX_TRIES):
                try:
                    return await self._decode_once(item, key, is_urgent, on_size)
                except _DecoderLostError as lost:
                    if lost.was_at_work:
                        break
            else:
                raise EncodeFailed("no decoder lived long enough to decode it")
        if self._is_for_suspects:
            raise UndecodableImage("two decoders died or hung on it")
        if self._other is None:
            self._other = self._make_other()
            self._other._spawn()
        return await self._other.decode(
            item, key, is_urgent=is_urgent, on_size=on_size
        )  # the first death may have been another's doing

    async def start(self) -> None:
        """Start the process and decode one pixel: returns once it is up and well.

        Raises:
            SidecarError: it cannot start.
        """
        self._spawn()
        await self._started
        pixel, header = b"\0\0\0", b'{"dtype":"uint8","shape":[1,1,3]}'
        fd, _ = sealed_copy("mmcache-check", [pixel])
        memory = SharedDescriptor(fd)
        try:
            key = KeyHasher(self._start.seed).key(ARRAY, header, pixel)
            pixels = await self.decode(Supplied(memory, "", ARRAY, header, 0, len(pixel)), key)
            self._ingest.free(pixels.part)
        finally:
            memory.release()

    async def stop(self, timeout_s: float) -> None:
        """End the process."""
        self._stopping = True
        if self._other is not None:
            await self._other.stop(timeout_s)
        if self._child is not None:
            await self._child.stop(timeout_s)

    async def _decode_once(self, item: Supplied, key: bytes, is_urgent: bool, on_size: OnSize | None) -> Pixels:
        await self._up.wait()
        self._last_job += 1
        job_id, child = self._last_job, self._child
        assert child is not None, "it is up"
        probe = Probe(
            job_id=job_id, namespace=item.namespace, key=key, kind=item.kind, header=item.header, offset=item.offset,
            nbytes=item.nbytes,
        )  # fmt: skip
        child.send(pack_frame(Kind.PROBE, probe, fds=[item.memory.fd]))
        probed = await self._answer(job_id)
        assert isinstance(probed, Probed), "a probe is answered by Probed"
        try:
            if on_size is not None:
                on_size(probed.height, probed.width, probed.num_frames)
            nbytes = math.prod(pixels_shape(probed.num_frames, probed.height, probed.width))
            part = await self._ingest.reserve(nbytes) if is_urgent else self._ingest.reserve_spare(nbytes)
        except (ItemError, IngestBusyError):
            child.send(pack_frame(Kind.DROP, Drop(job_id=job_id)))
            raise
        try:
            if child is not self._child:
                raise _DecoderLostError(was_at_work=False)
            child.send(pack_frame(Kind.FILL, Fill(job_id=job_id, offset=part.offset)))
            await self._answer(job_id)
        except (ItemError, _DecoderLostError):
            self._ingest.free(part)
            raise
        return Pixels(part, probed.height, probed.width, probed.num_frames)

    async def _answer(self, job_id: int) -> Probed | Filled:
        future: asyncio.Future[Probed | Filled] = self._loop.create_future()
        self._answers[job_id] = future
        self._unanswered.append(job_id)
        if self._watchdog is None:
            self._watch()
        answer = await future
        if answer.error:
            raise ITEM_ERRORS[answer.error](answer.reason)
        return answer

    def _spawn(self) -> None:
        if self._stopping:
            return
        try:
            self._child = Child(self._poller, MODULE, self._on_frame, self._on_exit, {})
        except OSError as error:
            self._on_exit(f"a decoder cannot be started: {error.strerror}")
        else:
            self._child.send(pack_frame(Kind.START_DECODER, self._start, fds=[self._ingest.region.fd]))

    def _on_frame(self, frame: Frame) -> None:
        close_all(frame.fds)
        if frame.kind == Kind.DECODER_READY:
            self._up.set()
            if not self._started.done():
                self._started.set_result(None)
            return
        answer = parse(Probed, frame) if frame.kind == Kind.PROBED else parse(Filled, frame)
        if not self._unanswered or self._unanswered[0] != answer.job_id or answer.error not in ("", *ITEM_ERRORS):
            raise ProtocolError("the decoder's answer makes no sense")  # it is replaced
        self._deaths_in_a_row = 0
        self._unanswered.popleft()
        self._answers.pop(answer.job_id).set_result(answer)
        self._watch()

    def _watch(self) -> None:
        """Give the job at the head its time."""
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        if self._unanswered and self._child is not None:
            self._watchdog = self._loop.call_later(self._timeout_s, self._child.kill)

    def _on_exit(self, reason: str) -> None:
        at_work = self._unanswered[0] if self._unanswered else None
        lost, self._answers = self._answers, {}
        self._unanswered.clear()
        self._child = None
        self._up.clear()
        self._watch()
        for job_id, future in lost.items():
            if not future.done():
                future.set_exception(_DecoderLostError(job_id == at_work))
        if not self._started.done():
            self._started.set_exception(SidecarError(reason))
        elif not self._stopping:
            delay_s = restart_delay_s(self._deaths_in_a_row)
            log.warning("%s; another one starts in %.1f s", reason, delay_s)
            self._deaths_in_a_row += 1
            self.num_restarts += 1
            self._loop.call_later(delay_s, self._spawn)
