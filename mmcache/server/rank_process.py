"""A rank: one process a device, with a full replica of the encoder, the only writer of its pool.

Two threads: one reads the socket and does copies at once, the other encodes, so that a hit from the store does not wait
behind a batch.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time

import numpy as np
import torch

from encoder.config import NUMERICS_VERSION
from encoder.errors import EncoderError
from encoder.model import Encoder
from ipc.errors import IpcError
from ipc.memory_shm import ReadOnlyRegion, SharedRegion
from mmcache.errors import ConnectionLost
from mmcache.keys import digest_parts
from mmcache.protocol import Frame, Kind, OutgoingFrame, close_all, pack_frame, parse
from mmcache.server.children import connect_to_parent
from mmcache.server.messages import Copied, Copy, Ran, RankReady, Run, StartFailed, StartRank
from mmcache.transport import BlockingChannel, take_descriptors


class Rank:
    """Encodes microbatches from the ingest region into the pool."""

    def __init__(self, channel: BlockingChannel) -> None:
        frame = channel.receive()
        start = parse(StartRank, frame)
        (fd,) = take_descriptors(frame, 1)
        self._ingest = ReadOnlyRegion.attach(fd)
        os.close(fd)
        self._channel = channel
        self._sending = threading.Lock()
        self._batches: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        torch.set_num_threads(start.num_threads)
        self._dtype: torch.dtype = getattr(torch, start.dtype)
        self._encoder = Encoder.load(start.model, device=start.device, dtype=self._dtype)
        self._pool = SharedRegion.create("mmcache-pool", start.pool_bytes)
        self._pool.seal_for_readers()

    def announce(self) -> None:
        """Warm up and say that batches are welcome."""
        self._encoder.warm_up()
        cost = self._encoder.calibrate()
        ready = RankReady(
            weights_digest=digest_weights(self._encoder),
            model_config_json=self._encoder.config.canonical(),
            processor_json=self._encoder.processor.canonical(),
            numerics_version=NUMERICS_VERSION,
            dim=self._encoder.config.text_width,
            cost=[cost.seconds_per_launch, cost.seconds_per_patch, cost.seconds_per_patch_squared],
        )
        self._send(pack_frame(Kind.RANK_READY, ready, fds=[self._pool.fd]))

    def serve(self) -> None:
        """Until the sidecar closes the channel."""
        threading.Thread(target=self._read, name="read", daemon=True).start()
        while (run := self._batches.get()) is not None:
            self._send(pack_frame(Kind.RAN, self._run(run)))

    def _read(self) -> None:
        try:
            while True:
                self._handle(self._channel.receive())
        except ConnectionLost:
            self._batches.put(None)

    def _handle(self, frame: Frame) -> None:
        close_all(frame.fds)
        if frame.kind == Kind.RUN:
            self._batches.put(parse(Run, frame))
        elif frame.kind == Kind.COPY:
            copy = parse(Copy, frame)
            source = self._ingest.view(copy.source, copy.nbytes)
            np.copyto(self._pool.array(copy.extent, copy.nbytes), source)
            self._send(pack_frame(Kind.COPIED, Copied(copy_id=copy.copy_id)))

    def _run(self, run: Run) -> Ran:
        images = [
            self._ingest.view(source, height * width * 3).reshape(height, width, 3)
            for source, height, width in zip(run.sources, run.heights, run.widths, strict=True)
        ]
        outs = [self._out(extent, tokens) for extent, tokens in zip(run.extents, run.num_tokens, strict=True)]
        started = time.perf_counter()
        try:
            finite = self._encoder.encode(images, outs)
        except (RuntimeError, MemoryError, ValueError) as error:
            return Ran(batch_id=run.batch_id, seconds=0.0, error=f"{type(error).__name__}: {error}"[:1000])
        return Ran(batch_id=run.batch_id, seconds=time.perf_counter() - started, finite=finite)

    def _out(self, extent: int, num_tokens: int) -> torch.Tensor:
        dim = self._encoder.config.text_width
        array = self._pool.array(extent, num_tokens * dim * self._dtype.itemsize)
        return torch.from_numpy(array).view(self._dtype).view(num_tokens, dim)

    def _send(self, frame: OutgoingFrame) -> None:
        with self._sending:
            self._channel.send(frame)


def digest_weights(encoder: Encoder) -> bytes:
    """Digest of every tensor's name, dtype, shape and bytes, in the order of names."""

    def parts() -> list[bytes | memoryview]:
        found: list[bytes | memoryview] = []
        for name, tensor in encoder.tensors():
            found.append(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.append(tensor.contiguous().view(torch.uint8).numpy().data.cast("B"))
        return found

    return digest_parts(parts())


def main() -> None:
    """Entry point of the process."""
    channel = connect_to_parent(sys.argv)
    try:
        rank = Rank(channel)
        rank.announce()
        rank.serve()
    except (EncoderError, IpcError, OSError, MemoryError) as error:
        if isinstance(error, ConnectionLost):
            return
        failed = StartFailed(error=type(error).__name__, reason=str(error))
        with contextlib.suppress(ConnectionLost):  # another rank may have failed first
            channel.send(pack_frame(Kind.START_FAILED, failed))
        sys.exit(1)


if __name__ == "__main__":
    main()
