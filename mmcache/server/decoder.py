"""The coordinator's side of one decoder process: the items that it has in hand, its deaths and its hangs."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable

from ipc.memory_shm import sealed_copy
from mmcache.errors import ITEM_ERRORS, ProtocolError, SidecarError
from mmcache.framing import Frame, Kind, OutgoingFrame, close_all, pack_frame
from mmcache.keys import KeyHasher
from mmcache.media import ARRAY
from mmcache.server.array_sizes import ArraySizes
from mmcache.server.channel import Poller
from mmcache.server.children import Child, restart_delay_s
from mmcache.server.decode_job import Job, Pixels, SharedDescriptor, Supplied
from mmcache.server.decode_records import NOWHERE, Answer, Probe, pack_drop, pack_fill, parse_answers, probe_record
from mmcache.server.decode_turn import ARRAYS_A_TURN, DecoderLostError, MovedError, Turn
from mmcache.server.decode_watch import Watchdog
from mmcache.server.ingest import Ingest
from mmcache.server.messages import StartDecoder, pixels_shape
from mmcache.server.probe_outbox import ProbeOutbox

log = logging.getLogger(__name__)

MAX_TURNS = 4
"""Items that a process has in hand at once: enough that it never waits for the coordinator."""
MAX_PIXELS_AHEAD = 4_000_000
"""A process that has more pixels in hand than this, some 40 ms, is given nothing: who is free first takes it."""

MODULE = "mmcache.server.decoder_process"


class Decoder:
    """One decoder process, started anew, after a while, whenever it dies.

    `on_change` is called when it may have room for more, `on_stall` now and then while one item takes long.
    """

    def __init__(
        self, poller: Poller, ingest: Ingest, start: StartDecoder, timeout_s: float,
        on_change: Callable[[], None], on_stall: Callable[[Decoder], None],
    ) -> None:  # fmt: skip
        self._poller = poller
        self._ingest = ingest
        self._start = start
        self._sizes = ArraySizes(start.max_pixels)
        self._outbox = ProbeOutbox()
        self._on_change = on_change
        self._watchdog = Watchdog(timeout_s, lambda: on_stall(self), self._kill)
        self._loop = asyncio.get_running_loop()
        self._turns: dict[int, Turn] = {}
        self._asked: deque[Turn] = deque()  # the order in which the process works: its head is what it works on
        self._last_job = 0
        self._stopping = False
        self._deaths_in_a_row = 0
        self._up = asyncio.Event()
        self._started: asyncio.Future[None] | None = None
        self._child: Child | None = None
        self._num_parts_in_hand = 0
        self.num_pixels = 0
        self.num_restarts = 0

    @property
    def pid(self) -> int | None:
        """Of the process, if it is alive."""
        return None if self._child is None else self._child.pid

    @property
    def is_up(self) -> bool:
        """Whether the process takes items."""
        return self._up.is_set()

    @property
    def num_turns(self) -> int:
        """Items that the process has in hand, those that nobody waits for any more too."""
        return len(self._turns)

    @property
    def has_room(self) -> bool:
        """Whether it should be given an item."""
        is_free = self._up.is_set() and not self._watchdog.is_stalled
        has_place = self._num_parts_in_hand < MAX_TURNS * ARRAYS_A_TURN
        return is_free and has_place and self.num_pixels < MAX_PIXELS_AHEAD

    async def start(self) -> None:
        """Start the process and decode one pixel: returns once it is up and well.

        Raises:
            SidecarError: it cannot start.
        """
        self._started = self._loop.create_future()
        self.spawn()
        await self._started
        await self.wait_up()
        pixel, header = b"\0\0\0", b'{"dtype":"uint8","shape":[1,1,3]}'
        fd, _ = sealed_copy("mmcache-check", [pixel])
        memory = SharedDescriptor(fd)
        try:
            key = KeyHasher(self._start.seed).key(ARRAY, header, pixel)
            pixels = await self.run(self.begin(Job(Supplied(memory, "", ARRAY, header, 0, len(pixel)), key)))
            self._ingest.free(pixels.part)
        except DecoderLostError:
            raise SidecarError("a decoder died of its first pixel") from None
        finally:
            memory.release()

    def spawn(self) -> None:
        """Start the process; it is up some time later."""
        if self._stopping:
            return
        try:
            self._child = Child(self._poller, MODULE, self._on_frame, self._on_exit, {})
        except OSError as error:
            self._on_exit(f"a decoder cannot be started: {error.strerror}")
        else:
            self._child.send(pack_frame(Kind.START_DECODER, self._start, fds=[self._ingest.region.fd]))

    async def wait_up(self) -> None:
        """Until the process takes items."""
        while not self.is_up:  # it may die the moment that it is up
            await self._up.wait()

    async def stop(self, timeout_s: float) -> None:
        """End the process."""
        self._stopping = True
        if self._child is not None:
            await self._child.stop(timeout_s)

    def begin(self, job: Job) -> Turn:
        """Put an item into the hands of the process, which is up. To be followed by `run`, or else `leave`."""
        assert self._child is not None, "it is up"
        self._last_job = (self._last_job + 1) & 0xFFFFFFFF
        item = job.item
        turn = Turn(self, self._child, job, self._last_job, self._sizes.of(item.kind, item.header, item.nbytes))
        self._turns[turn.job_id] = turn
        self._num_parts_in_hand += turn.num_parts
        self.num_pixels += turn.num_pixels
        return turn

    async def run(self, turn: Turn) -> Pixels:
        """Check an item against its key and decode it. What the process is writing when this is cancelled is freed
        when it has been written.

        Raises:
            ItemError: as the process says.
            IngestBusyError: there is no room to spare for what is not urgent.
            DecoderLostError: the process died.
            MovedError: it can be decoded elsewhere.
        """
        try:
            return await self._run(turn)
        finally:
            self.leave(turn)

    def leave(self, turn: Turn) -> None:
        """Nobody waits for it any more."""
        turn.is_left = True
        if not turn.is_asked:
            self._end(turn)

    def move_waiting(self) -> None:
        """What waits behind the item at work has to be decoded elsewhere."""
        for turn in list(self._asked)[1:]:
            turn.settle(MovedError())

    async def _run(self, turn: Turn) -> Pixels:
        size = turn.size
        if size is None:
            answer = await self._ask(turn, self._probe(turn, NOWHERE))
            size = answer.height, answer.width, answer.num_frames
        height, width, num_frames = size
        turn.job.tell_size(height, width, num_frames)
        nbytes = math.prod(pixels_shape(num_frames, height, width))
        ingest = self._ingest
        turn.part = part = await ingest.reserve(nbytes) if turn.job.is_urgent else ingest.reserve_spare(nbytes)
        if turn.size is None:
            await self._ask(turn, pack_fill(turn.job_id, part.offset))
        else:
            await self._ask(turn, self._probe(turn, part.offset))
        turn.part = None
        return Pixels(part, height, width, num_frames)

    def _probe(self, turn: Turn, target: int) -> bytes:
        item = turn.job.item
        return probe_record(
            Probe(turn.job_id, item.namespace, item.kind, item.header, item.offset, item.nbytes, target, turn.job.key)
        )

    async def _ask(self, turn: Turn, what: OutgoingFrame | bytes) -> Answer:
        """Ask the process something: what is in a frame, or a probe."""
        if turn.child is not self._child:
            raise DecoderLostError(was_at_work=False)
        turn.is_opened = False
        turn.is_asked = True
        turn.answer = self._loop.create_future()
        if isinstance(what, bytes):
            self._outbox.add(turn.child, what, turn.job.item.memory)
        else:
            self._outbox.flush()
            turn.child.send(what)
        self._asked.append(turn)
        if len(self._asked) == 1:
            self._watch()
        answer = await turn.answer
        if isinstance(answer, Exception):
            raise answer
        if answer.error:
            raise ITEM_ERRORS[answer.error](answer.reason)
        return answer

    def _end(self, turn: Turn) -> None:
        """It is out of the hands of the process, which neither reads nor writes anything of it."""
        if turn.part is not None:
            self._ingest.free(turn.part)
            turn.part = None
        if self._turns.pop(turn.job_id, None) is not None:
            self.num_pixels -= turn.num_pixels
            self._num_parts_in_hand -= turn.num_parts
            if turn.is_opened:
                turn.child.send(pack_drop(turn.job_id))
            self._on_change()

    def _on_frame(self, frame: Frame) -> None:
        close_all(frame.fds)
        if frame.kind == Kind.DECODER_READY:
            self._up.set()
            if self._started is not None and not self._started.done():
                self._started.set_result(None)
            self._on_change()
            return
        for answer in parse_answers(frame):
            turn = self._asked[0] if self._asked else None
            if turn is None or not turn.expects(answer):
                raise ProtocolError("the decoder's answer makes no sense")  # it is replaced
            self._answered(turn, answer)
        self._deaths_in_a_row = 0
        was_stalled = self._watchdog.is_stalled
        self._watch()
        if was_stalled:
            self._on_change()

    def _answered(self, turn: Turn, answer: Answer) -> None:
        self._asked.popleft()
        turn.is_asked = False
        if not answer.is_filled and not answer.error:
            turn.is_opened = True
            self.num_pixels -= turn.num_pixels
            turn.num_pixels = answer.height * answer.width * max(1, answer.num_frames)
            self.num_pixels += turn.num_pixels
        if turn.is_left:
            self._end(turn)
        turn.settle(answer)

    def _watch(self) -> None:
        """Another item is at the head, or none is."""
        if self._asked:
            self._watchdog.begin()
        else:
            self._watchdog.rest()

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    def _on_exit(self, reason: str) -> None:
        at_work = self._asked[0] if self._asked else None
        lost, self._turns = self._turns, {}
        self._asked.clear()
        self._watchdog.rest()
        self.num_pixels = self._num_parts_in_hand = 0
        self._child = None
        self._up.clear()
        for turn in lost.values():
            turn.is_asked = turn.is_opened = False
            if turn.is_left:
                self._end(turn)
            turn.settle(DecoderLostError(turn is at_work))
        if self._started is not None and not self._started.done():
            self._started.set_exception(SidecarError(reason))
        elif not self._stopping:
            self._restart(reason)

    def _restart(self, reason: str) -> None:
        delay_s = restart_delay_s(self._deaths_in_a_row)
        log.warning("%s; another one starts in %.1f s", reason, delay_s)
        self._deaths_in_a_row += 1
        self.num_restarts += 1
        self._loop.call_later(delay_s, self.spawn)
