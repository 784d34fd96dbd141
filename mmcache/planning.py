"""What an item will be, told from its header: the sidecar's sizing rule, followed by the client."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import NamedTuple

from encoder.config import ProcessorConfig
from encoder.errors import ImageError
from encoder.sizing import grid_thw, num_tokens
from mmcache.errors import ItemError, UnsupportedItem
from mmcache.foreign import VALUE_BYTES
from mmcache.images.bounds import check_chunk, check_size
from mmcache.lease import Served
from mmcache.media import ARRAY, IMAGE, ArrayHeader, Media, PilHeader, describe
from mmcache.protocol import Welcome
from mmcache.refs import StagedRef


class Plan(NamedTuple):
    """An item's embedding before there is one.

    Attributes:
        grid_thw: patches in time, height and width, before merging.
        num_tokens: rows.
        nbytes: of the embedding.
    """

    grid_thw: tuple[int, int, int]
    num_tokens: int
    nbytes: int


def plan_item(item: object, index: int, welcome: Welcome, served: Served) -> Plan | ItemError:
    """Plan one item under the sidecar's settings; its error if it will not be taken."""
    try:
        if isinstance(item, StagedRef):
            raise UnsupportedItem("pixels that are staged are planned before: plan the array", index=index)
        media = describe(item, index, welcome.max_item_bytes)
        try:
            width, height, num_frames = _size(media, welcome)
            return _plan(width, height, num_frames, served)
        except ItemError as error:
            return type(error)(error.reason, index=index, source=media.source)
    except ItemError as error:
        return error


def _plan(width: int, height: int, num_frames: int, served: Served) -> Plan:
    processor = _processor(served.processor)
    try:
        grid = grid_thw(width, height, processor, num_frames)
    except ImageError as error:
        raise UnsupportedItem(str(error)) from error
    tokens = num_tokens(grid, processor.merge_size)
    return Plan(grid, tokens, tokens * served.dim * VALUE_BYTES[served.dtype])


def _size(media: Media, welcome: Welcome) -> tuple[int, int, int]:
    """Width, height and frames (0 for a picture) of an item's pixels."""
    if media.kind == ARRAY:
        shape = ArrayHeader.model_validate_json(media.header).shape
        height, width = shape[:2] if len(shape) < 4 else shape[1:3]
        if len(shape) == 4:
            check_chunk(shape[0], width, height, welcome.max_pixels)
            return width, height, shape[0]
    elif media.kind == IMAGE:
        return _file_size(media, welcome)
    else:
        width, height = PilHeader.model_validate_json(media.header).size
    check_size(width, height, welcome.max_pixels)
    return width, height, 0


def _file_size(media: Media, welcome: Welcome) -> tuple[int, int, int]:
    try:
        from mmcache.images.files import open_file
    except ImportError as error:
        reason = f"an encoded file is planned with Pillow, which does not load here ({error}); encode does without"
        raise UnsupportedItem(reason) from error
    picture = open_file(memoryview(media.raw), welcome.max_pixels, welcome.orientation)
    return picture.width, picture.height, 0


@lru_cache(maxsize=8)
def _processor(text: str) -> ProcessorConfig:
    return ProcessorConfig(**json.loads(text))
