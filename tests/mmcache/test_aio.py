"""The asyncio client's calls, on asyncio's loop and on uvloop."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmcache
from mmcache import AsyncClient
from mmcache.supplying import Supplying
from tests.mmcache.loops import Run, idle
from tests.mmcache.support import SidecarProcess, image


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """One for all tests of this module that do not kill it."""
    with SidecarProcess(tmp_path_factory.mktemp("aio")) as sidecar:
        yield sidecar
        assert sidecar.stats()["leases"]["connections"] == 1


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
