"""Where an item's pixels come from: decoded by us, or staged by a client. What differs between the two is here."""

from __future__ import annotations

import asyncio

from encoder.errors import ImageError
from encoder.sizing import num_patches, num_tokens
from mmcache.errors import ContentMismatch, ItemError, SliceGone, UnsupportedItem
from mmcache.server.decoders import Pixels
from mmcache.server.facts import ModelFacts, Sizes
from mmcache.server.flight import Flight
from mmcache.server.patience import SUPPLY_PATIENCE_S
from mmcache.server.staged import OVER, StagedPixels, StagedSlice


async def is_written(flight: Flight, staged: StagedSlice) -> bool:
    """Wait for the client that stages it. False when the flight's first waiter is another by now, or has failed."""
    flight.stage = "staged by its client"
    while not staged.is_written and not staged.is_over:
        staged.changed.clear()
        try:
            async with asyncio.timeout(SUPPLY_PATIENCE_S):
                await staged.changed.wait()
        except TimeoutError:
            if flight.pass_on():
                return False
    if staged.is_over:
        blame(flight, staged, SliceGone(OVER))
        return False
    if staged.key != flight.key:  # it was hashed after it was named
        error = ContentMismatch("the staged pixels do not hash to the key that they were named with")
        blame(flight, staged, error, is_theirs=True)
        return False
    first = flight.first()
    return first is not None and first[0].slices.get(first[1]) is staged


def blame(flight: Flight, staged: StagedSlice, error: ItemError, *, is_theirs: bool = False) -> None:
    """Whoever named a slice that is not what it claims to be gets the error; others go on waiting.

    `is_theirs`: the slice is right, and what they called it is wrong; it goes on.
    """
    for request, position in list(flight.waiters):
        if request.slices.get(position) is staged:
            flight.leave(request, position)
            if is_theirs:
                request.slices.pop(position).ended(None)
            request.fail(position, error)


def sizes(pixels: Pixels | StagedPixels, facts: ModelFacts) -> Sizes:
    """Grid, patches and tokens of an item.

    Raises:
        UnsupportedItem: the model does not take a chunk of that many frames, or such rows.
    """
    if not isinstance(pixels, StagedPixels):
        return decoded_sizes(pixels.height, pixels.width, pixels.num_frames, facts)
    try:
        grid = pixels.grid(facts)
    except ImageError as error:
        raise UnsupportedItem(str(error)) from error
    return grid, num_patches(grid), num_tokens(grid, facts.processor.merge_size)


def decoded_sizes(height: int, width: int, num_frames: int, facts: ModelFacts) -> Sizes:
    """As `sizes`, of decoded pixels, which may be on their way still.

    Raises:
        UnsupportedItem: as `sizes`.
    """
    try:
        return facts.sizes(height, width, num_frames)
    except ImageError as error:
        raise UnsupportedItem(str(error)) from error
