"""Items that nobody waits for any more, at every stage of their way through the decoders."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import numpy as np
import pytest

from mmcache.server.decoder import MAX_TURNS
from tests.mmcache.decoder_pools import Array, Pool, go_on, running, stop
from tests.mmcache.test_decoders import by_pillow, picture


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with pytest.raises(asyncio.CancelledError):
            await task


async def being_filled(pool: Pool, pid: int) -> asyncio.Task[Array]:
    """An item that a process, which hangs, is to write next."""
    task = pool.begin(picture(1), on_size=lambda *_: stop(pid))
    await pool.until(lambda: pool.ingest.bytes_used > 0, "it has room")
    return task


def test_what_waits_leaves_the_queue_at_once() -> None:
    async def run() -> None:
        async with running(1) as pool:
            (pid,) = pool.decoders.pids
            stop(pid)
            tasks = [pool.begin(picture(number)) for number in range(MAX_TURNS + 10)]
            await pool.until(lambda: pool.counter("queued") == 10, "they wait")
            await cancelled(*tasks[MAX_TURNS + 1 :])
            assert pool.counter("queued") == 1
            go_on(pid)
            for number, task in enumerate(tasks[: MAX_TURNS + 1]):
                np.testing.assert_array_equal(await task, by_pillow(picture(number)))
            assert pool.counter("decoded") == MAX_TURNS + 1

    asyncio.run(run())


def test_what_is_probed_is_dropped() -> None:
    """Also while the process works on it: its answer is thrown away, and takes no room."""

    async def run() -> None:
        async with running(1) as pool:
            (pid,) = pool.decoders.pids
            stop(pid)
            tasks = [pool.begin(picture(number)) for number in range(MAX_TURNS)]
            await pool.until(lambda: pool.counter("in_hand") == MAX_TURNS, "they are in hand")
            await cancelled(*tasks)
            assert pool.counter("in_hand") == MAX_TURNS
            go_on(pid)
            await pool.settled()
            assert pool.counter("decoded") == pool.counter("restarts") == 0

    asyncio.run(run())


def test_what_waits_for_room_is_dropped_at_once() -> None:
    async def run() -> None:
        async with running(1, ingest_bytes=1 << 20) as pool:
            everything = await pool.ingest.reserve(pool.ingest.region.nbytes)
            sizes: list[tuple[int, int, int]] = []
            task = pool.begin(picture(1), on_size=lambda *size: sizes.append(size))
            await pool.until(lambda: bool(sizes) and pool.ingest.is_waited_for, "it waits for room")
            await cancelled(task)
            assert pool.counter("in_hand") == 0
            assert not pool.ingest.is_waited_for
            pool.ingest.free(everything)

    asyncio.run(run())


def test_what_is_being_filled_is_freed_when_the_process_has_written_it() -> None:
    async def run() -> None:
        async with running(1) as pool:
            (pid,) = pool.decoders.pids
            task = await being_filled(pool, pid)
            await cancelled(task)
            assert pool.ingest.bytes_used > 0, "the process may still write"
            go_on(pid)
            await pool.settled()
            assert pool.counter("restarts") == 0

    asyncio.run(run())


def test_what_is_being_filled_is_freed_when_the_process_is_dead() -> None:
    async def run() -> None:
        async with running(1) as pool:
            (pid,) = pool.decoders.pids
            task = await being_filled(pool, pid)
            await cancelled(task)
            assert pool.ingest.bytes_used > 0, "the process may still write"
            os.kill(pid, signal.SIGKILL)
            await pool.settled()
            assert pool.counter("suspects") == 0, "nobody wants it"
            np.testing.assert_array_equal(await pool.array(picture(2)), by_pillow(picture(2)))

    asyncio.run(run())


def test_a_place_that_was_just_given_is_given_back() -> None:
    """The one who had it is cancelled in the same turn of the loop."""

    async def run() -> None:
        async with running(1) as pool:
            (pid,) = pool.decoders.pids
            stop(pid)
            first = [pool.begin(picture(number)) for number in range(MAX_TURNS)]
            await pool.until(lambda: pool.counter("in_hand") == MAX_TURNS, "they are in hand")
            waiting = [pool.begin(picture(10 + number)) for number in range(2)]
            await pool.until(lambda: pool.counter("queued") == 2, "they wait")
            decoder = pool.decoders._decoders[0]
            on_change, times = decoder._on_change, []

            def cancel_too() -> None:
                on_change()
                times.append(waiting[0].cancel())

            decoder._on_change = cancel_too
            go_on(pid)
            np.testing.assert_array_equal(await waiting[1], by_pillow(picture(11)))
            assert times[0], "it was cancelled right after its place was given to it"
            await asyncio.gather(*first)
            with pytest.raises(asyncio.CancelledError):
                await waiting[0]

    asyncio.run(run())


def test_cancelling_at_any_time_leaves_nothing_behind() -> None:
    draw = np.random.default_rng(1)

    async def run() -> None:
        async with running(2, ingest_bytes=1 << 20) as pool:
            tasks = [pool.begin(picture(number % 40), flow=number % 3) for number in range(200)]
            while not all(task.done() for task in tasks):
                tasks[int(draw.integers(len(tasks)))].cancel()
                await asyncio.sleep(0)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for number, result in enumerate(results):
                if not isinstance(result, asyncio.CancelledError):
                    assert isinstance(result, np.ndarray), result
                    np.testing.assert_array_equal(result, by_pillow(picture(number % 40)))

    asyncio.run(run())
