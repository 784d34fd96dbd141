"""Arrays on their way through the decoders: one way there and back, many in hand, and nothing believed unseen."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest

from mmcache.errors import ContentMismatch, ImageTooLarge, UnsupportedItem
from mmcache.media import ARRAY, ArrayHeader
from mmcache.server.array_sizes import ArraySizes
from mmcache.server.decode_turn import ARRAYS_A_TURN
from mmcache.server.decoder import MAX_TURNS
from tests.mmcache.decoder_pools import Array, Pool, go_on, running, stop


def pixels(number: int, shape: tuple[int, ...] = (9, 11, 3)) -> Array:
    return np.random.default_rng(number).integers(0, 256, shape, np.uint8)


def header(shape: tuple[int, ...]) -> bytes:
    return ArrayHeader.model_validate({"shape": shape}).canonical()


async def copied(pool: Pool, array: Array, claimed: bytes | None = None) -> Array:
    """What the decoders make of an array; its slice is freed."""
    found = await pool.decode(array.tobytes(), claimed, kind=ARRAY, header=header(array.shape))
    frames = (found.num_frames,) if found.num_frames else ()
    memory = np.frombuffer(pool.ingest.memory(found.part), np.uint8)
    copy = memory.reshape(*frames, found.height, found.width, 3).copy()
    pool.ingest.free(found.part)
    return copy


def begin(pool: Pool, number: int) -> asyncio.Task[Array]:
    return asyncio.get_running_loop().create_task(copied(pool, pixels(number)))


@pytest.mark.parametrize("shape", [(9, 11, 3), (9, 11), (2, 9, 11, 3), (700, 800, 3)])
def test_what_arrives_is_what_was_sent(shape: tuple[int, ...]) -> None:
    async def run() -> None:
        array = pixels(0, shape)
        async with running(1) as pool:
            expected = array if len(shape) > 2 else np.repeat(array[..., None], 3, axis=2)
            np.testing.assert_array_equal(await copied(pool, array), expected)

    asyncio.run(run())


def test_a_process_has_many_in_hand() -> None:
    async def run() -> None:
        async with running(1) as pool:
            (pid,) = pool.decoders.pids
            stop(pid)
            most = MAX_TURNS * ARRAYS_A_TURN
            tasks = [begin(pool, number) for number in range(most + 5)]
            await pool.until(lambda: pool.counter("queued") == 5, "the process is full")
            assert pool.counter("in_hand") == most
            go_on(pid)
            for number, array in enumerate(await asyncio.gather(*tasks)):
                np.testing.assert_array_equal(array, pixels(number))

    asyncio.run(run())


def test_all_arrive_when_the_process_dies_with_many_in_hand() -> None:
    async def run() -> None:
        async with running(1) as pool:
            (pid,) = pool.decoders.pids
            stop(pid)
            tasks = [begin(pool, number) for number in range(20)]
            await pool.until(lambda: pool.counter("in_hand") == 20, "they are in hand")
            os.kill(pid, signal.SIGKILL)
            for number, array in enumerate(await asyncio.gather(*tasks)):
                np.testing.assert_array_equal(array, pixels(number))
            assert pool.counter("restarts") == 1

    asyncio.run(run())


def test_a_lie_among_many_fails_alone() -> None:
    async def run() -> None:
        async with running(1) as pool:
            good = [begin(pool, number) for number in range(8)]
            with pytest.raises(ContentMismatch):
                await copied(pool, pixels(1), claimed=pixels(2).tobytes())
            for number, array in enumerate(await asyncio.gather(*good)):
                np.testing.assert_array_equal(array, pixels(number))
            assert pool.counter("restarts") == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("shape", "error"),
    [((10, 11, 3), UnsupportedItem), ((1 << 20, 1 << 20, 3), ImageTooLarge), (None, UnsupportedItem)],
)
def test_a_header_that_is_not_that_of_the_bytes_is_looked_at_by_a_decoder(
    shape: tuple[int, ...] | None, error: type[Exception]
) -> None:
    claimed = b"no header" if shape is None else header(shape)
    data = pixels(0).tobytes()
    assert ArraySizes(100_000_000).of(ARRAY, claimed, len(data)) is None

    async def run() -> None:
        async with running(1) as pool:
            with pytest.raises(error):
                await pool.decode(data, kind=ARRAY, header=claimed)
            assert pool.ingest.bytes_used == 0

    asyncio.run(run())


def test_room_is_waited_for_by_arrays_too() -> None:
    async def run() -> None:
        async with running(1, ingest_bytes=1 << 20) as pool:
            everything = await pool.ingest.reserve(pool.ingest.region.nbytes)
            task = begin(pool, 3)
            await pool.until(lambda: pool.ingest.is_waited_for, "it waits for room")
            pool.ingest.free(everything)
            np.testing.assert_array_equal(await task, pixels(3))

    asyncio.run(run())
