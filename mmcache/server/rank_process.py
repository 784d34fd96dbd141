"""A rank: one process a device, with a full replica of the encoder, the only writer of its pool.

Three threads: one reads the socket and does copies at once, one encodes, so that a hit from the store does not wait
behind a batch, and one loads the next model while the one in use goes on.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Literal

import torch

from encoder.difference import difference
from encoder.digest import digests
from encoder.errors import EncoderError
from encoder.finite import all_finite
from encoder.memory import is_out_of_memory
from encoder.model import Item
from encoder.source import resolve_model
from ipc.errors import IpcError
from mmcache.errors import ConfigError, ConnectionLost
from mmcache.framing import Frame, Kind, OutgoingFrame, close_all, pack_frame, parse
from mmcache.server.children import connect_to_parent
from mmcache.server.messages import (
    Compare,
    Compared,
    Copied,
    Copy,
    CopyOut,
    Load,
    Loaded,
    MapRegion,
    Ran,
    RankReady,
    Run,
    StartFailed,
    StartRank,
    UnmapRegion,
    pixels_shape,
)
from mmcache.server.rank_bound import MemoryBound, return_memory
from mmcache.server.rank_memory import (
    DeviceIngest,
    PoolTensor,
    bound_memory,
    check_device,
    open_ingest,
    open_pool,
    use_device,
    use_stream,
)
from mmcache.server.rank_model import RankModel, load_model
from mmcache.server.rank_staging import StagedReader
from mmcache.server.reasons import FAILURES, reason_of
from mmcache.transport import BlockingChannel, take_descriptors


class Rank:
    """Encodes microbatches from the ingest region into the pool."""

    def __init__(self, channel: BlockingChannel) -> None:
        frame = channel.receive()
        self._start = start = parse(StartRank, frame)
        ingest_fd, *pool_fds = take_descriptors(frame, 1 + start.has_pool)
        self._device = torch.device(start.device)
        use_device(self._device)
        use_stream(self._device, start.has_high_priority)
        bound_memory(self._device, start.device_bytes)
        self._ingest = open_ingest(ingest_fd, self._device)
        self._channel = channel
        self._sending = threading.Lock()
        self._staged = StagedReader(start.seed, self._device)
        self._batches: queue.SimpleQueue[Run | Compare | UnmapRegion | RankModel | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[Load | None] = queue.SimpleQueue()  # None: a model was dropped
        self._use_threads()
        self._dtype: torch.dtype = getattr(torch, start.dtype)
        self._pool = self._opened(pool_fds)
        self._bound = MemoryBound(self._device, start.num_sharing, start.device_bytes)
        self._model = self._adopted(load_model(start, start.model, start.known, start.costs))
        self._next: RankModel | None = None

    def announce(self) -> None:
        """Say that batches are welcome."""
        pool = self._pool
        ready = RankReady(**dict(self._model.report), pool_bytes=pool.nbytes, device=pool.uuid)
        self._send(pack_frame(Kind.RANK_READY, ready, fds=[] if self._start.has_pool else [pool.fd]))

    def serve(self) -> None:
        """Until the sidecar closes the channel."""
        self._start_thread(self._read, "read")
        self._start_thread(self._load_each, "load")
        while (work := self._batches.get()) is not None:
            if isinstance(work, RankModel):
                self._model = self._adopted(work)
                self._loads.put(None)
            elif isinstance(work, UnmapRegion):
                self._staged.unmap(work.region)
            elif isinstance(work, Compare):
                self._send(pack_frame(Kind.COMPARED, self._compare(work)))
            else:
                self._send(pack_frame(Kind.RAN, self._run(work)))
            del work  # a model that was replaced must not live on until the next batch

    def _adopted(self, model: RankModel) -> RankModel:
        self._bound.adopt(model.activations, model.report.max_patches)
        return model

    def _use_threads(self) -> None:
        """What torch computes with on this thread."""
        torch.set_num_threads(self._start.num_threads)

    def _start_thread(self, work: Callable[[], None], name: str) -> None:
        threading.Thread(target=work, name=name, daemon=True).start()

    def _opened(self, fds: Sequence[int]) -> PoolTensor:
        try:
            return open_pool(self._device, self._start.pool_bytes, fds[0] if fds else None)
        except IpcError as error:
            if not fds:
                raise
            raise LostPoolError(f"the pool that the rank before this one left: {error}") from error

    def _read(self) -> None:
        use_device(self._device)
        try:
            while True:
                self._handle(self._channel.receive())
        except ConnectionLost:
            self._batches.put(None)

    def _handle(self, frame: Frame) -> None:
        if frame.kind == Kind.MAP_REGION:
            (fd,) = take_descriptors(frame, 1)
            self._staged.map(parse(MapRegion, frame).region, fd)
            return
        close_all(frame.fds)
        if frame.kind == Kind.RUN:
            self._batches.put(parse(Run, frame))
        elif frame.kind == Kind.COMPARE:
            self._batches.put(parse(Compare, frame))
        elif frame.kind == Kind.UNMAP_REGION:
            self._batches.put(parse(UnmapRegion, frame))
        elif frame.kind == Kind.LOAD:
            self._loads.put(parse(Load, frame))
        elif frame.kind == Kind.SWAP:
            assert self._next is not None, "a model waits before SWAP is sent"
            self._batches.put(self._next)
            self._next = None
        elif frame.kind == Kind.UNLOAD:
            self._next = None
            self._loads.put(None)
        elif frame.kind == Kind.COPY:
            copy = parse(Copy, frame)
            self._ingest.copy_to(copy.source, self._pool.tensor(copy.extent, copy.nbytes))
            finite = not copy.guard or self._is_finite(copy)
            self._send(pack_frame(Kind.COPIED, Copied(copy_id=copy.copy_id, finite=finite)))
        elif frame.kind == Kind.COPY_OUT:
            copy_out = parse(CopyOut, frame)
            assert isinstance(self._ingest, DeviceIngest), "host memory is read in place"
            self._ingest.copy_from(self._pool.tensor(copy_out.extent, copy_out.nbytes), copy_out.target)
            self._send(pack_frame(Kind.COPIED, Copied(copy_id=copy_out.copy_id)))

    def _load_each(self) -> None:
        self._use_threads()
        use_device(self._device)
        use_stream(self._device, self._start.has_high_priority, "load")
        with contextlib.suppress(ConnectionLost):
            while True:
                if (load := self._loads.get()) is None:
                    return_memory(self._device)
                else:
                    self._send(pack_frame(Kind.LOADED, self._load(load)))

    def _load(self, load: Load) -> Loaded:
        try:
            resolve_model(load.model)
        except EncoderError as error:
            return Loaded(error=ConfigError.__name__, reason=reason_of(error))
        except FAILURES as error:
            return Loaded(error=type(error).__name__, reason=reason_of(error))
        try:
            self._next = load_model(self._start, load.model, load.known, load.costs, self._model)
        except FAILURES as error:
            return Loaded(error=type(error).__name__, reason=reason_of(error))
        return Loaded(report=self._next.report)

    def _run(self, run: Run) -> Ran:
        try:
            return self._encoded(run)
        except FAILURES as error:
            check_device(self._device)  # a device that is lost to this process ends it, and is another's
            is_memory, reason = is_out_of_memory(error), reason_of(error)
        if is_memory:  # the error is gone by now, and with it what its frames held
            return_memory(self._device)
            self._bound.failed()
            reason = f"it ran out of memory: {reason}"
        failure: Literal["memory", "error"] = "memory" if is_memory else "error"
        bound = self._bound.max_patches
        return Ran(batch_id=run.batch_id, seconds=0.0, failure=failure, error=reason, max_patches=bound)

    def _encoded(self, run: Run) -> Ran:
        started = time.perf_counter()
        places = range(len(run.sources))
        items = self._staged.read(run.claims, run.sources, self._dtype) if run.claims else {}
        items |= {place: self._pixels(run, place) for place in places if place not in run.claims}
        good = [place for place in places if place in items]
        outs = [self._out(run.extents[place], run.num_tokens[place]) for place in good]
        found = dict(zip(good, self._model.encoder.encode([items[place] for place in good], outs), strict=True))
        made = dict(zip(good, digests(outs), strict=True)) if self._start.makes_digests and outs else {}
        seconds = time.perf_counter() - started
        self._bound.ran()
        return Ran(
            batch_id=run.batch_id, seconds=seconds, finite=[found.get(place, False) for place in places],
            false_claims=[place for place in places if place not in items], max_patches=self._bound.max_patches,
            acceleration=asdict(self._model.encoder.acceleration),
            digests=[made.get(place) for place in places] if made else [],
        )  # fmt: skip

    def _pixels(self, run: Run, place: int) -> Item:
        shape = pixels_shape(run.num_frames[place], run.heights[place], run.widths[place])
        return self._ingest.view(run.sources[place], math.prod(shape)).reshape(shape)

    def _compare(self, compare: Compare) -> Compared:
        cached, fresh = (self._out(extent, compare.num_tokens) for extent in (compare.cached, compare.fresh))
        try:
            found = difference(cached, fresh)
            is_intact = compare.digest is None or digests([cached]) == [compare.digest]
        except FAILURES as error:
            check_device(self._device)
            return Compared(compare_id=compare.compare_id, error=reason_of(error))
        return Compared(
            compare_id=compare.compare_id,
            is_intact=is_intact,
            is_same_bits=found.is_same_bits,
            relative_error=found.relative_error,
            min_cosine=found.min_cosine,
        )

    def _out(self, extent: int, num_tokens: int) -> torch.Tensor:
        dim = self._model.encoder.config.text_width
        flat = self._pool.tensor(extent, num_tokens * dim * self._dtype.itemsize)
        return flat.view(self._dtype).view(num_tokens, dim)

    def _is_finite(self, copy: Copy) -> bool:
        """The guard over an extent's values, whatever the model's width: another one may take its turn meanwhile."""
        (finite,) = all_finite([self._pool.tensor(copy.extent, copy.nbytes).view(getattr(torch, copy.guard))])
        return finite

    def _send(self, frame: OutgoingFrame) -> None:
        with self._sending:
            self._channel.send(frame)


class LostPoolError(IpcError):
    """The pool that this rank was handed is of no use to it."""


def _end_process(fault: threading.ExceptHookArgs) -> None:
    """A fault of ours in any thread ends the process, which is then replaced; the coordinator waits for no answer."""
    sys.excepthook(fault.exc_type, fault.exc_value or fault.exc_type(), fault.exc_traceback)
    os._exit(1)


def _started(channel: BlockingChannel) -> Rank:
    """A rank that has announced itself. Ends the process if it cannot start, when it has said why."""
    try:
        rank = Rank(channel)
        rank.announce()
    except ConnectionLost:
        raise
    except FAILURES as error:
        lost_pool = isinstance(error, LostPoolError)
        failed = StartFailed(error=type(error).__name__, reason=reason_of(error), lost_pool=lost_pool)
        channel.send(pack_frame(Kind.START_FAILED, failed))
        sys.exit(1)
    return rank


def main() -> None:
    """Entry point of the process."""
    threading.excepthook = _end_process
    channel = connect_to_parent(sys.argv)
    with contextlib.suppress(ConnectionLost):  # the sidecar stops, maybe because another rank has failed first
        _started(channel).serve()
        os._exit(0)  # an interpreter with torch takes half a second to take itself down, which gives nothing back


if __name__ == "__main__":
    main()
