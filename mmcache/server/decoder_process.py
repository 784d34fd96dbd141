"""A decoder: a process without a device that hashes, parses and decodes untrusted files into the ingest region."""

from __future__ import annotations

import logging
import os
import resource
import sys

from ipc.memory_shm import SEALS_FROZEN, ReadOnlyRegion, SharedRegion
from mmcache.errors import ConnectionLost, ContentMismatch, ItemError
from mmcache.framing import Frame, Kind, pack_frame, parse
from mmcache.keys import KeyHasher
from mmcache.server.children import connect_to_parent
from mmcache.server.messages import Drop, Fill, Filled, Probe, Probed, StartDecoder
from mmcache.server.pixels import OpenedMedia
from mmcache.transport import BlockingChannel, take_descriptors

BASE_BYTES = 768 << 20
BYTES_A_PIXEL = 16
"""Memory of its own that a decoder may have: what the largest picture takes, in several copies, and something more."""


class Decoder:
    """Answers probes and fills in the order they come."""

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
        _bound_memory(start.max_pixels)

    def serve(self) -> None:
        """Until the sidecar closes the channel."""
        self._channel.send(pack_frame(Kind.DECODER_READY, None))
        while True:
            frame = self._channel.receive()
            if frame.kind == Kind.PROBE:
                self._channel.send(pack_frame(Kind.PROBED, self._probe(frame)))
            elif frame.kind == Kind.FILL:
                self._channel.send(pack_frame(Kind.FILLED, self._fill(parse(Fill, frame))))
            elif frame.kind == Kind.DROP:
                self._opened.pop(parse(Drop, frame).job_id, None)

    def _probe(self, frame: Frame) -> Probed:
        probe = parse(Probe, frame)
        (fd,) = take_descriptors(frame, 1)
        try:
            raw = ReadOnlyRegion.attach(fd, SEALS_FROZEN).view(probe.offset, probe.nbytes).data
        finally:
            os.close(fd)
        try:
            if KeyHasher(self._seed, probe.namespace).key(probe.kind, probe.header, raw) != probe.key:
                raise ContentMismatch("the bytes do not hash to the key that was sent; nothing was cached")
            opened = OpenedMedia(probe.kind, probe.header, raw, self._max_pixels, self._orientation)
        except ItemError as error:
            return Probed(job_id=probe.job_id, error=type(error).__name__, reason=error.reason)
        self._opened[probe.job_id] = opened
        return Probed(job_id=probe.job_id, width=opened.width, height=opened.height, num_frames=opened.num_frames)

    def _fill(self, fill: Fill) -> Filled:
        opened = self._opened.pop(fill.job_id)
        pixels = self._region.array(fill.offset, opened.nbytes)
        try:
            opened.fill(pixels.reshape(opened.shape))
        except ItemError as error:
            return Filled(job_id=fill.job_id, error=type(error).__name__, reason=error.reason)
        return Filled(job_id=fill.job_id)


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
