"""A decoder: a process without a device that hashes, parses and decodes untrusted files into the ingest region."""

from __future__ import annotations

import logging
import os
import resource
import sys
import time

from ipc.memory_shm import SEALS_FROZEN, ReadOnlyRegion, SharedRegion
from mmcache.errors import ConnectionLost, ContentMismatch, ItemError
from mmcache.framing import Frame, Kind, pack_frame, parse
from mmcache.keys import KeyHasher
from mmcache.server.children import connect_to_parent
from mmcache.server.decode_records import (
    MAX_FILLED,
    NOWHERE,
    Probe,
    pack_failed,
    pack_filled,
    pack_probed,
    parse_drop,
    parse_fill,
    parse_probes,
)
from mmcache.server.messages import StartDecoder
from mmcache.server.pixels import OpenedMedia
from mmcache.transport import BlockingChannel, take_descriptors

BASE_BYTES = 768 << 20
BYTES_A_PIXEL = 16
"""Memory of its own that a decoder may have: what the largest picture takes, in several copies, and something more."""


GATHER_S = 1e-3
"""Arrays that are in place are told of together, but none waits for more than this."""
LARGE_BYTES = 1 << 20
"""An item as large as this takes as long by itself: what is in place is told of before it is begun."""


class Decoder:
    """Answers probes and fills in the order they come.

    Of arrays, which are only copied, it answers for several at once. Before it touches a file, which may be its end,
    everything before that is answered for.
    """

    def __init__(self, channel: BlockingChannel) -> None:
        frame = channel.receive()
        start = parse(StartDecoder, frame)
        (fd,) = take_descriptors(frame, 1)
        self._region = SharedRegion.attach(fd)
        os.close(fd)
        self._channel = channel
        self._seed = start.seed
        self._max_pixels = start.max_pixels
        self._orientation = start.orientation
        self._opened: dict[int, OpenedMedia] = {}
        self._filled: list[int] = []
        self._first_filled_s = 0.0
        _bound_memory(start.max_pixels)

    def serve(self) -> None:
        """Until the sidecar closes the channel."""
        self._channel.send(pack_frame(Kind.DECODER_READY, None))
        while True:
            if not self._channel.has_frame:
                self._tell()
            self._handle(self._channel.receive())

    def _handle(self, frame: Frame) -> None:
        if frame.kind == Kind.PROBE:
            (fd,) = take_descriptors(frame, 1)
            try:
                memory = ReadOnlyRegion.attach(fd, SEALS_FROZEN)
                for probe in parse_probes(frame):
                    self._probe(probe, memory)
            finally:
                os.close(fd)
        elif frame.kind == Kind.FILL:
            job_id, target = parse_fill(frame)
            self._tell()
            self._fill(job_id, self._opened.pop(job_id), target)
            self._tell()
        elif frame.kind == Kind.DROP:
            self._opened.pop(parse_drop(frame), None)

    def _probe(self, probe: Probe, memory: ReadOnlyRegion) -> None:
        is_array = probe.target != NOWHERE
        if not is_array or probe.nbytes >= LARGE_BYTES:
            self._tell()
        raw = memory.view(probe.offset, probe.nbytes).data
        try:
            if KeyHasher(self._seed, probe.namespace).key(probe.kind, probe.header, raw) != probe.key:
                raise ContentMismatch("the bytes do not hash to the key that was sent; nothing was cached")
            opened = OpenedMedia(probe.kind, probe.header, raw, self._max_pixels, self._orientation)
        except ItemError as error:
            self._fail(Kind.FILLED if is_array else Kind.PROBED, probe.job_id, error)
            return
        if is_array:
            self._fill(probe.job_id, opened, probe.target)
        else:
            self._opened[probe.job_id] = opened
            self._channel.send(pack_probed(probe.job_id, opened.height, opened.width, opened.num_frames))

    def _fill(self, job_id: int, opened: OpenedMedia, target: int) -> None:
        pixels = self._region.array(target, opened.nbytes)
        try:
            opened.fill(pixels.reshape(opened.shape))
        except ItemError as error:
            self._fail(Kind.FILLED, job_id, error)
            return
        now = time.monotonic()
        if not self._filled:
            self._first_filled_s = now
        self._filled.append(job_id)
        if len(self._filled) == MAX_FILLED or now - self._first_filled_s > GATHER_S:
            self._tell()

    def _fail(self, kind: Kind, job_id: int, error: ItemError) -> None:
        self._tell()
        self._channel.send(pack_failed(kind, job_id, type(error).__name__, error.reason))

    def _tell(self) -> None:
        """Answer for what is in place."""
        if self._filled:
            self._channel.send(pack_filled(self._filled))
            self._filled.clear()


def _bound_memory(max_pixels: int) -> None:
    """A file that makes a parser allocate without end fails with MemoryError, which costs it alone."""
    limit = BASE_BYTES + BYTES_A_PIXEL * max_pixels
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or hard > limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def main() -> None:
    """Entry point of the process."""
    logging.getLogger("PIL").addHandler(logging.NullHandler())  # what it says of files would fill the sidecar's log
    channel = connect_to_parent(sys.argv)
    try:
        Decoder(channel).serve()
    except ConnectionLost:
        sys.exit(0)


if __name__ == "__main__":
    main()
