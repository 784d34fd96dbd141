"""Acknowledgements that a stream writes, and those that a thread stores for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ipc.control import ControlMemory
from ipc.errors import CapturingError, CudaFailed, OutOfBounds
from tests.ipc.cuda_processes import eventually

cuda = pytest.importorskip("ipc.control_cuda", reason="needs cuda-bindings", exc_type=ImportError)
pytestmark = pytest.mark.gpu

LONG = 400_000_000  # cycles, 0.2 s
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def control() -> Iterator[ControlMemory]:
    memory = ControlMemory.create(4096)
    yield memory
    memory.close()


@pytest.fixture(params=[True, False], ids=["by stream", "by thread"])
def acknowledger(request: pytest.FixtureRequest, control: ControlMemory) -> Iterator[Any]:
    made = cuda.StreamAcknowledger(ControlMemory.attach(control.fd), DEVICE, by_stream=request.param)
    yield made
    made.close()


def counts(acknowledger: Any) -> tuple[int, int]:
    return acknowledger.num_stream_writes, acknowledger.num_fallbacks


def busy_stream() -> torch.cuda.Stream:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
    return stream


def test_the_word_is_written_after_the_last_read_and_not_before(control: ControlMemory, acknowledger: Any) -> None:
    stream = busy_stream()
    read = stream.record_event()
    acknowledger.acknowledge(7, 41, [stream])
    while True:
        word, is_done = control.read(7), read.query()
        if word or is_done:
            break
    assert read.query(), "acknowledged before the read was done"
    assert eventually(lambda: control.read(7) == 41)
    assert not control.words[8:].any()
    assert sum(counts(acknowledger)) == 1


def test_a_busy_stream_holds_up_no_other(control: ControlMemory, acknowledger: Any) -> None:
    slow, quick = busy_stream(), torch.cuda.Stream()
    acknowledger.acknowledge(1, 5, [slow])
    acknowledger.acknowledge(2, 6, [quick])
    assert eventually(lambda: control.read(2) == 6)
    assert not control.read(1) or slow.query()
    assert eventually(lambda: control.read(1) == 5)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_several_streams_are_all_waited_for(control: ControlMemory, acknowledger: Any, place: int) -> None:
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()]
    streams[place] = busy_stream()
    read = streams[place].record_event()
    acknowledger.acknowledge(9, 2**32 - 1, streams)
    while not read.query():
        assert control.read(9) == 0 or read.query()
    assert eventually(lambda: control.read(9) == 2**32 - 1)


def test_a_thread_without_a_context_acknowledges(control: ControlMemory, acknowledger: Any) -> None:
    for slot, stream in enumerate((torch.cuda.Stream(), torch.cuda.default_stream()), start=1):
        thread = threading.Thread(target=acknowledger.acknowledge, args=[slot, 8, [stream]])
        thread.start()
        thread.join()
        assert eventually(lambda slot=slot: control.read(slot) == 8)


def test_capture_is_refused_and_not_disturbed(control: ControlMemory, acknowledger: Any) -> None:
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out += 1
        for streams in ([torch.cuda.current_stream()], [other, torch.cuda.current_stream()]):
            with pytest.raises(CapturingError, match="Acknowledge outside the capture"):
                acknowledger.acknowledge(3, 1, streams)
        out += 1
    assert counts(acknowledger) == (0, 0)
    graph.replay()
    torch.cuda.synchronize()
    assert out.tolist() == [2.0] * 8
    assert not control.words.any()
    acknowledger.acknowledge(3, 1, [torch.cuda.current_stream()])
    assert eventually(lambda: control.read(3) == 1)


def test_another_stream_may_acknowledge_during_a_capture(control: ControlMemory, acknowledger: Any) -> None:
    acknowledger.acknowledge(1, 1, [torch.cuda.Stream()])
    graph, out, streams = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda"), [torch.cuda.Stream() for _ in "ab"]
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out += 1
        stream = next(each for each in streams if each != torch.cuda.current_stream())  # torch hands out 32 in turn
        acknowledger.acknowledge(4, 2, [stream])
        assert eventually(lambda: control.read(4) == 2)
        out += 1
    graph.replay()
    assert out.tolist() == [2.0] * 8


@pytest.mark.parametrize(("slot", "generation"), [(0, 1), (-1, 1), (4096, 1), (1, 0), (1, 2**32)])
def test_what_cannot_be_acknowledged_is_refused(acknowledger: Any, slot: int, generation: int) -> None:
    with pytest.raises(OutOfBounds, match="is not one of 1"):
        acknowledger.acknowledge(slot, generation, [torch.cuda.current_stream()])
    with pytest.raises(OutOfBounds, match="at least one stream"):
        acknowledger.acknowledge(1, 1, [])


def test_closing_waits_for_the_words_and_frees_the_memory(control: ControlMemory, acknowledger: Any) -> None:
    acknowledger.acknowledge(5, 3, [busy_stream()])
    acknowledger.close()
    assert control.read(5) == 3
    acknowledger.close()
    with pytest.raises(OutOfBounds, match="closed"):
        acknowledger.acknowledge(5, 4, [torch.cuda.current_stream()])
    again = cuda.StreamAcknowledger(acknowledger._control, DEVICE)  # the same memory, which is not registered any more
    again.acknowledge(5, 4, [torch.cuda.current_stream()])
    assert eventually(lambda: control.read(5) == 4)
    again.close()


def is_retired() -> bool:
    return eventually(lambda: not any(each.name == "cuda-unregister" for each in threading.enumerate()))


def test_forgetting_it_is_closing_it_without_waiting(control: ControlMemory) -> None:
    client = ControlMemory.attach(control.fd)
    forgotten = cuda.StreamAcknowledger(client, DEVICE)
    stream = busy_stream()
    forgotten.acknowledge(5, 3, [stream])
    del forgotten
    assert not stream.query(), "whoever dropped it waited"
    assert is_retired()
    assert control.read(5) == 3
    cuda.StreamAcknowledger(client, DEVICE).close()


def test_it_may_be_forgotten_in_a_capture(control: ControlMemory) -> None:
    made = [cuda.StreamAcknowledger(ControlMemory.attach(control.fd), DEVICE)]
    made[0].acknowledge(5, 3, [torch.cuda.current_stream()])
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out += 1
        made.clear()
        time.sleep(0.1)
        out += 1
    graph.replay()
    assert out.tolist() == [2.0] * 8
    assert is_retired()


def test_registering_spoils_no_capture_and_changes_no_current_device(control: ControlMemory) -> None:
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out += 1
        made = cuda.StreamAcknowledger(ControlMemory.attach(control.fd), DEVICE)
        with pytest.raises(CudaFailed, match="cuMemHostRegister"):
            cuda.StreamAcknowledger(made._control, DEVICE)  # these pages are locked already
        out += 1
    graph.replay()
    assert out.tolist() == [2.0] * 8, "and torch's next launch knows of no error"
    made.close()


def test_ways_are_counted_and_the_streams_way_does_not_wait(control: ControlMemory) -> None:
    by_stream, by_thread = (
        cuda.StreamAcknowledger(ControlMemory.attach(control.fd), DEVICE, by_stream=way) for way in (True, False)
    )
    for acknowledger in (by_stream, by_thread):
        acknowledger.acknowledge(1, 1, [torch.cuda.current_stream()])
    assert (counts(by_stream), counts(by_thread)) == ((1, 0), (0, 1))
    stream = busy_stream()
    for slot in range(2, 102):
        by_stream.acknowledge(slot, 1, [stream])
    assert not stream.query(), "the host waited"
    time.sleep(0)
    by_stream.close()
    by_thread.close()
    assert control.words[2:102].all()
