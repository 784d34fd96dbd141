"""The asyncio client, on asyncio's loop and on uvloop."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import uvloop

import mmcache
from mmcache import AsyncClient
from mmcache.supplying import Supplying
from tests.mmcache.support import SidecarProcess, clean_environ, eventually, image

Run: TypeAlias = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """One for all tests of this module that do not kill it."""
    with SidecarProcess(tmp_path_factory.mktemp("aio")) as sidecar:
        yield sidecar
        assert sidecar.stats()["leases"]["connections"] == 1


@pytest.fixture(scope="module")
def fresh() -> Iterator[int]:
    """Seeds of pictures that the sidecar has not seen."""
    return itertools.count(10_000)


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[SidecarProcess]:
    """One to be killed."""
    with SidecarProcess(tmp_path) as sidecar:
        yield sidecar


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Run]:
    """Runs a coroutine on a loop in debug mode; afterwards nothing was logged, and no thread is left."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
    before = set(threading.enumerate())

    def run_it(test: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(test)

    with caplog.at_level(logging.WARNING, "asyncio"):
        yield run_it
        gc.collect()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []
    assert set(threading.enumerate()) == before


async def soon(is_true: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + 20
    while not await is_true():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


async def idle(client: AsyncClient) -> bool:
    stats = await client.stats()
    return bool(stats["leases"]["active"] == 0 and stats["ingest"]["bytes_used"] == 0)


def test_a_hundred_calls_at_once(sidecar: SidecarProcess, run: Run) -> None:
    async def one(client: AsyncClient, number: int) -> None:
        seeds = [number % 7, number % 11]
        first, second = await client.encode([image(seed) for seed in seeds])
        assert [first.key, second.key] == [await client.key(image(seed)) for seed in seeds]
        with first, second:
            np.testing.assert_array_equal(first.numpy(), expected[seeds[0]])
            np.testing.assert_array_equal(second.numpy(), expected[seeds[1]])

    async def test() -> None:
        async with AsyncClient.connect(sidecar.socket) as client:
            for seed in range(11):
                (lease,) = await client.encode([image(seed)])
                expected[seed] = lease.numpy().copy()
                lease.release()
            await asyncio.gather(*(one(client, number) for number in range(100)))
            assert await idle(client)

    expected: dict[int, np.ndarray[Any, Any]] = {}
    run(test())


def test_it_gives_what_the_client_for_threads_gives(sidecar: SidecarProcess, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "gray.npy"
    path.write_bytes(b"no picture")
    items = [image(1), image(2, 900, 900), bytes(10), path, tmp_path / "missing.jpg"]

    async def test() -> None:
        with sidecar.connect() as client:
            expected = client.encode(items, errors="return")
            async with AsyncClient.connect(sidecar.socket) as other:
                assert (other.fingerprint, other.dim, other.dtype) == (client.fingerprint, client.dim, client.dtype)
                results = await other.encode(items, errors="return")
                with pytest.raises(mmcache.EncodeError) as caught:
                    await other.encode(items)
                assert [str(result) for result in caught.value.results[2:]] == [str(error) for error in expected[2:]]
                caught.value.release()
                plans = await other.plan(items)
                assert plans[:2] == client.plan(items[:2]) == await other.plan(items[:1]) + await other.plan(items[1:2])
                assert [str(plan) for plan in plans[2:]] == [str(error) for error in expected[2:]]
            for lease, same in zip(expected[:2], results[:2], strict=True):
                assert (lease.key, lease.grid_thw) == (same.key, same.grid_thw)
                assert same.is_released, "by the close"
                lease.release()

    run(test())


def test_wrong_arguments_are_told_as_in_the_client_for_threads(sidecar: SidecarProcess, run: Run) -> None:
    async def test() -> None:
        async with AsyncClient.connect(sidecar.socket) as client:
            with pytest.raises(TypeError, match="list of items"):
                await client.encode(b"abc")  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="SliceRef"):
                await client.open([(1, 2)])  # type: ignore[list-item]
            with pytest.raises(ValueError, match="consumers"):
                await client.stage(image(1), 0)
            with pytest.raises(mmcache.UnsupportedItem):
                await client.key(object())
            assert await client.encode([]) == []
            assert await client.lookup([]) == []
        with pytest.raises(mmcache.ClientClosed, match="closed"):
            await client.stats()
        await client.close()
        with pytest.raises(mmcache.SidecarUnavailable, match="no such socket"):
            await AsyncClient.connect(sidecar.folder / "nobody")
        with pytest.raises(ValueError, match="timeout"):
            AsyncClient.connect(timeout=0)

    run(test())


def test_large_items_are_read_hashed_and_copied_in_threads(
    sidecar: SidecarProcess, run: Run, tmp_path: Path, fresh: Iterator[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    for seed in itertools.islice(fresh, 3):
        paths.append(tmp_path / f"{seed}.ppm")
        paths[-1].write_bytes(b"P6 1120 840 255\n" + image(seed, 840, 1120).tobytes())
    threads: set[int] = set()
    prepare = Supplying.prepare
    monkeypatch.setattr(
        Supplying,
        "prepare",
        lambda self: (threads.add(threading.get_ident()), prepare(self)),  # type: ignore[func-returns-value]
    )

    async def test() -> None:
        async with AsyncClient.connect(sidecar.socket) as client:
            hasher = client._core.hasher
            key = type(hasher).key

            class Spy:
                def key(self, *args: Any) -> Any:
                    threads.add(threading.get_ident())
                    return key(hasher, *args)

            client._core.hasher = Spy()  # type: ignore[assignment]
            leases = await client.encode([*paths, image(next(fresh), 840, 1120)])
            assert len(threads) >= 1
            assert threading.get_ident() not in threads
            leases += await client.encode([image(next(fresh))])
            assert threading.get_ident() in threads
            keys = [lease.key for lease in leases[:4]]
            assert [lease.num_tokens for lease in leases[:4]] == [30 * 40] * 4
            client._core.hasher = hasher
            assert await client.key(paths[0]) == keys[0]
            assert await client.lookup(keys) == ["pool"] * 4

    run(test())


def test_a_cancelled_task_leaves_nothing(sidecar: SidecarProcess, run: Run, fresh: Iterator[int]) -> None:
    big = [image(next(fresh), 840, 1120) for _ in range(4)]

    async def test() -> None:
        async with AsyncClient.connect(sidecar.socket) as client:
            (await client.encode([image(1)]))[0].release()
            for pause in (0.0, 0.001, 0.01, 0.03, 0.1, 0.3):
                tasks = [asyncio.ensure_future(client.encode([image(1), *big])) for _ in range(4)]
                await asyncio.sleep(pause)
                for task in tasks:
                    task.cancel()
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
                for outcome in outcomes:
                    if not isinstance(outcome, asyncio.CancelledError):
                        assert isinstance(outcome, list)
                        for lease in outcome:
                            lease.release()
            await soon(lambda: idle(client), "what was granted is released, what was sent is dropped")
            (await client.encode([image(1)]))[0].release()
            assert not client._core._pending
            assert not client._core._asks

    run(test())


def test_a_cancelled_hit_that_is_on_its_way_is_released(sidecar: SidecarProcess, run: Run) -> None:
    async def test() -> None:
        async with AsyncClient.connect(sidecar.socket) as client:
            (await client.encode([image(1)]))[0].release()
            sidecar.send_signal(signal.SIGSTOP)
            tasks = [asyncio.ensure_future(client.encode([image(1)])) for _ in range(20)]
            await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            assert all(
                isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*tasks, return_exceptions=True)
            )
            sidecar.send_signal(signal.SIGCONT)
            await soon(lambda: idle(client), "they are released on arrival")
            assert (await client.stats())["items"]["hit_pool"] >= 0

    run(test())


def test_a_frozen_sidecar_is_a_timeout_and_then_goes_on(sidecar: SidecarProcess, run: Run) -> None:
    async def works(client: AsyncClient) -> bool:
        try:
            (await client.encode([image(2)]))[0].release()
        except mmcache.RequestTimeout:
            return False
        return True

    async def test() -> None:
        async with AsyncClient.connect(sidecar.socket, timeout=0.5) as client:
            sidecar.send_signal(signal.SIGSTOP)
            try:
                calls = [client.stats(), client.encode([image(1)]), client.lookup([await client.key(image(1))])]
                errors = await asyncio.gather(*calls, client.stage(image(3)), return_exceptions=True)
                assert [type(error) for error in errors] == [mmcache.RequestTimeout] * 4
                with pytest.raises(mmcache.RequestTimeout, match="handshake"):
                    await AsyncClient.connect(sidecar.socket, timeout=0.2)
            finally:
                sidecar.send_signal(signal.SIGCONT)
            await soon(lambda: works(client), "it goes on")
            await soon(lambda: idle(client), "nothing is left")

    run(test())


def test_more_calls_than_may_be_in_flight(sidecar: SidecarProcess, run: Run) -> None:
    async def one(client: AsyncClient, key: mmcache.ContentKey) -> None:
        (lease,) = await client.encode([None], keys=[key])
        lease.release()
        assert await client.lookup([key]) == ["pool"]

    async def test() -> None:
        async with AsyncClient.connect(sidecar.socket) as client:
            (lease,) = await client.encode([image(1)])
            sidecar.send_signal(signal.SIGSTOP)
            tasks = [asyncio.ensure_future(one(client, lease.key)) for _ in range(1500)]
            lookups = [asyncio.ensure_future(client.lookup([lease.key])) for _ in range(1500)]
            await asyncio.sleep(0.1)
            sidecar.send_signal(signal.SIGCONT)
            await asyncio.gather(*tasks, *lookups)
            lease.release()
            assert await idle(client)

    run(test())


def test_the_death_of_the_sidecar_ends_every_call(mortal: SidecarProcess, run: Run) -> None:
    async def lost(client: AsyncClient) -> bool:
        return client._pump.lost is not None

    async def test() -> None:
        async with (
            AsyncClient.connect(mortal.socket) as client,
            AsyncClient.connect(mortal.socket, reconnect=True, timeout=0.3) as other,
        ):
            (lease,) = await client.encode([image(1)])
            expected = lease.numpy().copy()
            mortal.send_signal(signal.SIGSTOP)
            calls = [asyncio.ensure_future(client.encode([image(seed)])) for seed in range(20)]
            calls.append(asyncio.ensure_future(client.encode([image(7, 1120, 1120)])))
            await asyncio.sleep(0.05)
            await asyncio.to_thread(mortal.kill)
            errors = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
            assert {type(error) for error in errors} == {mmcache.ConnectionLost}
            with pytest.raises(mmcache.ConnectionLost):
                await client.stats()
            np.testing.assert_array_equal(lease.numpy(), expected)
            lease.release()
            await soon(lambda: lost(other), "it was seen")
            with pytest.raises(mmcache.SidecarUnavailable, match="nobody listens"):
                await other.stats()

    run(test())


def test_it_connects_again_if_asked(mortal: SidecarProcess, run: Run) -> None:
    async def test() -> None:
        async with AsyncClient.connect(mortal.socket, reconnect=True) as client:
            (before,) = await client.encode([image(1)])
            await asyncio.to_thread(mortal.kill)
            calls = [asyncio.ensure_future(client.encode([image(1)])) for _ in range(5)]
            await asyncio.sleep(0.1)
            await asyncio.to_thread(mortal.start)
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(result, list | mmcache.ConnectionLost) for result in results)
            (after,) = await client.encode([image(1)])
            np.testing.assert_array_equal(after.numpy(), before.numpy())
            for (lease,) in [result for result in results if isinstance(result, list)]:
                lease.release()
            before.release()
            after.release()
            assert await idle(client)

    run(test())


def test_close_ends_the_calls_of_other_tasks(sidecar: SidecarProcess, run: Run, fresh: Iterator[int]) -> None:
    big = [image(next(fresh), 840, 1120) for _ in range(6)]

    async def test() -> None:
        async with AsyncClient.connect(sidecar.socket) as observer:
            client = await AsyncClient.connect(sidecar.socket)
            (held,) = await client.encode([image(1)])
            tensor = held.hold()
            calls = [asyncio.ensure_future(client.encode([image(1), *big])) for _ in range(3)]
            await asyncio.sleep(0.02)
            await client.close()
            errors = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(error) for error in errors} == {mmcache.ClientClosed}
            stats = await observer.stats()
            assert (stats["leases"]["active"], stats["leases"]["quarantined"]) == (1, 1)
            del tensor
            gc.collect()
            await soon(lambda: idle(observer), "the held one was the last")

    run(test())


def test_leases_are_released_from_any_thread(sidecar: SidecarProcess, run: Run) -> None:
    async def test() -> None:
        async with AsyncClient.connect(sidecar.socket) as client:
            for _ in range(20):
                leases = await client.encode([image(1)] * 16)
                await asyncio.gather(*(asyncio.to_thread(lease.release) for lease in leases))
            assert await idle(client)

    run(test())


def test_references_go_to_other_clients(sidecar: SidecarProcess, run: Run) -> None:
    async def test() -> None:
        async with AsyncClient.connect(sidecar.socket) as client, AsyncClient.connect(sidecar.socket) as other:
            leases = await client.encode([image(1), image(2)], consumers=2)
            refs = [mmcache.SliceRef.of(json.loads(json.dumps(lease.ref))) for lease in leases]
            copies = await other.open(refs)
            single = await other.open(refs[0])
            for lease, copy in zip(leases, copies, strict=True):
                np.testing.assert_array_equal(lease.numpy(), copy.numpy())
            await client.cancel(*refs)
            await client.stats()
            with pytest.raises(mmcache.SliceGone):
                await other.open(refs[1])
            results = await other.open(refs, errors="return")
            assert [type(result) for result in results] == [mmcache.SliceGone] * 2
            for lease in (*leases, *copies, single):
                lease.release()
            assert (await client.stats())["pool"]["bytes_leased"] == 0

    run(test())


def test_staged_pixels_small_and_large(sidecar: SidecarProcess, run: Run, fresh: Iterator[int]) -> None:
    async def test() -> None:
        async with AsyncClient.connect(sidecar.socket) as client:
            pixels = [image(next(fresh)), image(next(fresh), 840, 1120)]
            refs = [await client.stage(pixels[0]), *(await client.stage_all(pixels[1:]))]
            staged = await client.encode(refs)
            plain = await client.encode(pixels)
            for lease, same in zip(staged, plain, strict=True):
                assert (lease.key, same.origin) == (same.key, "pool")
                np.testing.assert_array_equal(lease.numpy(), same.numpy())
                lease.release()
                same.release()
            ref = await client.stage(image(next(fresh)))
            await client.cancel(ref)
            with pytest.raises(mmcache.EncodeError):
                await client.encode([ref])

    run(test())


def test_cancelled_staging_gives_its_room_back(sidecar: SidecarProcess, run: Run) -> None:
    async def test() -> None:
        async with AsyncClient.connect(sidecar.socket) as client:
            await client.cancel(await client.stage(image(1)))
            for pause in (0.0, 0.001, 0.003, 0.01, 0.02):
                tasks = [asyncio.ensure_future(client.stage(image(seed, 840, 1120))) for seed in range(3)]
                await asyncio.sleep(pause)
                for task in tasks:
                    task.cancel()
                for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                    if isinstance(outcome, mmcache.StagedRef):
                        await client.cancel(outcome)

            async def is_empty() -> bool:
                return bool((await client.stats())["staging"]["bytes_used"] == 0)

            await soon(is_empty, "nobody will name it")

    run(test())


def test_put_small_and_large(sidecar: SidecarProcess, run: Run, fresh: Iterator[int]) -> None:
    keys = [mmcache.ContentKey(next(fresh).to_bytes(16, "big")) for _ in range(3)]

    async def test() -> None:
        async with AsyncClient.connect(sidecar.socket) as client:
            small = np.ones((6, client.dim), np.float32)
            large = np.ones((2048, client.dim), np.float32)
            assert await client.put(keys[0], small, (1, 4, 6))
            assert await client.put(keys[1], large, (1, 64, 128))
            assert not await client.put(keys[0], small, (1, 4, 6))
            with pytest.raises(mmcache.WrongEmbedding):
                await client.put(keys[2], small[:, 1:], (1, 4, 6))
            with pytest.raises(mmcache.WrongEmbedding):
                await client.put(keys[2], small, (1, 4, 6, 8))  # type: ignore[arg-type]
            assert await client.lookup(keys) == ["pool", "pool", None]
            (lease,) = await client.encode([None], keys=keys[1:2])
            np.testing.assert_array_equal(lease.numpy(), large)
            lease.release()

    run(test())


def test_leases_and_reload(sidecar: SidecarProcess, run: Run) -> None:
    async def test() -> None:
        async with AsyncClient.connect(sidecar.socket, name="engine") as client:
            (lease,) = await client.encode([image(1)])
            view = await client.leases(check=True)
            assert view["problems"] == []
            assert "engine" in json.dumps(view)
            assert await client.reload() == client.fingerprint
            lease.release()

    run(test())


def test_descriptors_do_not_grow(sidecar: SidecarProcess, run: Run, fresh: Iterator[int]) -> None:
    async def test() -> None:
        async with AsyncClient.connect(sidecar.socket) as client:
            await turn(client)
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(10):
                await turn(client)

            async def is_as_before() -> bool:
                return len(os.listdir("/proc/self/fd")) <= before

            await soon(is_as_before, "what a thread still copies is closed once it is done")

    async def turn(client: AsyncClient) -> None:
        async with AsyncClient.connect(sidecar.socket) as other:
            key = mmcache.ContentKey(next(fresh).to_bytes(16, "big"))
            tasks: list[asyncio.Future[object]] = [asyncio.ensure_future(other.put(key, big, (1, 64, 128)))]
            tasks += [asyncio.ensure_future(client.encode([image(next(fresh), 840, 1120)])) for _ in range(4)]
            await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await soon(lambda: idle(client), "it is over")

    big = np.ones((2048, 256), np.float32)
    run(test())


def test_a_dropped_client_closes_and_another_loop_is_refused(sidecar: SidecarProcess, run: Run) -> None:
    async def test() -> None:
        clients = [await AsyncClient.connect(sidecar.socket)]

        def elsewhere() -> None:
            with pytest.raises(mmcache.ClientClosed, match="event loop"):
                asyncio.run(clients[0].stats())

        await asyncio.to_thread(elsewhere)
        assert await idle(clients[0])
        clients.clear()
        gc.collect()

    run(test())
    eventually(lambda: sidecar.stats()["leases"]["connections"] == 1, "nobody else is connected")


UNFINISHED = """
import asyncio, sys, mmcache
from tests.mmcache.support import image
async def main():
    client = await mmcache.AsyncClient.connect(sys.argv[1])
    calls = [asyncio.ensure_future(client.encode([image(seed, 840, 1120)])) for seed in range(20_000, 20_008)]
    await asyncio.sleep(0.03)
    if sys.argv[2] == "close":
        await client.close()
        await asyncio.gather(*calls, return_exceptions=True)
asyncio.run(main())
print("over")
"""


@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_program_that_ends_in_the_middle_says_nothing(sidecar: SidecarProcess, end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", UNFINISHED, str(sidecar.socket), end],
        capture_output=True, text=True, env=clean_environ(PYTHONPATH="."), timeout=60, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("over\n", "")
    eventually(lambda: sidecar.stats()["leases"]["active"] == 0, "nothing is left")
