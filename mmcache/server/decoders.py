"""The pool of decoder processes: one line for all of them, and who of them takes what is at its head."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial

from mmcache.errors import EncodeFailed
from mmcache.server.channel import Poller
from mmcache.server.decode_job import Job, Pixels, SharedDescriptor, Supplied
from mmcache.server.decode_turn import DecoderLostError, MovedError, Turn
from mmcache.server.decoder import Decoder
from mmcache.server.fair_queue import FairQueue
from mmcache.server.flows import Flow
from mmcache.server.ingest import Ingest
from mmcache.server.messages import StartDecoder
from mmcache.server.suspects import MAX_TRIES, Suspects

__all__ = ["Decoders", "Pixels", "SharedDescriptor", "Supplied"]


class Decoders:
    """Decoder processes that are started together and restarted when they die, and one for what they die on.

    What waits for a process waits in one queue, in fair order of its flows, and goes to the process with the least in
    hand as soon as one has room. Behind an item that takes long nobody waits while another process is free.
    """

    def __init__(
        self, poller: Poller, ingest: Ingest, seed: int, max_pixels: int, orientation: str, timeout_s: float,
        *, num_processes: int = 1,
    ) -> None:  # fmt: skip
        start = StartDecoder(seed=seed, max_pixels=max_pixels, orientation=orientation)
        make = partial(Decoder, poller, ingest, start, timeout_s)
        self._loop = asyncio.get_running_loop()
        self._decoders = [make(self._dispatch, self._relieve) for _ in range(num_processes)]
        self._suspects = Suspects(partial(make, _nothing, _nothing))
        self._queue: FairQueue[Job] = FairQueue()
        self._returned: deque[Job] = deque()  # had their turns already, in a process that died or took long
        self._num_decoded = 0
        self._num_moved = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the decoders that are alive; that of suspects, if there is one, is the last."""
        pids = [decoder.pid for decoder in self._decoders if decoder.pid is not None]
        return pids + self._suspects.pids

    @property
    def num_restarts(self) -> int:
        """How often any of the processes was replaced."""
        return sum(decoder.num_restarts for decoder in self._decoders) + self._suspects.num_restarts

    @property
    def is_idle(self) -> bool:
        """Whether nothing is decoded or waits to be."""
        is_empty = not self._returned and not len(self._queue) and self._suspects.is_idle
        return is_empty and all(decoder.num_turns == 0 for decoder in self._decoders)

    def counters(self) -> dict[str, object]:
        """As in the stats. `in_hand`: items that processes are working on or have next. `moved`: items that were
        taken from behind one that took long. `suspects`: items that a process died or hung on.
        """
        return {
            "configured": len(self._decoders),
            "ready": sum(decoder.is_up for decoder in self._decoders),
            "restarts": self.num_restarts,
            "pids": self.pids,
            "queued": len(self._queue) + len(self._returned),
            "in_hand": sum(decoder.num_turns for decoder in self._decoders),
            "decoded": self._num_decoded,
            "moved": self._num_moved,
            "suspects": self._suspects.num_seen,
        }

    async def start(self) -> None:
        """Start the processes and decode one pixel in each: returns once all are up and well.

        Raises:
            SidecarError: one cannot start.
        """
        await asyncio.gather(*(decoder.start() for decoder in self._decoders))

    async def stop(self, timeout_s: float) -> None:
        """End the processes."""
        await asyncio.gather(*(decoder.stop(timeout_s) for decoder in self._decoders), self._suspects.stop(timeout_s))

    async def decode(self, job: Job) -> Pixels:
        """Check an item against its key and decode it.

        May be cancelled: an item that waits leaves the queue at once; what a process is writing is freed when it has
        been written.

        Raises:
            ItemError: as a decoder says; `ContentMismatch` when the bytes are not those of the key.
            IngestBusyError: there is no room to spare for what is not urgent.
        """
        pixels = await self._decode(job)
        self._num_decoded += 1
        return pixels

    def move(self, job: Job, flow: Flow) -> None:
        """It is another's from now on. Of no account once a process has it."""
        job.flow = flow
        if job.ticket is not None:  # else it waits for nothing yet
            self._queue.move(job.ticket, flow.owner, flow.weight)

    async def _decode(self, job: Job) -> Pixels:
        num_deaths = 0
        while num_deaths < MAX_TRIES:
            turn = await self._turn(job)
            try:
                return await turn.decoder.run(turn)
            except MovedError:
                self._num_moved += 1
            except DecoderLostError as lost:
                if lost.was_at_work:
                    break
                num_deaths += 1
        else:
            raise EncodeFailed("no decoder lived long enough to decode it")
        return await self._suspects.decode(job)

    async def _turn(self, job: Job) -> Turn:
        """Wait in the line; what had a turn already is before all that had none."""
        if not self._returned and not len(self._queue) and (decoder := self._least_busy()) is not None:
            job.had_turn = True
            return decoder.begin(job)
        granted: asyncio.Future[Turn] = self._loop.create_future()
        job.granted = granted
        job.is_waiting = True
        if job.had_turn:
            self._returned.append(job)
        else:
            job.ticket = self._queue.put(job, job.flow.owner, job.flow.weight, job.item.predicted_pixels)
        self._dispatch()
        try:
            return await granted
        except asyncio.CancelledError:
            if job.is_waiting:
                self._remove(job)
            elif not granted.cancelled():
                granted.result().decoder.leave(granted.result())
            raise

    def _dispatch(self) -> None:
        """Put what waits into the hands of processes that have room."""
        while (self._returned or len(self._queue)) and (decoder := self._least_busy()) is not None:
            job = self._returned.popleft() if self._returned else self._queue.take(next(self._queue.ahead()))
            job.is_waiting = False
            assert job.granted is not None, "it stands in the line"
            if not job.granted.done():  # else it was cancelled this moment
                job.had_turn = True
                job.granted.set_result(decoder.begin(job))

    def _remove(self, job: Job) -> None:
        if job.ticket is None or job.had_turn:
            self._returned.remove(job)
        else:
            self._queue.remove(job.ticket)

    def _least_busy(self) -> Decoder | None:
        least = None
        for decoder in self._decoders:
            if decoder.has_room and (least is None or decoder.num_pixels < least.num_pixels):
                least = decoder
        return least

    def _relieve(self, decoder: Decoder) -> None:
        """A process takes long over an item: what waits behind it goes elsewhere, if anybody has room."""
        if any(other.has_room for other in self._decoders):
            decoder.move_waiting()


def _nothing(*_: object) -> None:
    """Suspects wait for each other, and nobody else for them."""
