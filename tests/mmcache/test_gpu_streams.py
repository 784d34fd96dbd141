"""On CUDA, in what order leases end and tensors are staged: streams, captures, threads, and devices that are named."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest
import torch

import mmcache
from tests.mmcache.gpu_clients import busy, run_client, sidecar_on_cuda
from tests.mmcache.support import SidecarProcess, eventually, image

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cuda_sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with sidecar_on_cuda(tmp_path_factory.mktemp("cuda")) as sidecar:
        yield sidecar
        assert sidecar.stats()["leases"]["active"] == 0, "a test leaked leases"


@pytest.fixture
def client(cuda_sidecar: SidecarProcess) -> Iterator[mmcache.Client]:
    with cuda_sidecar.connect() as client:
        yield client
    eventually(lambda: cuda_sidecar.stats()["leases"]["active"] == 0, "every lease ends")
    with cuda_sidecar.connect() as client:
        assert client.leases(check=True)["problems"] == []


def active(client: mmcache.Client) -> int:
    return int(client.stats()["leases"]["active"])


def made_late(seed: int, side: int) -> tuple[torch.Tensor, torch.cuda.Stream]:
    """A picture that is there only once a busy stream has written it; until then it is another."""
    pixels = torch.from_numpy(image(seed, side, side)).cuda()
    made = torch.zeros_like(pixels)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    busy(stream)
    with torch.cuda.stream(stream):
        made.copy_(pixels)
    return made, stream


@pytest.mark.parametrize("side", [56, 900])
def test_an_asyncio_client_stages_what_its_own_stream_made(
    cuda_sidecar: SidecarProcess, client: mmcache.Client, side: int
) -> None:
    async def test() -> str:
        async with mmcache.AsyncClient.connect(cuda_sidecar.socket) as other:
            made, stream = made_late(1, side)
            with torch.cuda.stream(stream):
                staging = asyncio.ensure_future(other.stage(made))
                await asyncio.sleep(0)
                assert not stream.query(), "the loop waits for no device"
            ref = await staging
            await other.cancel(ref)
            return str(ref.key)

    assert asyncio.run(test()) == str(client.key(image(1, side, side)))


def test_a_client_stages_what_its_current_stream_made(client: mmcache.Client) -> None:
    made, stream = made_late(2, 900)
    with torch.cuda.stream(stream):
        ref = client.stage(made)
    assert ref.key == str(client.key(image(2, 900, 900)))
    client.cancel(ref)


def test_a_lease_ends_after_the_stream_its_tensor_was_asked_for_on(client: mmcache.Client) -> None:
    stream = torch.cuda.Stream()
    (lease,) = client.encode([image(3)])
    lease.tensor.sum()  # what a first time takes is over
    torch.cuda.synchronize()
    with lease, torch.cuda.stream(stream):
        busy(stream)
        total = lease.tensor.sum()
    assert lease.is_released
    assert active(client) == 1
    stream.synchronize()
    eventually(lambda: active(client) == 0, "its stream is there")
    assert total.isfinite()


def test_a_closed_client_waits_for_that_stream_too(cuda_sidecar: SidecarProcess, client: mmcache.Client) -> None:
    other, stream = cuda_sidecar.connect(), torch.cuda.Stream()
    (lease,) = other.encode([image(3)])
    with torch.cuda.stream(stream):
        busy(stream)
        _ = lease.tensor.sum()
    other.close()
    assert active(client) == 1
    stream.synchronize()
    eventually(lambda: active(client) == 0, "its stream is there")


def test_a_held_tensor_may_die_in_a_capture(client: mmcache.Client) -> None:
    (lease,) = client.encode([image(3)])
    held = [lease.hold()]
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out += 1
        held.clear()
        assert active(client) == 1, "and other calls go on"
        out += 1
    eventually(lambda: active(client) == 0, "it ends after the capture")
    graph.replay()
    assert out.tolist() == [2.0] * 8


def test_a_view_that_a_graph_takes_is_read_by_its_replays(client: mmcache.Client) -> None:
    (lease,) = client.encode([image(3)])
    expected = lease.tensor.clone()
    out = torch.zeros_like(expected)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out.copy_(lease.tensor)
    stream = torch.cuda.Stream()
    busy(stream)
    with torch.cuda.stream(stream):
        graph.replay()
    lease.release(stream)
    assert active(client) == 1
    stream.synchronize()
    assert torch.equal(out, expected)
    assert active(client) == 0


def test_nothing_is_staged_in_a_capture_and_the_capture_goes_on(client: mmcache.Client) -> None:
    pixels = torch.from_numpy(image(4)).cuda()
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out += 1
        with pytest.raises(mmcache.CapturingError):
            client.stage(pixels)
        out += 1
    graph.replay()
    assert out.tolist() == [2.0] * 8
    assert client.stats()["staging"]["bytes_used"] == 0


def test_a_first_stage_spoils_no_capture_of_another_thread(client: mmcache.Client) -> None:
    pixels = torch.from_numpy(image(4)).cuda()
    refs: list[mmcache.StagedRef] = []
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out += 1
        thread = threading.Thread(target=lambda: refs.append(client.stage(pixels)))
        thread.start()
        thread.join()
        out += 1
    graph.replay()
    assert out.tolist() == [2.0] * 8
    (ref,) = refs
    assert ref.key == str(client.key(image(4)))
    assert client.device_counters["unlocked_bytes"] == 0
    client.cancel(ref)


def test_a_client_may_be_dropped_in_a_capture(cuda_sidecar: SidecarProcess, client: mmcache.Client) -> None:
    others = [cuda_sidecar.connect()]
    (lease,) = others[0].encode([image(3)])
    _ = lease.tensor.sum()
    lease.release()
    torch.cuda.synchronize()
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        out += 1
        others[0].close()
        others.clear()
        del lease
        gc.collect()
        out += 1
    graph.replay()
    assert out.tolist() == [2.0] * 8
    eventually(
        lambda: not [one for one in threading.enumerate() if one.name.startswith("cuda-un")], "the memory is given back"
    )


def test_a_client_that_staged_may_be_closed_in_a_capture(cuda_sidecar: SidecarProcess) -> None:
    """The pages of its region are unlocked there."""
    other = cuda_sidecar.connect()
    other.stage(torch.from_numpy(image(4)).cuda())
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out += 1
        other.close()
        out += 1
    graph.replay()
    assert out.tolist() == [2.0] * 8


def test_the_pools_own_device_may_be_named(cuda_sidecar: SidecarProcess) -> None:
    with cuda_sidecar.connect(device="cuda:0") as client:
        (lease,) = client.encode([image(5)])
        assert lease.tensor.device == torch.device("cuda", 0)
        lease.release()


def test_a_device_that_is_not_there_is_named_and_a_copy_can_be_fetched(cuda_sidecar: SidecarProcess) -> None:
    with cuda_sidecar.connect(device="cuda:99") as client:
        (lease,) = client.encode([image(5)])
        with pytest.raises(mmcache.DeviceUnavailable, match=r"cuda:99.*client\.fetch"):
            _ = lease.tensor
        assert client.fetch(lease).shape == (lease.num_tokens, lease.dim)
        lease.release()


def test_another_device_reads_the_pool_and_makes_no_context_there(
    cuda_sidecar: SidecarProcess, client: mmcache.Client
) -> None:
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(1, 0):
        pytest.skip("needs a second device with peer access")
    (lease,) = client.encode([image(5)])
    expected = float(lease.tensor.double().sum())
    lease.release()
    code = """
from cuda.bindings import driver
client.close()
client = mmcache.connect(sys.argv[1], device="cuda:1")
(lease,) = client.encode([image(5)])
total = float(lease.tensor.double().sum())
lease.release()
_, flags, is_active = driver.cuDevicePrimaryCtxGetState(driver.cuDeviceGet(0)[1])
print(lease.key, total, is_active, torch.cuda.current_stream(1).device)
client.close()
"""
    done = run_client(cuda_sidecar, code)
    assert done.stdout.split()[1:] == [str(expected), "0", "cuda:1"], done.stderr
