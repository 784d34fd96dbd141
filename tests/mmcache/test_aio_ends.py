"""The asyncio client's calls that end early: cancelled, out of time, with the sidecar, the client or the loop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mmcache
from mmcache import AsyncClient
from tests.mmcache.loops import Run, idle, soon
from tests.mmcache.support import SidecarProcess, clean_environ, eventually, image


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """One for all tests of this module that do not kill it."""
    with SidecarProcess(tmp_path_factory.mktemp("aio")) as sidecar:
        yield sidecar
        assert sidecar.stats()["leases"]["connections"] == 1


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[SidecarProcess]:
    """One to be killed."""
    with SidecarProcess(tmp_path) as sidecar:
        yield sidecar


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


def test_a_frozen_sidecar_is_a_timeout_and_then_goes_on(sidecar: SidecarProcess, run: Run) -> None:
    async def works(client: AsyncClient) -> bool:
        try:
            (await client.encode([image(2)]))[0].release()
        except (mmcache.RequestTimeout, mmcache.EncodeError):  # the sidecar may still be slow
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

            async def is_held() -> bool:
                leases = (await observer.stats())["leases"]
                return bool((leases["active"], leases["quarantined"]) == (1, 1))

            await soon(is_held, "the held one alone goes on")
            del tensor
            gc.collect()
            await soon(lambda: idle(observer), "the held one was the last")

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
    for lease in [lease for call in calls if call.done() for lease in call.result()]:
        lease.release()
    if sys.argv[2] == "close":
        await client.close()
        await asyncio.gather(*calls, return_exceptions=True)
asyncio.run(main())
print("over")
"""


@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_program_that_ends_in_the_middle_says_what_it_left_open(sidecar: SidecarProcess, end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", UNFINISHED, str(sidecar.socket), end],
        capture_output=True, text=True, env=clean_environ(PYTHONPATH="."), timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "over\n"
    assert done.stderr == "" if end == "close" else "dropped unclosed" in done.stderr
    eventually(lambda: sidecar.stats()["leases"]["active"] == 0, "nothing is left")
