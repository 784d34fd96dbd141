"""The client's half of staging: describe pixels, get room in this client's region, write them there, say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ipc.allocator import ALIGNMENT
from ipc.errors import OutOfBounds
from ipc.memory_shm import round_up
from mmcache.asks import Question, Start
from mmcache.core import ClientCore
from mmcache.device_staging import DeviceItem
from mmcache.encode_call import sidecar_time_s
from mmcache.errors import ITEM_ERRORS, ConnectionLost, ItemError, ProtocolError, StagingExhausted, UnsupportedItem
from mmcache.framing import Frame, Kind, parse
from mmcache.keys import ContentKey
from mmcache.media import ARRAY, ArrayHeader, Media, describe
from mmcache.patches import PatchHeader, describe_patches
from mmcache.pending import Ask
from mmcache.protocol import MAX_STAGED, Stage, Staged, StagePlaces
from mmcache.records import MAX_CONSUMERS, MAX_ITEMS, NO_KEY, STAGED_KEY, milliseconds
from mmcache.refs import StagedRef

if TYPE_CHECKING:
    from numpy.typing import NDArray


class StageCall:
    """Pixels on their way into the staging region."""

    def __init__(
        self,
        core: ClientCore,
        items: Sequence[Any],
        consumers: int,
        grids: Sequence[tuple[int, int, int]] | None,
        on_device: Mapping[int, DeviceItem],
    ) -> None:
        """Describe and hash the items. Raises the ItemError of the first bad one.

        `on_device`: `device_items` of them, as the user's own thread has them.
        """
        if not 1 <= consumers <= MAX_CONSUMERS:
            raise ValueError(f"consumers must be 1 to {MAX_CONSUMERS}, got {consumers}")
        if grids is not None and len(grids) != len(items):
            raise ValueError(f"{len(items)} items need as many grids, got {len(grids)}")
        self._core = core
        self._consumers = consumers
        limit = core.welcome.max_item_bytes
        self._on_device = on_device
        here = [on_device[at].stand_in(limit) if at in on_device else item for at, item in enumerate(items)]
        if grids is None:
            self._media = [_describe_pixels(item, index, limit) for index, item in enumerate(here)]
        else:
            pairs = zip(here, grids, strict=True)
            self._media = [describe_patches(item, grid, index, limit) for index, (item, grid) in enumerate(pairs)]
        self._keys = [
            ContentKey(NO_KEY) if index in self._on_device else core.hasher.key(media.kind, media.header, media.raw)
            for index, media in enumerate(self._media)
        ]
        self._places: list[tuple[int, int]] = []

    def questions(self) -> Iterator[Start[None]]:
        """Questions for room, each for a bounded number of slices. The next is taken when the last is answered.

        Raises:
            StagingExhausted: the items can never be in the region together.
        """
        for start in range(0, len(self._media), MAX_STAGED):
            if (region := self._core.staging) is not None and (size := sum(map(_taken, self._media))) > region.nbytes:
                raise StagingExhausted(
                    f"{len(self._media)} items of {size} bytes together can never be in a region of {region.nbytes} "
                    "bytes; stage fewer at once, or raise staging_bytes"
                )
            yield partial(self._ask, start)

    def _ask(self, start: int, core: ClientCore, timeout_s: float) -> Question[None]:
        media, keys = self._media[start : start + MAX_STAGED], self._keys[start : start + MAX_STAGED]
        ask = Ask(core.new_id(), undo=self._undo)
        stage = Stage(
            ask_id=ask.ask_id, timeout_ms=milliseconds(sidecar_time_s(timeout_s)), consumers=self._consumers,
            kinds=[item.kind for item in media], headers=[item.header for item in media],
            sizes=[item.nbytes for item in media],
        )  # fmt: skip
        core.ask(Kind.STAGE, ask, stage, b"".join(keys))
        return Question(ask, self._placed)

    def write(self) -> None:
        """Put the pixels in their places. In any thread: those of a device are copied after their own stream's work.

        Raises:
            CapturingError: such a stream is being captured into a graph by now.
            ConnectionLost: the region went with its connection.
        """
        region = self._core.staging
        if region is None and self._places:
            raise ProtocolError("there is no staging region to write to")
        locked: object = None
        for index, (media, (_, offset)) in enumerate(zip(self._media, self._places, strict=True)):
            assert region is not None, "it was checked"
            try:
                place = region.array(offset, media.nbytes)
                if index in self._on_device and locked is None:
                    device = self._on_device[index].tensor.device
                    locked = self._core.pages.of(region.array(0, region.nbytes), device)
            except OutOfBounds as error:
                raise ConnectionLost(f"the staging region went with its connection: {error}") from error
            self._put(index, media, place)
        del locked  # the pages are not unlocked while something is copied to them

    def _put(self, index: int, media: Media, place: NDArray[np.uint8]) -> None:
        if index in self._on_device:  # one copy: the key is of what arrived
            self._on_device[index].copy_to(place)
            self._keys[index] = self._core.hasher.key(media.kind, media.header, place.data)
        else:
            np.copyto(place, np.frombuffer(media.raw, np.uint8))

    def complete(self) -> list[StagedRef]:
        """Say that the pixels are there."""
        tokens = [token for token, _ in self._places]
        if self._on_device:
            said = list(map(STAGED_KEY.pack, tokens, self._keys))
            for start in range(0, len(said), MAX_ITEMS):
                self._core.tell(Kind.STAGED, Staged(has_keys=True), b"".join(said[start : start + MAX_ITEMS]))
        else:
            self._core.tell_tokens(Kind.STAGED, Staged(), tokens)
        return [
            StagedRef(token, str(key), _shape(media), media.nbytes)
            for token, key, media in zip(tokens, self._keys, self._media, strict=True)
        ]

    def cancel(self) -> None:
        """Give the room back."""
        if self._places:
            self._core.withdraw([token for token, _ in self._places])

    def _undo(self, frame: Frame) -> None:
        """Places came that nobody will write to."""
        places = parse(StagePlaces, frame)
        tokens = [token for token, error in zip(places.tokens, places.errors, strict=True) if not error]
        if tokens:
            self._core.withdraw(tokens)

    def _placed(self, frame: Frame) -> None:
        places = parse(StagePlaces, frame)
        self._places += [
            (token, offset)
            for token, offset, error in zip(places.tokens, places.offsets, places.errors, strict=True)
            if not error
        ]
        for error, reason in zip(places.errors, places.reasons, strict=True):
            if error:
                raise ITEM_ERRORS.get(error, ItemError)(reason)


def _describe_pixels(item: Any, index: int, max_bytes: int) -> Media:
    media = describe(item, index, max_bytes)
    if media.kind != ARRAY:
        reason = "only uint8 arrays and tensors are staged, or patch rows with their grid; encode takes files as bytes"
        raise UnsupportedItem(reason, index=index, source=media.source)
    return media


def _taken(media: Media) -> int:
    """Bytes that it takes of the region."""
    return round_up(media.nbytes, ALIGNMENT)


def _shape(media: Media) -> tuple[int, ...]:
    header = ArrayHeader if media.kind == ARRAY else PatchHeader
    shape: tuple[int, ...] = header.model_validate_json(media.header).shape
    return shape
