"""The pool of decoders: real processes, real files; deaths, hangs, turns and sizes."""

from __future__ import annotations

import asyncio
import io
import os
import signal

import numpy as np
import pytest
from PIL import Image

from examples.pictures import photographs
from mmcache.errors import ContentMismatch, UndecodableImage
from mmcache.server.decoder import MAX_TURNS
from tests.mmcache.decoder_pools import Array, Pool, go_on, running, stop
from tests.mmcache.picture_files import RGB, chunk, photograph, png, saved


def picture(number: int) -> bytes:
    """A small file that no other number gives."""
    return saved(photograph(100 + number, 80), "PNG")


def endless() -> bytes:
    """A good file that takes seconds to read: its header comes first, a million empty chunks follow."""
    return png(np.asarray(photograph()), 8, RGB, before=chunk(b"aaAa", b"") * 1_000_000)


def by_pillow(data: bytes) -> Array:
    with Image.open(io.BytesIO(data)) as opened:
        return np.asarray(opened.convert("RGB"))


def test_each_process_is_killed_and_every_photograph_arrives() -> None:
    files = [path.read_bytes() for path in photographs()]
    expected = [by_pillow(data) for data in files]

    async def run() -> None:
        async with running(3) as pool:
            tasks = [pool.begin(files[number % len(files)], flow=number % 4) for number in range(60)]
            for place, pid in enumerate(pool.decoders.pids):
                await pool.until(lambda done=6 * (place + 1): pool.counter("decoded") >= done, "some are decoded")
                os.kill(pid, signal.SIGKILL)
            for number, array in enumerate(await asyncio.gather(*tasks)):
                np.testing.assert_array_equal(array, expected[number % len(files)])
            assert pool.counter("restarts") == 3
            await pool.until(lambda: pool.counter("ready") == 3, "each is replaced")

    asyncio.run(run())


def test_nobody_waits_behind_a_process_that_hangs() -> None:
    async def run() -> None:
        async with running(2) as pool:
            stuck = pool.decoders.pids[0]
            stop(stuck)
            tasks = [pool.begin(picture(number)) for number in range(20)]
            await pool.until(lambda: sum(task.done() for task in tasks) == 19, "all go on but the one in its hands")
            assert pool.counter("moved") <= MAX_TURNS - 1
            go_on(stuck)
            for number, array in enumerate(await asyncio.gather(*tasks)):
                np.testing.assert_array_equal(array, by_pillow(picture(number)))
            assert pool.counter("restarts") == pool.counter("suspects") == 0

    asyncio.run(run())


def test_a_file_that_takes_too_long_fails_alone() -> None:
    async def run() -> None:
        async with running(2, timeout_s=0.5) as pool:
            slow = pool.begin(endless())
            good = [pool.begin(picture(number)) for number in range(12)]
            for number, array in enumerate(await asyncio.gather(*good)):
                np.testing.assert_array_equal(array, by_pillow(picture(number)))
            with pytest.raises(UndecodableImage, match="two decoders died or hung on it"):
                await slow
            assert pool.counter("suspects") == 1
            assert pool.counter("restarts") == 2

    asyncio.run(run())


def test_suspects_wait_for_each_other_and_nobody_for_them() -> None:
    async def run() -> None:
        async with running(1) as pool:
            (pid,) = pool.decoders.pids
            stop(pid)
            first = pool.begin(picture(0))
            await pool.until(lambda: pool.counter("in_hand") == 1, "it is in hand")
            os.kill(pid, signal.SIGKILL)
            await first  # whoever killed the process, it was not the file
            assert pool.counter("suspects") == 1
            suspects = pool.decoders.pids[-1]
            stop(suspects)
            waiting = []
            for number in (1, 2):
                await pool.until(lambda: pool.counter("ready") == 1, "it is replaced")
                pid = pool.decoders.pids[0]
                stop(pid)
                waiting.append(pool.begin(picture(number)))
                await pool.until(lambda: pool.counter("in_hand") == 1, "it is in hand")
                os.kill(pid, signal.SIGKILL)
                await pool.until(lambda number=number: pool.counter("suspects") == number + 1, "it is suspect")
            np.testing.assert_array_equal(await pool.array(picture(3)), by_pillow(picture(3)))
            assert not any(task.done() for task in waiting)
            go_on(suspects)
            for number, array in zip((1, 2), await asyncio.gather(*waiting), strict=True):
                np.testing.assert_array_equal(array, by_pillow(picture(number)))

    asyncio.run(run())


def test_an_item_on_which_two_processes_die_is_given_up() -> None:
    async def run() -> None:
        async with running(1) as pool:
            slow = pool.begin(endless())
            await pool.until(lambda: pool.counter("in_hand") == 1, "it is in hand")
            os.kill(pool.decoders.pids[0], signal.SIGKILL)
            await pool.until(lambda: pool.counter("suspects") == 1, "it is suspect")
            suspects = pool.decoders._suspects
            await pool.until(lambda: suspects._decoder is not None and suspects._decoder.num_turns == 1, "tried again")
            os.kill(suspects.pids[0], signal.SIGKILL)
            with pytest.raises(UndecodableImage, match="two decoders"):
                await slow
            np.testing.assert_array_equal(await pool.array(picture(0)), by_pillow(picture(0)))

    asyncio.run(run())


def test_a_size_is_told_before_there_are_pixels() -> None:
    """There is no room for pixels, and the size is known all the same; it is told once, whatever happens then."""

    async def run() -> None:
        async with running(1, ingest_bytes=1 << 20) as pool:
            everything = await pool.ingest.reserve(pool.ingest.region.nbytes)
            sizes: list[tuple[int, int, int]] = []
            task = pool.begin(picture(5), on_size=lambda *size: sizes.append(size))
            await pool.until(lambda: bool(sizes), "its size is told")
            assert sizes == [(80, 105, 0)]
            assert not task.done()
            os.kill(pool.decoders.pids[0], signal.SIGKILL)
            pool.ingest.free(everything)
            np.testing.assert_array_equal(await task, by_pillow(picture(5)))
            assert sizes == [(80, 105, 0)]

    asyncio.run(run())


def test_what_on_size_raises_ends_the_decoding() -> None:
    def refuse(*_: int) -> None:
        raise UndecodableImage("not of this size")

    async def run() -> None:
        async with running(1) as pool:
            with pytest.raises(UndecodableImage, match="not of this size"):
                await pool.array(picture(1), on_size=refuse)
            assert pool.counter("in_hand") == 0

    asyncio.run(run())


async def finished(pool: Pool, flows: list[str]) -> list[str]:
    """The flows of items in the order in which they were decoded; they were all there before the first was begun."""
    order: list[str] = []

    async def one(number: int, flow: str) -> None:
        await pool.array(picture(number), flow=flow)
        order.append(flow)

    (pid,) = pool.decoders.pids
    stop(pid)
    tasks = [asyncio.create_task(one(number, flow)) for number, flow in enumerate(flows)]
    await pool.until(lambda: pool.counter("queued") == len(flows) - MAX_TURNS, "they wait")
    go_on(pid)
    await asyncio.gather(*tasks)
    return order


def test_a_flow_of_few_items_is_not_kept_by_one_of_many() -> None:
    async def run() -> None:
        async with running(1) as pool:
            order = await finished(pool, ["many"] * 30 + ["few"] * 3)
            last = max(place for place, flow in enumerate(order) if flow == "few")
            # Those in hand already, and then in turn.
            assert last < MAX_TURNS + 2 * 3
            assert len(order) == 33

    asyncio.run(run())


def test_a_big_picture_has_nobody_behind_it() -> None:
    async def run() -> None:
        async with running(2) as pool:
            noise = np.random.default_rng(1).integers(0, 256, (1000, 1200, 3), np.uint8)
            big = saved(Image.fromarray(noise), "PNG")
            assert len(big) > 2 << 20
            for pid in pool.decoders.pids:
                stop(pid)
            tasks = [pool.begin(big), *(pool.begin(picture(number)) for number in range(MAX_TURNS + 3))]
            await pool.until(lambda: pool.counter("queued") == 3, "the other process is full")
            assert [decoder.num_turns for decoder in pool.decoders._decoders] == [1, MAX_TURNS]
            go_on(pool.decoders.pids[1])
            for number, array in enumerate(await asyncio.gather(*tasks[1:])):
                np.testing.assert_array_equal(array, by_pillow(picture(number)))
            assert not tasks[0].done()
            go_on(pool.decoders.pids[0])
            np.testing.assert_array_equal(await tasks[0], noise)

    asyncio.run(run())


def test_a_lie_costs_no_process() -> None:
    async def run() -> None:
        async with running(2) as pool:
            with pytest.raises(ContentMismatch):
                await pool.array(picture(1), claimed=picture(2))
            assert pool.counter("restarts") == 0

    asyncio.run(run())
