"""Device memory in one process and between processes."""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from ipc.cuda_devices import visible_devices
from ipc.errors import DeviceUnavailable, MemoryUnavailable, OutOfBounds
from tests.ipc.cuda_processes import MIB, Child, eventually, fill, keeper, leaver, maker, matches, reader, writer

cuda = pytest.importorskip("ipc.memory_cuda", reason="needs cuda-bindings", exc_type=ImportError)
pytestmark = pytest.mark.gpu


@pytest.fixture
def region() -> Iterator[Any]:
    with cuda.DeviceRegion.create(4 * MIB, 0) as made:
        yield made


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(0)[0]


def described(region: Any) -> dict[str, object]:
    return {"nbytes": region.nbytes, "uuid": region.uuid}


def test_a_new_region_is_zero_rounded_up_and_private() -> None:
    with cuda.DeviceRegion.create(3 * MIB + 1, torch.device("cuda", 0)) as region:
        assert region.nbytes == 4 * MIB
        assert region.device == torch.device("cuda", 0)
        assert region.uuid == visible_devices()[0].uuid
        assert fcntl.fcntl(region.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert not region.tensor(0, region.nbytes).any()
        assert region.tensor(256, 64).device == region.device
        for offset, nbytes in ((-1, 2), (0, region.nbytes + 1), (region.nbytes, 1), (8, -1)):
            with pytest.raises(OutOfBounds, match="outside a region of 4194304 bytes"):
                region.tensor(offset, nbytes)


def test_a_product_is_written_into_the_region_and_seen_by_a_reader(region: Any) -> None:
    left, right = torch.randn(2, 64, 64, device="cuda").bfloat16()
    out = region.tensor(512, 64 * 64 * 2).view(torch.bfloat16).view(64, 64)
    torch.mm(left, right, out=out)
    with cuda.DeviceReader.attach(region.fd, region.nbytes, region.uuid) as own:
        seen = own.tensor(512, 64 * 64 * 2).view(torch.bfloat16).view(64, 64)
        assert seen.data_ptr() != out.data_ptr()
        assert torch.equal(seen, left @ right)


def test_closing_keeps_what_is_used_and_gives_back_the_rest() -> None:
    fill(torch.empty(8, dtype=torch.uint8, device="cuda"), 0)
    gc.collect()
    before = free_bytes()
    region = cuda.DeviceRegion.create(256 * MIB, 0)
    fd, view = region.fd, region.tensor(8, 64)
    fill(view, 3)
    region.close()
    region.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(OutOfBounds, match="closed"):
        region.tensor(0, 1)
    assert matches(view, 3)
    assert free_bytes() <= before - 256 * MIB
    del view
    assert eventually(lambda: free_bytes() >= before - MIB)


def test_unmapping_waits_for_reads_that_are_queued() -> None:
    region = cuda.DeviceRegion.create(2 * MIB, 0)
    view = region.tensor(0, region.nbytes)
    fill(view, 9)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(500_000_000)
        copy = view.clone()
        done = torch.cuda.current_stream().record_event()
    region.close()
    del view
    assert not done.query(), "closing waited for the device"
    done.synchronize()
    assert matches(copy, 9)
    assert eventually(lambda: not any(each.name == "cuda-unmap" for each in threading.enumerate()))


def test_a_view_that_dies_during_capture_spoils_neither_capture_nor_memory() -> None:
    region = cuda.DeviceRegion.create(2 * MIB, 0)
    views = [region.tensor(0, 64)]
    region.close()
    out = torch.zeros(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out += 1
        views.clear()
        assert eventually(lambda: any(each.name == "cuda-unmap" for each in threading.enumerate()))
        threading.Event().wait(0.1)
        out += 1
    graph.replay()
    assert out.unique().tolist() == [2]
    assert eventually(lambda: not any(each.name == "cuda-unmap" for each in threading.enumerate()))


def test_mapping_spoils_no_capture(region: Any) -> None:
    graph = torch.cuda.CUDAGraph()
    out = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        with cuda.DeviceReader.attach(region.fd, region.nbytes, region.uuid) as own:
            view = own.tensor(0, 4)
        out += view
    graph.replay()
    assert not out.any()


class Owner:
    """Something a tensor keeps."""


def test_a_views_owner_lives_as_long_as_the_last_view(region: Any) -> None:
    own = cuda.DeviceReader.attach(region.fd, region.nbytes, region.uuid)
    owner = Owner()
    gone = weakref.ref(owner)
    view = own.tensor(0, 64, owner)
    del owner
    own.close()
    last = view[8:].view(torch.float32)
    del view
    assert gone() is not None
    thread = threading.Thread(target=[last].pop)
    del last
    thread.start()
    thread.join()
    del thread
    assert gone() is None


def test_what_cannot_be_mapped_is_refused_and_nothing_is_kept(region: Any) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryFile() as plain, pytest.raises(MemoryUnavailable, match="cannot be imported"):
        cuda.DeviceReader.attach(plain.fileno(), region.nbytes, region.uuid)
    with pytest.raises(OutOfBounds, match=f"cannot be mapped as {region.nbytes * 2} bytes"):
        cuda.DeviceReader.attach(region.fd, region.nbytes * 2, region.uuid)
    with pytest.raises(OutOfBounds, match="cannot be mapped as 1000 bytes"):
        cuda.DeviceRegion.attach(region.fd, 1000, 0)
    with pytest.raises(MemoryUnavailable, match="free"):
        cuda.DeviceRegion.create(1 << 42, 0)
    with pytest.raises(OutOfBounds, match="positive"):
        cuda.DeviceRegion.create(0, 0)
    assert len(os.listdir("/proc/self/fd")) == fds


def test_devices_that_will_not_do_are_refused_with_the_rule(region: Any) -> None:
    (device, *_) = visible_devices()
    lacking = (replace(device, has_virtual_memory=False),)
    with pytest.raises(DeviceUnavailable, match="lacks virtual memory management"):
        cuda.DeviceRegion.create(MIB, 0, visible=lacking)
    with pytest.raises(DeviceUnavailable, match="lacks virtual memory management"):
        cuda.DeviceReader.attach(region.fd, region.nbytes, region.uuid, visible=lacking)
    with pytest.raises(DeviceUnavailable, match="not visible to this process"):
        cuda.DeviceReader.attach(region.fd, region.nbytes, "0" * 36)
    with pytest.raises(DeviceUnavailable, match="cuda:77 is not one of"):
        cuda.DeviceReader.attach(region.fd, region.nbytes, region.uuid, 77)
    with pytest.raises(DeviceUnavailable, match="with its number"):
        cuda.DeviceRegion.create(MIB, torch.device("cpu"))


def test_the_same_device_is_found_under_every_numbering(region: Any) -> None:
    fill(region.tensor(0, region.nbytes), 5)
    torch.cuda.synchronize()
    for visible in ("0", f"GPU-{region.uuid}"):
        with Child(reader, visible=visible) as child:
            assert child.ask(described(region), region.fd)["device"] == "cuda:0"
            assert child.ask({"seed": 5}) is True
    with Child(reader, visible="") as child:
        child.send(described(region), region.fd)
        assert child.receive()[0] is None
        status, errors = child.finish()
    assert status == 1
    assert "DeviceUnavailable: no CUDA device" in errors


def test_a_reader_that_writes_dies_alone(region: Any) -> None:
    fill(region.tensor(0, region.nbytes), 6)
    torch.cuda.synchronize()
    with Child(reader) as stray, Child(reader) as other:
        for child in (stray, other):
            child.ask(described(region), region.fd)
        stray.send({"write": True})
        assert stray.receive()[0] is None
        status, errors = stray.finish()
        assert status != 0
        assert "CUDA error" in errors
        assert other.ask({"seed": 6}) is True
    assert matches(region.tensor(0, region.nbytes), 6)


def test_the_descriptor_keeps_the_memory_of_a_killed_maker() -> None:
    nbytes = 512 * MIB
    with Child(maker) as first, Child(keeper) as holder:
        before = free_bytes()
        first.send([nbytes, 11])
        memory, (fd,) = first.receive()
        assert memory is not None, first.finish()
        assert holder.ask({}, fd) == {"loaded": []}
        os.close(fd)
        first.kill()
        assert eventually(lambda: free_bytes() <= before - nbytes)
        # What the killed process's context took is back, and the memory alone is left.
        assert eventually(lambda: free_bytes() >= before - nbytes - 16 * MIB)
        holder.send({})
        _, (fd,) = holder.receive()
        with Child(writer) as second:
            answer = second.ask({"nbytes": memory["nbytes"], "seed": 11, "next": 12}, fd)
            assert answer == {"same": True, "uuid": memory["uuid"]}
            with cuda.DeviceReader.attach(fd, memory["nbytes"], memory["uuid"]) as own:
                assert matches(own.tensor(0, own.nbytes), 12)
        assert eventually(lambda: before - nbytes - 64 * MIB <= free_bytes() <= before - nbytes), "it was doubled"
        os.close(fd)
        holder.finish()
        assert eventually(lambda: free_bytes() >= before - 64 * MIB), "the memory was not given back"


def test_a_reader_makes_one_context_and_a_keeper_none(region: Any) -> None:
    torch.cuda.empty_cache()
    before = free_bytes()
    with Child(keeper) as holder:
        holder.ask({}, region.fd)
        assert free_bytes() == before
    with cuda.DeviceReader.attach(region.fd, region.nbytes, region.uuid) as own:
        own.tensor(0, 64)
        assert before - free_bytes() <= 2 * MIB


def test_a_program_may_end_with_views_alive(region: Any) -> None:
    with Child(leaver) as child:
        assert child.ask(described(region), region.fd) == "leaving"
        assert child.finish() == (0, "")
