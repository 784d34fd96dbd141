"""Items that a decoder died or hung on: decoded once more, one at a time, where nobody waits behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mmcache.errors import EncodeFailed, UndecodableImage
from mmcache.server.decode_job import Job, Pixels
from mmcache.server.decode_turn import DecoderLostError
from mmcache.server.decoder import Decoder

MAX_TRIES = 6
"""Of one item, whoever was to blame for the decoders' deaths."""


class Suspects:
    """A decoder process of their own, which is started when the first comes. The first death may have been another's
    doing; the second is not.

    Attributes:
        num_seen: items that came.
    """

    def __init__(self, make_decoder: Callable[[], Decoder]) -> None:
        self._make_decoder = make_decoder
        self._decoder: Decoder | None = None
        self._turn = asyncio.Lock()
        self._num_open = 0
        self._stopping = False
        self.num_seen = 0

    @property
    def pids(self) -> list[int]:
        """Of the process, if it is alive."""
        pid = None if self._decoder is None else self._decoder.pid
        return [] if pid is None else [pid]

    @property
    def num_restarts(self) -> int:
        """How often the process was replaced."""
        return 0 if self._decoder is None else self._decoder.num_restarts

    @property
    def is_idle(self) -> bool:
        """Whether none is decoded or waits to be, and the process has none left in its hands."""
        return self._num_open == 0 and (self._decoder is None or self._decoder.num_turns == 0)

    async def decode(self, job: Job) -> Pixels:
        """Decode an item when those before it are done. May be cancelled, as `Decoders.decode`.

        Raises:
            UndecodableImage: the process died or hung on it, or as it says.
            ItemError, IngestBusyError: as `Decoders.decode`.
        """
        self.num_seen += 1
        self._num_open += 1
        try:
            async with self._turn:
                return await self._decode(job)
        finally:
            self._num_open -= 1

    async def stop(self, timeout_s: float) -> None:
        """End the process."""
        self._stopping = True
        if self._decoder is not None:
            await self._decoder.stop(timeout_s)

    async def _decode(self, job: Job) -> Pixels:
        if self._decoder is None:
            self._decoder = self._make_decoder()
            if not self._stopping:
                self._decoder.spawn()
        for _ in range(MAX_TRIES):
            await self._decoder.wait_up()
            try:
                return await self._decoder.run(self._decoder.begin(job))
            except DecoderLostError as lost:
                if lost.was_at_work:
                    raise UndecodableImage("two decoders died or hung on it") from None
        raise EncodeFailed("no decoder lived long enough to decode it")
