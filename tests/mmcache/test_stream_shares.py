"""Leases on device memory end once, after every stream that read them: against a driver that stands in.

The sidecar is one on a CPU. What its pool has is taken for memory of a device, whose tensors are on the CPU.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmcache
from ipc.memory_shm import ReadOnlyRegion
from mmcache.core import ClientCore
from mmcache.device_memory import DeviceMemory, checked_ordinal
from mmcache.framing import Frame, Kind
from mmcache.lease import Lease
from mmcache.protocol import PoolAdded
from tests.mmcache.loops import Run
from tests.mmcache.support import SidecarProcess, eventually, image
from tests.stand_in_driver import CUresult, Driver, Event, Stream, machine

CAPTURED = 7
"""The stream that a test captures, if it does."""


class TakenForDevice(DeviceMemory):
    """A pool's memory as of cuda:0."""

    def __init__(self, region: ReadOnlyRegion) -> None:
        self._region = region
        self.nbytes = region.nbytes

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def tensor(self, offset: int, shape: tuple[int, int], dtype: str, owner: object) -> torch.Tensor:
        there = self._region.view(offset, shape[0] * shape[1] * 4, owner, writable_flag=True)
        return torch.from_numpy(there).view(torch.float32).view(shape)


@pytest.fixture
def client(driver: Driver, shared_sidecar: SidecarProcess) -> Iterator[mmcache.Client]:
    client = shared_sidecar.connect()
    yield client
    driver.capturing.clear()
    driver.write_code = CUresult.CUDA_SUCCESS
    client.close()
    gc.collect()
    eventually(
        lambda: not [one for one in threading.enumerate() if one.name == "mmcache-after-capture"], "captures end"
    )
    driver.arrive()
    if (acknowledger := client._core.in_streams._acknowledger) is not None:
        acknowledger.close()  # while its driver is there: what made this fixture keeps the client


@pytest.fixture
def active(client: mmcache.Client, shared_sidecar: SidecarProcess) -> Callable[[], int]:
    """How many leases the sidecar knows of, asked by another client."""
    return lambda: int(shared_sidecar.stats()["leases"]["active"])


def leased(client: mmcache.Client, *seeds: int) -> list[Lease]:
    leases = client.encode([image(seed) for seed in seeds])
    for lease in leases:
        assert isinstance(lease._region, ReadOnlyRegion)
        lease._region = TakenForDevice(lease._region)
    return leases


def streams_of(driver: Driver) -> list[int]:
    return [stream for stream, _, _ in driver.written]


def refused(message: str) -> Callable[[], Event]:
    def record() -> Event:
        raise RuntimeError(message)

    return record


@pytest.mark.parametrize(
    "wrong",
    [
        123, "ab", object(), [Stream(1), None], [[Stream(1)]], SimpleNamespace(device_index=0),
        SimpleNamespace(cuda_stream=5),
    ],
)  # fmt: skip
def test_what_is_no_stream_is_refused_before_anything_changes(
    driver: Driver, client: mmcache.Client, active: Callable[[], int], wrong: Any
) -> None:
    (lease,) = leased(client, 1)
    with pytest.raises(TypeError, match="stream"):
        lease.hold(wrong)
    _ = lease.tensor
    with pytest.raises(TypeError, match="stream"):
        lease.release(wrong)
    assert (lease.is_released, driver.written, active()) == (False, [], 1)
    lease.release(Stream(1))
    assert (lease.is_released, streams_of(driver), active()) == (True, [1], 1)
    driver.arrive()
    assert active() == 0


def test_a_lease_on_host_memory_takes_streams_alone_too(client: mmcache.Client) -> None:
    (lease,) = client.encode([image(1)])
    with pytest.raises(TypeError, match="stream"):
        lease.release("cuda:0")  # type: ignore[arg-type]
    assert not lease.is_released
    lease.release()


@pytest.mark.parametrize("several", [list, tuple, set, iter])
def test_streams_may_come_in_anything(
    driver: Driver, client: mmcache.Client, several: Callable[[Iterable[Stream]], Any]
) -> None:
    (lease,) = leased(client, 1)
    _ = lease.tensor
    streams = [Stream(1), Stream(2)]
    lease.release(several(streams))
    (written,) = streams_of(driver)
    first, other = sorted(streams, key=lambda stream: stream.cuda_stream != written)
    assert first.waits_for == other.recorded != []


@pytest.mark.parametrize("code", [CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED])
def test_a_failure_of_the_driver_leaves_the_lease_as_it_was(
    driver: Driver, client: mmcache.Client, active: Callable[[], int], code: CUresult
) -> None:
    """And only a capture is called one."""
    (lease,) = leased(client, 1)
    _ = lease.tensor
    driver.write_code = code
    kind = mmcache.CapturingError if code.value >= 900 else mmcache.DeviceUnavailable
    with pytest.raises(kind, match=code.name):
        lease.release()
    driver.write_code = CUresult.CUDA_SUCCESS
    other = Stream(2)
    other.record_event = refused("CUDA error: unspecified launch failure")  # type: ignore[method-assign]
    with pytest.raises(mmcache.DeviceUnavailable, match="launch failure"):
        lease.release([Stream(1), other])
    assert (lease.is_released, active()) == (False, 1)
    lease.release()
    assert len(driver.written) == 1
    driver.arrive()
    assert active() == 0


def test_a_client_closes_on_a_device_that_failed(
    driver: Driver, client: mmcache.Client, shared_sidecar: SidecarProcess, active: Callable[[], int]
) -> None:
    other = shared_sidecar.connect()
    read, unread = leased(other, 1, 2)
    _ = read.tensor
    driver.write_code = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    other.close()
    assert (unread.is_released, active()) == (True, 1), "what cannot be acknowledged goes on"
    driver.write_code = CUresult.CUDA_SUCCESS
    read.release()
    driver.arrive()
    eventually(lambda: active() == 0, "it ends after the client's end")


@pytest.mark.parametrize("from_another_thread", [False, True])
def test_a_share_whose_word_is_being_queued_goes_on_when_the_client_closes(
    driver: Driver, client: mmcache.Client, active: Callable[[], int], from_another_thread: bool
) -> None:
    (lease,) = leased(client, 1)
    _ = lease.tensor
    seen: list[int] = []

    def close() -> None:
        driver.on_write = lambda: None
        if from_another_thread:
            closing = threading.Thread(target=client.close)
            closing.start()
            closing.join()
        else:
            client.close()
        seen.append(active())

    driver.on_write = close
    lease.release(Stream(1))
    assert (seen, len(driver.written), active()) == ([1], 1, 1)
    driver.arrive()
    eventually(lambda: active() == 0, "the word ends it")


def test_two_threads_release_one_lease_once(driver: Driver, client: mmcache.Client) -> None:
    for _ in range(20):
        (lease,) = leased(client, 1)
        _ = lease.tensor
        driver.on_write = lambda lease=lease: Lease.release(lease)  # in the middle of itself, too
        threads = [threading.Thread(target=lease.release) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(driver.written) == 1
        driver.arrive()


def test_it_ends_after_the_streams_that_were_current_for_its_views(driver: Driver, client: mmcache.Client) -> None:
    side, outer = Stream(3), Stream(4)
    with driver.stream(outer):
        (lease,) = leased(client, 1)
        with lease, driver.stream(side):
            _ = lease.tensor.sum()
    assert streams_of(driver) == [4]
    assert outer.waits_for == side.recorded != []


def test_a_client_that_closes_waits_for_them_too(
    driver: Driver, shared_sidecar: SidecarProcess, client: mmcache.Client
) -> None:
    other, side, outer = shared_sidecar.connect(), Stream(3), Stream(4)
    (lease,) = leased(other, 1)
    with driver.stream(side):
        _ = lease.tensor
    with driver.stream(outer):
        other.close()
    assert streams_of(driver) == [4]
    assert outer.waits_for == side.recorded != []


def test_streams_that_are_named_are_waited_for_instead(driver: Driver, client: mmcache.Client) -> None:
    named, side = Stream(3), Stream(4)
    (lease,) = leased(client, 1)
    with driver.stream(side):
        _ = lease.tensor
    lease.release(named)
    assert streams_of(driver) == [3]
    assert not named.waits_for


def test_one_stream_is_one_however_often_it_is_seen(driver: Driver, client: mmcache.Client) -> None:
    (lease,) = leased(client, 1)
    for _ in range(3):
        _ = lease.tensor  # each time torch makes a new object for the stream
    lease.release()
    assert streams_of(driver) == [1000]
    assert client.device_counters["stream_writes"] == 1


def test_a_view_that_a_graph_takes_leaves_its_stream_out(driver: Driver, client: mmcache.Client) -> None:
    (lease,) = leased(client, 1)
    driver.capturing.add(CAPTURED)
    with driver.stream(Stream(CAPTURED)):
        _ = lease.tensor
        with pytest.raises(mmcache.CapturingError):
            lease.release()
    lease.release(Stream(1))  # on which the graph is replayed, while others are still captured
    assert streams_of(driver) == [1]


def held_and_dropped(client: mmcache.Client, driver: Driver, stream: Stream) -> None:
    """The tensor of a held lease dies while its stream is being captured."""
    (lease,) = leased(client, 1)
    with driver.stream(stream):
        tensor = lease.hold()
        del lease
        driver.capturing.add(stream.cuda_stream)
        del tensor


def test_what_dies_in_a_capture_ends_on_the_same_stream_after_it(
    driver: Driver, client: mmcache.Client, active: Callable[[], int]
) -> None:
    held_and_dropped(client, driver, Stream(CAPTURED))
    (lease,) = client.encode([image(2)])  # calls of this and of other threads go on
    lease.release()
    assert (client.stats()["leases"]["active"], driver.written) == (1, [])
    driver.capturing.clear()
    eventually(lambda: streams_of(driver) == [CAPTURED], "it ends where it was read, and nowhere else")
    assert active() == 1, "once that stream is there"
    driver.arrive()
    assert active() == 0


def test_what_dies_in_a_capture_ends_after_the_client_too(
    driver: Driver, client: mmcache.Client, active: Callable[[], int]
) -> None:
    held_and_dropped(client, driver, Stream(CAPTURED))
    client.close()
    assert active() == 1
    driver.capturing.clear()
    eventually(lambda: streams_of(driver) == [CAPTURED], "the closed client's share ends")
    driver.arrive()
    eventually(lambda: active() == 0, "the word ends it")


def test_a_dead_tensor_of_a_device_that_failed_disturbs_nobody(
    driver: Driver, client: mmcache.Client, active: Callable[[], int], recwarn: pytest.WarningsRecorder
) -> None:
    (lease,) = leased(client, 1)
    tensor = lease.hold()
    driver.write_code = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    del tensor
    assert client.stats()["leases"]["active"] == 1, "nobody knows whether it is still being read"
    assert not [warning for warning in recwarn if "Share" in str(warning.message)]
    driver.write_code = CUresult.CUDA_SUCCESS
    lease._live_core().let_go(lease._token)
    driver.arrive()
    assert active() == 0


def test_a_held_tensor_in_a_cycle_may_be_collected_in_the_middle_of_a_release(
    driver: Driver, client: mmcache.Client, active: Callable[[], int]
) -> None:
    first, second = leased(client, 1, 2)
    _ = first.tensor
    gc.collect()
    gc.disable()
    try:
        cycle: list[Any] = [second.hold()]
        cycle.append(cycle)
        gone = weakref.ref(cycle[0])
        del cycle, second
        threshold = gc.get_threshold()
        gc.set_threshold(1)
        driver.on_write = gc.enable  # the next allocation collects
        first.release(Stream(1))
        gc.set_threshold(*threshold)
        assert gone() is None
    finally:
        gc.enable()
    assert sorted(streams_of(driver)) == [1, 1000]
    driver.arrive()
    assert active() == 0


def test_dropping_a_client_and_its_lease_in_a_capture_returns(
    driver: Driver, client: mmcache.Client, shared_sidecar: SidecarProcess
) -> None:
    other = shared_sidecar.connect()
    (lease,) = leased(other, 1)
    _ = lease.tensor
    del _
    lease.release()
    driver.arrive()
    other.close()
    driver.capturing.add(1000)
    del other, lease
    gc.collect()
    assert driver.registered, "it waits for the capture, and nobody for it"
    driver.capturing.clear()
    eventually(lambda: not driver.registered, "its control memory is given back")


@pytest.mark.parametrize(("device", "ordinal"), [(None, None), ("cuda:3", 3), (torch.device("cuda", 0), 0)])
def test_a_device_is_named_with_its_number(device: object, ordinal: int | None) -> None:
    assert checked_ordinal(device) == ordinal


@pytest.mark.parametrize("device", ["cuda", "cpu", 3, "cuda:x", "cuda:-1", torch.device("cuda"), ""])
def test_what_is_no_device_is_refused_before_anything_is_connected(device: Any) -> None:
    with pytest.raises(ValueError, match="cuda:0"):
        mmcache.connect("/nowhere", device=device)
    with pytest.raises(ValueError, match="cuda:0"):
        mmcache.AsyncClient.connect("/nowhere", device=device)


def told_of_a_pool(core: ClientCore) -> DeviceMemory:
    """What a client has of a pool on a device that its sidecar tells it of."""
    added = PoolAdded(pool_id=99, nbytes=1 << 21, device="aaaa")
    core.receive(Frame(Kind.POOL_ADDED, added.model_dump_json().encode(), b"", [os.open(os.devnull, os.O_RDONLY)]))
    memory = core._pools[99]
    assert isinstance(memory, DeviceMemory)
    return memory


def test_every_connection_knows_the_device_that_its_client_names(shared_sidecar: SidecarProcess, run: Run) -> None:
    with shared_sidecar.connect(device="cuda:2", reconnect=True) as client:
        assert told_of_a_pool(client._core)._ordinal == 2
        client._pump.channel.shut_down()
        assert client.stats()["ranks"]["ready"] > 0
        assert told_of_a_pool(client._core)._ordinal == 2, "the next one too"
    with shared_sidecar.connect() as client:
        assert told_of_a_pool(client._core)._ordinal is None

    async def test() -> None:
        async with mmcache.AsyncClient.connect(shared_sidecar.socket, device="cuda:2") as client:
            assert told_of_a_pool(client._core)._ordinal == 2

    run(test())


def test_a_client_reads_on_the_device_that_it_names(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    import ipc.memory_cuda as memory_cuda

    monkeypatch.setattr(memory_cuda, "visible_devices", machine)
    mapped: list[int] = []

    def mapping(handle: object, nbytes: int, ordinal: int, *, writable: bool) -> Any:
        mapped.append(ordinal)
        return SimpleNamespace(nbytes=nbytes, ordinal=ordinal)

    monkeypatch.setattr(memory_cuda, "Mapping", mapping)
    with open("/dev/null") as file:
        assert DeviceMemory(file.fileno(), 1 << 21, "aaaa").device == torch.device("cuda", 0)
        assert DeviceMemory(file.fileno(), 1 << 21, "aaaa", 2).device == torch.device("cuda", 2)
        with pytest.raises(mmcache.DeviceUnavailable, match=r"no peer access to .*aaaa.*client\.fetch"):
            _ = DeviceMemory(file.fileno(), 1 << 21, "aaaa", 3).device
    assert mapped == [0, 2]
