"""Tensors of a device are staged after their own stream's work, whichever thread copies.

Against a driver that stands in: tensors say that they are on cuda:3, and are on the CPU.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import mmcache
from mmcache import AsyncClient
from tests.mmcache.loops import Run
from tests.mmcache.support import SidecarProcess, image
from tests.stand_in_driver import CUresult, Driver, Stream

SIDE = Stream(7, 3)


class OnDevice(torch.Tensor):
    """Says that it is on a device; tells when it is copied."""

    on_copy: Callable[[], object] = staticmethod(lambda: None)
    device = property(lambda self: torch.device("cuda", 3))  # type: ignore[assignment]

    def detach(self) -> torch.Tensor:
        type(self).on_copy()
        return self.as_subclass(torch.Tensor).detach()


def on_device(values: np.ndarray | torch.Tensor) -> torch.Tensor:
    plain = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return plain.as_subclass(OnDevice)


@pytest.fixture
def copies(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of each copy, the stream that was current, and whether it was in this thread."""
    seen: list[tuple[int, bool]] = []
    here = threading.get_ident()
    note = lambda: seen.append((driver.current_stream().cuda_stream, threading.get_ident() == here))  # noqa: E731
    monkeypatch.setattr(OnDevice, "on_copy", staticmethod(note))
    return seen


@pytest.fixture
def client(copies: object, driver: Driver, shared_sidecar: SidecarProcess) -> Iterator[mmcache.Client]:
    with shared_sidecar.connect() as client:
        yield client
        client.cancel()
        assert client.leases(check=True)["problems"] == []
    gc.collect()
    assert not driver.registered


def test_it_is_copied_on_its_own_stream_with_the_key_of_what_arrived(
    driver: Driver, client: mmcache.Client, copies: list[tuple[int, bool]]
) -> None:
    with driver.stream(SIDE):
        ref = client.stage(on_device(image(1)))
    assert copies == [(7, True)]
    assert ref.key == str(client.key(image(1)))
    assert driver.registrations == [(3, "CU_STREAM_CAPTURE_MODE_RELAXED")], "its pages, under its own device"
    client.cancel(ref)


@pytest.mark.parametrize("side", [56, 900])
def test_an_asyncio_client_copies_in_a_thread_on_the_callers_stream(
    driver: Driver, shared_sidecar: SidecarProcess, run: Run, copies: list[tuple[int, bool]], side: int
) -> None:
    pixels = image(2, side, side)

    async def test() -> None:
        async with AsyncClient.connect(shared_sidecar.socket) as client:
            with driver.stream(SIDE):
                ref = await client.stage(on_device(pixels))
            assert ref.key == str(await client.key(pixels))
            await client.cancel(ref)

    run(test())
    assert copies == [(7, False)], "the loop waits for no device"
    gc.collect()


def test_nothing_is_staged_from_a_stream_that_is_captured(
    driver: Driver, client: mmcache.Client, copies: list[tuple[int, bool]]
) -> None:
    driver.capturing.add(7)
    with driver.stream(SIDE), pytest.raises(mmcache.CapturingError, match="captured"):
        client.stage(on_device(image(1)))
    ref = client.stage(on_device(image(1)))  # on another stream
    assert copies == [(1003, True)]
    client.cancel(ref)


def test_a_capture_that_begins_meanwhile_is_left_alone(
    driver: Driver, client: mmcache.Client, copies: list[tuple[int, bool]]
) -> None:
    driver.on_register = lambda: driver.capturing.add(7)
    with driver.stream(SIDE), pytest.raises(mmcache.CapturingError):
        client.stage_all([image(1), on_device(image(2))])
    assert copies == []
    assert client.stats()["staging"]["bytes_used"] == 0, "the room is given back"


def test_an_asyncio_client_stages_nothing_from_a_capture(
    driver: Driver, shared_sidecar: SidecarProcess, run: Run, copies: list[tuple[int, bool]]
) -> None:
    async def test() -> None:
        driver.capturing.add(7)
        async with AsyncClient.connect(shared_sidecar.socket) as client:
            with driver.stream(SIDE), pytest.raises(mmcache.CapturingError):
                await client.stage(on_device(image(1)))

    run(test())
    assert copies == []


def test_threads_that_stage_first_together_lock_the_pages_once(driver: Driver, client: mmcache.Client) -> None:
    driver.on_register = lambda: time.sleep(0.05)
    refs: list[mmcache.StagedRef] = []
    stage = lambda seed: refs.append(client.stage(on_device(image(seed))))  # noqa: E731
    threads = [threading.Thread(target=stage, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert (len(driver.registrations), len(driver.registered)) == (1, 1)
    assert client.device_counters["unlocked_bytes"] == 0
    client.cancel(*refs)


def test_pages_stay_locked_while_something_is_copied_to_them(
    driver: Driver, client: mmcache.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever becomes of the connection meanwhile."""
    seen: list[int] = []

    def lost() -> None:
        client._core.forget_pools()
        gc.collect()
        seen.append(len(driver.registered))

    monkeypatch.setattr(OnDevice, "on_copy", staticmethod(lost))
    client.stage(on_device(image(1)))
    assert seen == [1]
    assert not driver.registered


@pytest.mark.parametrize("has_bindings", [True, False])
def test_pages_that_cannot_be_locked_are_counted(
    driver: Driver, client: mmcache.Client, monkeypatch: pytest.MonkeyPatch, has_bindings: bool
) -> None:
    driver.register_code = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    if not has_bindings:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    ref = client.stage(on_device(image(1)))
    assert ref.key == str(client.key(image(1)))
    assert client.device_counters["unlocked_bytes"] > 0
    client.cancel(ref)


@pytest.mark.parametrize("in_block", [True, False])
def test_torchs_default_device_changes_nothing(client: mmcache.Client, in_block: bool) -> None:
    pixels = on_device(image(1))
    if in_block:
        with torch.device("meta"):
            ref = client.stage(pixels)
    else:
        torch.set_default_device("meta")
        try:
            ref = client.stage(pixels)
        finally:
            torch.set_default_device(None)
    assert ref.key == str(client.key(image(1)))
    client.cancel(ref)


def test_what_is_too_large_or_wrong_is_said_as_of_the_host(client: mmcache.Client, copies: object) -> None:
    wide = torch.zeros(1, 1, 3, dtype=torch.uint8)
    with pytest.raises(mmcache.ImageTooLarge, match="300000000000000 bytes"):
        client.stage(on_device(wide.expand(10**7, 10**7, 3)))
    rows = torch.zeros(1, 1).expand(65535 * 65535, 588)
    with pytest.raises(mmcache.ImageTooLarge, match="max_item_bytes"):
        client.stage(on_device(rows), grid=(1, 65535, 65535))
    with pytest.raises(mmcache.UnsupportedItem, match="uint8"):
        client.stage(on_device(torch.rand(4, 4, 3)))
    assert copies == []


@pytest.mark.parametrize(
    "make", [lambda x: x.permute(1, 0, 2), lambda x: x[::2, ::3], lambda x: x[:1].expand(4, 28, 3)]
)
def test_any_memory_layout(client: mmcache.Client, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    pixels = make(torch.from_numpy(image(4, 56, 28)))
    ref = client.stage(on_device(pixels))
    assert ref.key == str(client.key(pixels))
    client.cancel(ref)


def test_encode_says_where_tensors_of_a_device_go(client: mmcache.Client) -> None:
    with pytest.raises(mmcache.EncodeError, match=r"client\.stage"):
        client.encode([on_device(image(1))])
