"""An item in the hands of one decoder process, and why it may leave them without its pixels."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeAlias

from mmcache.errors import ITEM_ERRORS
from mmcache.server.array_sizes import Size
from mmcache.server.decode_job import Job
from mmcache.server.decode_records import Answer
from mmcache.server.ingest import IngestSlice

if TYPE_CHECKING:
    from mmcache.server.children import Child
    from mmcache.server.decoder import Decoder


ARRAYS_A_TURN = 8
"""As many arrays count as one file of what a process may have in hand: they are copied, and answered for together."""


class DecoderLostError(Exception):
    """The process died with an item in its hands; `was_at_work` if this is what it was working on."""

    def __init__(self, was_at_work: bool) -> None:
        self.was_at_work = was_at_work


class MovedError(Exception):
    """The process takes long over another item, and somebody else is free for this one."""


Outcome: TypeAlias = Answer | DecoderLostError | MovedError


class Turn:
    """An item in the hands of a process, which may write to `part` until it has answered or is dead.

    Attributes:
        child: the process that it was given to.
        size: of its pixels, if it is known before the process has seen it: it is then asked for them at once.
        num_parts: what it takes of what the process may have in hand.
        num_pixels: predicted, then read from the header.
        answer: what its user waits for, while it waits.
        is_asked: the process has not answered yet.
        is_opened: the process keeps the item open.
        is_left: nobody waits for it any more.
        part: where its pixels go, until they have a holder.
    """

    __slots__ = (
        "answer",
        "child",
        "decoder",
        "is_asked",
        "is_left",
        "is_opened",
        "job",
        "job_id",
        "num_parts",
        "num_pixels",
        "part",
        "size",
    )

    def __init__(self, decoder: Decoder, child: Child, job: Job, job_id: int, size: Size | None) -> None:
        self.decoder = decoder
        self.child = child
        self.job = job
        self.job_id = job_id
        self.size = size
        self.num_parts = ARRAYS_A_TURN if size is None else 1
        self.num_pixels = job.item.predicted_pixels
        self.answer: asyncio.Future[Outcome] | None = None
        self.is_asked = False
        self.is_opened = False
        self.is_left = False
        self.part: IngestSlice | None = None

    def settle(self, answer: Outcome) -> None:
        """Tell its user, who may have left."""
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(answer)

    def expects(self, answer: Answer) -> bool:
        """Whether it answers what was asked: the process reads files of strangers, and may not be itself any more."""
        is_due = self.job_id == answer.job_id and answer.is_filled == (self.part is not None)
        if not is_due or answer.error:
            return is_due and answer.error in ITEM_ERRORS
        return answer.is_filled or (answer.width > 0 and answer.height > 0)
