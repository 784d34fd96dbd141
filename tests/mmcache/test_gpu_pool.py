"""A sidecar on CUDA: embeddings in device memory, which clients read in place and which outlives its rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import mmcache
from encoder.model import Encoder
from encoder.patches import PatchRows
from encoder.preprocess import preprocess
from ipc.materialize import Slice
from mmcache.server.rank_staging import LockedCopy
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


def encoded_here(seed: int, device: str) -> torch.Tensor:
    encoder = Encoder.load("moonvit-tiny", device=device)
    out = torch.empty(6, encoder.config.text_width, device=device)
    assert encoder.encode([image(seed)], [out]) == [True]
    return out


def test_embeddings_are_on_the_device_and_right(client: mmcache.Client) -> None:
    (lease,) = client.encode([image(1)])
    assert (lease.origin, lease.is_on_device) == ("encoded", True)
    tensor = lease.tensor
    assert (tensor.device.type, tensor.shape) == ("cuda", (6, lease.dim))
    torch.testing.assert_close(tensor, encoded_here(1, "cuda"), rtol=0, atol=0)
    torch.testing.assert_close(client.fetch(lease), tensor.cpu(), rtol=0, atol=0)
    with pytest.raises(TypeError, match="CUDA"):
        lease.numpy()
    (again,) = client.encode([image(1)])
    assert again.origin == "pool"
    assert again.tensor.data_ptr() == tensor.data_ptr(), "in place"
    again.release()
    lease.release()
    stats = client.stats()
    assert (stats["device"], stats["items"]["fetched"]) == ("cuda", 1)


def test_a_put_is_read_on_the_device(client: mmcache.Client) -> None:
    key = client.key(b"made elsewhere")
    rows = torch.randn(4, client.dim)
    assert client.put(key, rows, (1, 4, 4))
    (lease,) = client.encode([None], keys=[key])
    assert torch.equal(lease.tensor.cpu(), rows)
    lease.release()
    with pytest.raises(mmcache.NonFiniteEmbedding):
        client.put(client.key(b"another"), torch.full((4, client.dim), torch.nan), (1, 4, 4))


def test_a_release_waits_for_the_stream(client: mmcache.Client) -> None:
    stream = torch.cuda.Stream()
    (lease,) = client.encode([image(2)])
    with torch.cuda.stream(stream):
        total = lease.tensor.sum()
    busy(stream)
    lease.release(stream)
    assert lease.is_released
    assert client.stats()["leases"]["active"] == 1, "it is still being read, for all the sidecar knows"
    stream.synchronize()
    assert client.stats()["leases"]["active"] == 0
    assert total.isfinite()


def test_a_release_waits_for_all_of_several(client: mmcache.Client) -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    (lease,) = client.encode([image(2)])
    _ = lease.tensor
    busy(streams[2])
    lease.release(streams)
    assert client.stats()["leases"]["active"] == 1
    torch.cuda.synchronize()
    assert client.stats()["leases"]["active"] == 0


def test_an_unread_lease_ends_at_once(client: mmcache.Client) -> None:
    busy(torch.cuda.current_stream())
    (lease,) = client.encode([image(2)])
    lease.release()
    assert client.stats()["leases"]["active"] == 0
    torch.cuda.synchronize()


def test_what_is_held_ends_in_stream_order(client: mmcache.Client) -> None:
    stream = torch.cuda.Stream()
    (lease,) = client.encode([image(2)])
    tensor = lease.hold(stream)
    lease.release()
    assert client.stats()["leases"]["active"] == 1
    part = tensor[1:3]
    del tensor
    busy(stream)
    del part
    assert client.stats()["leases"]["active"] == 1
    stream.synchronize()
    assert client.stats()["leases"]["active"] == 0


def test_close_ends_leases_in_stream_order(cuda_sidecar: SidecarProcess, client: mmcache.Client) -> None:
    other = cuda_sidecar.connect()
    (read,) = other.encode([image(2)])
    (unread,) = other.encode([image(3)])
    _ = read.tensor
    busy(torch.cuda.current_stream())
    other.close()
    assert read.is_released
    assert unread.is_released
    assert client.stats()["leases"]["active"] == 1, "the one that is read goes on until the stream is there"
    torch.cuda.synchronize()
    eventually(lambda: client.stats()["leases"]["active"] == 0, "the closed connection's lease ends")


def test_a_release_in_a_capture_is_refused(client: mmcache.Client) -> None:
    (lease,) = client.encode([image(2)])
    tensor = lease.tensor
    out = torch.zeros_like(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(tensor)
        with pytest.raises(mmcache.MMCacheError, match="captur"):
            lease.release()
    assert not lease.is_released
    graph.replay()
    assert torch.equal(out, tensor)
    lease.release()
    torch.cuda.synchronize()


def test_a_client_that_writes_dies_alone(cuda_sidecar: SidecarProcess, client: mmcache.Client) -> None:
    (lease,) = client.encode([image(4)])
    before = lease.tensor.clone()
    done = run_client(
        cuda_sidecar,
        "(lease,) = client.encode([image(4)])\nlease.tensor.zero_()\ntorch.cuda.synchronize()\nprint('written')",
    )
    assert done.returncode != 0
    assert "written" not in done.stdout
    assert torch.equal(lease.tensor, before)
    assert client.encode([image(4)])[0].origin == "pool"
    assert client.stats()["ranks"]["restarts"] == 0
    lease.release()


def test_other_numbering_of_devices(cuda_sidecar: SidecarProcess, client: mmcache.Client) -> None:
    client.encode([image(5)])[0].release()
    uuid = torch.cuda.get_device_properties(0).uuid
    code = "(lease,) = client.encode([image(5)]); print(lease.tensor.device, float(lease.tensor.sum()))"
    plain, named = run_client(cuda_sidecar, code), run_client(cuda_sidecar, code, CUDA_VISIBLE_DEVICES=f"GPU-{uuid}")
    assert plain.stdout == named.stdout != ""


def test_without_the_device_a_copy_can_be_fetched(cuda_sidecar: SidecarProcess, client: mmcache.Client) -> None:
    (lease,) = client.encode([image(5)])
    before = client.stats()["items"]["fetched"]
    code = """
(lease,) = client.encode([image(5)])
try:
    lease.tensor
except mmcache.DeviceUnavailable as error:
    print(error)
print(float(client.fetch(lease).double().sum()))
lease.release()
"""
    done = run_client(cuda_sidecar, code, CUDA_VISIBLE_DEVICES="")
    message, total = done.stdout.splitlines()
    assert "no CUDA device" in message
    assert float(total) == float(lease.tensor.cpu().double().sum())
    assert client.stats()["items"]["fetched"] == before + 1
    lease.release()


def test_staged_pixels(client: mmcache.Client) -> None:
    ref = client.stage(image(6))
    staged, plain = client.encode([ref, image(6)])
    assert (staged.key, plain.key) == (client.key(image(6)),) * 2
    assert torch.equal(staged.tensor, encoded_here(6, "cuda"))
    for lease in (staged, plain):
        lease.release()


def test_device_tensors_are_staged_with_one_copy(client: mmcache.Client) -> None:
    pixels = torch.from_numpy(image(7)).cuda()
    ref = client.stage(pixels)
    (lease,) = client.encode([ref])
    assert str(lease.key) == str(client.key(image(7)))
    assert torch.equal(lease.tensor, encoded_here(7, "cuda"))
    lease.release()


def test_staged_rows_of_several_types(cuda_sidecar: SidecarProcess, client: mmcache.Client) -> None:
    """What their processor made of pixels, staged as rows from the device and the host, in one batch."""
    encoder = Encoder.load("moonvit-tiny", device="cuda")
    pictures = [image(seed, 56 + 28 * seed, 56) for seed in range(4)]
    rows, grids = zip(*(preprocess(picture, encoder.processor) for picture in pictures), strict=True)
    wide = [(torch.from_numpy(part).float() / 127.5 - 1).flatten(1) for part in rows]
    staged = [wide[0].cuda(), wide[1], wide[2].half().cuda(), wide[3].bfloat16()]
    leases = client.encode(client.stage_all(staged, grids=grids))
    for part, grid, lease in zip(staged, grids, leases, strict=True):
        out = torch.empty(lease.num_tokens, lease.dim, device="cuda")
        assert encoder.encode([PatchRows(part.cuda().float(), grid)], [out]) == [True]
        torch.testing.assert_close(lease.tensor, out, rtol=1e-5, atol=1e-5)
        lease.release()
    assert client.device_counters["unlocked_bytes"] == 0


def test_locked_memory_is_not_reused_before_the_device_has_read_it() -> None:
    locked = LockedCopy()
    outs = []
    busy(torch.cuda.current_stream())
    for value in range(3):
        rows = np.full(64 * 588, value, np.uint8)
        out = torch.empty(64, 588, device="cuda")
        locked.materialize([Slice(rows, "uint8", 64)], out, [lambda _: None])
        outs.append(out)
    assert [out.unique().tolist() for out in outs] == [[0.0], [1.0], [2.0]]


def test_close_in_a_capture_is_refused(cuda_sidecar: SidecarProcess) -> None:
    other = cuda_sidecar.connect()
    (lease,) = other.encode([image(2)])
    tensor = lease.tensor
    out = torch.zeros_like(tensor)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        out.copy_(tensor)
        with pytest.raises(mmcache.CapturingError):
            other.close()
    assert not lease.is_released
    assert other.stats()["leases"]["active"] == 1, "the client goes on"
    other.close()
    assert lease.is_released


def test_acknowledgements_by_event_and_thread(cuda_sidecar: SidecarProcess, client: mmcache.Client) -> None:
    """As on a device without stream memory operations, forced."""
    done = run_client(
        cuda_sidecar,
        """
import ipc.control_cuda as control_cuda
control_cuda._has_stream_writes = lambda ordinal: False
(lease,) = client.encode([image(2)])
seen = lease.tensor
torch.cuda._sleep(int(0.3 * 1.9e9))
lease.release()
assert client.stats()["leases"]["active"] == 1, "its stream is not there yet"
torch.cuda.synchronize()
while client.stats()["leases"]["active"]:
    time.sleep(0.01)
assert client.device_counters == {"stream_writes": 0, "fallbacks": 1, "fetched": 0, "unlocked_bytes": 0}
client.close()
print("done")
""",
    )
    assert done.stdout == "done\n", done.stderr


def test_the_coordinator_has_no_driver(cuda_sidecar: SidecarProcess) -> None:
    maps = Path(f"/proc/{cuda_sidecar.pid}/maps").read_text()
    assert "libcuda" not in maps
    assert "libtorch" not in maps
