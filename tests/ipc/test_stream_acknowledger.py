"""Acknowledgements in stream order, against a driver that stands in: what refuses them, and what comes in between."""

from __future__ import annotations

import gc
import importlib
import itertools
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from ipc.control import ControlMemory
from ipc.errors import CapturingError, CudaFailed, DeviceUnavailable, MemoryUnavailable
from tests.ipc.cuda_processes import eventually
from tests.stand_in_driver import CUresult, Driver, Stream, machine

DEVICE = torch.device("cuda", 2)


@pytest.fixture
def control() -> Iterator[ControlMemory]:
    memory = ControlMemory.create(64)
    yield memory
    assert eventually(lambda: not threads("cuda-"))
    gc.collect()
    memory.close()


def threads(prefix: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]


def made(control: ControlMemory, **options: bool) -> Any:
    return importlib.import_module("ipc.control_cuda").StreamAcknowledger(control, DEVICE, **options)


def test_memory_is_registered_on_its_device_and_spoils_no_capture(driver: Driver, control: ControlMemory) -> None:
    acknowledger = made(control)
    assert driver.registrations == [(2, "CU_STREAM_CAPTURE_MODE_RELAXED")]
    acknowledger.close()
    assert not driver.registered


def test_a_finalizer_may_acknowledge_in_the_middle_of_an_acknowledgement(
    driver: Driver, control: ControlMemory
) -> None:
    acknowledger = made(control)

    def collected() -> None:
        driver.on_write = lambda: None
        acknowledger.acknowledge(2, 6, [Stream(8, 2)])

    driver.on_write = collected
    acknowledger.acknowledge(1, 5, [Stream(7, 2)])
    assert sorted(value for _, _, value in driver.written) == [5, 6]
    driver.arrive()
    assert control.words[:3].tolist() == [0, 5, 6]
    acknowledger.close()


@pytest.mark.parametrize("method", ["record_event", "wait_event"])
def test_an_event_that_cannot_be_recorded_or_waited_for_is_a_failure_of_the_device(
    driver: Driver, control: ControlMemory, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    acknowledger = made(control)
    first, other = Stream(7, 2), Stream(8, 2)

    class Failed(RuntimeError):
        error_code = 700

    def failed(*_: object) -> None:
        raise Failed("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(other if method == "record_event" else first, method, failed)
    with pytest.raises(CudaFailed, match="illegal") as caught:
        acknowledger.acknowledge(1, 5, [first, other])
    assert caught.value.code == 700
    Failed.error_code = 906
    with pytest.raises(CapturingError, match="captured"):
        acknowledger.acknowledge(1, 5, [first, other])
    assert not driver.written
    acknowledger.close()


def test_memory_that_is_on_another_device_than_was_said_is_refused(driver: Driver) -> None:
    reader = importlib.import_module("ipc.memory_cuda").DeviceReader
    driver.owner = 1
    with pytest.raises(MemoryUnavailable, match="descriptor 7 is on device bbbb, not on aaaa"):
        reader.attach(7, 1 << 21, "aaaa", visible=machine())
    with pytest.raises(DeviceUnavailable, match=r"cuda:3 has no peer access to .*bbbb"):
        reader.attach(7, 1 << 21, "bbbb", 3, visible=machine())


@pytest.mark.parametrize(("code", "kind"), [(700, CudaFailed), (900, CapturingError)])
def test_a_word_that_cannot_be_queued_says_why(
    driver: Driver, control: ControlMemory, code: int, kind: type[Exception]
) -> None:
    acknowledger = made(control)
    driver.write_code = CUresult(code)
    with pytest.raises(kind, match="cuStreamWriteValue32"):
        acknowledger.acknowledge(1, 5, [Stream(7, 2)])
    assert acknowledger.num_stream_writes == 0
    acknowledger.close()


def test_dropping_it_waits_for_nothing_and_its_thread_for_a_capture(driver: Driver, control: ControlMemory) -> None:
    acknowledger = made(control)
    acknowledger.acknowledge(1, 5, [Stream(7, 2)])
    driver.capturing.add(driver.current_stream(2).cuda_stream)  # by this very thread
    del acknowledger
    assert threads("cuda-unregister")
    assert driver.registered
    driver.synchronize_codes = [CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED] * 2  # somebody else's
    driver.capturing.clear()
    assert eventually(lambda: not driver.registered)
    assert not driver.synchronize_codes


def test_a_device_that_failed_ends_the_thread_that_gives_memory_back(
    driver: Driver, control: ControlMemory, recwarn: pytest.WarningsRecorder
) -> None:
    acknowledger = made(control)
    acknowledger.acknowledge(1, 5, [Stream(7, 2)])
    driver.synchronize_codes = [CUresult.CUDA_ERROR_ILLEGAL_ADDRESS]
    del acknowledger
    assert eventually(lambda: not threads("cuda-"))
    assert not [warning for warning in recwarn if "cuda-unregister" in str(warning.message)]


def test_events_are_looked_at_in_the_context_of_their_device(driver: Driver, control: ControlMemory) -> None:
    acknowledger = made(control, by_stream=False)
    streams = [Stream(7, 2), Stream(8, 2), Stream(9, 1)]
    for slot, stream in enumerate(streams, start=1):
        acknowledger.acknowledge(slot, 5, [stream])
    assert eventually(lambda: control.words[1:4].tolist() == [5, 5, 5])
    assert {1, 2} == set(driver.query_contexts)
    acknowledger.close()
    assert not threads("cuda-acknowledge")


def test_words_of_a_device_that_failed_are_never_stored(
    driver: Driver, control: ControlMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    acknowledger = made(control, by_stream=False)
    failed, captured, plain = Stream(7, 2), Stream(8, 2), Stream(9, 2)
    codes = {failed: CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, captured: CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED}
    for stream, code in codes.items():
        event = stream.record_event()
        monkeypatch.setattr(stream, "record_event", partial(next, itertools.repeat(event)))
        driver.event_codes[event.cuda_event] = code
    for slot, stream in enumerate((failed, captured, plain), start=1):
        acknowledger.acknowledge(slot, 5, [stream])
    assert eventually(lambda: control.read(3) == 5)
    assert control.words[:3].tolist() == [0, 0, 0]
    driver.event_codes = {event: code for event, code in driver.event_codes.items() if code < 900}
    assert eventually(lambda: control.read(2) == 5)
    acknowledger.close()
    assert control.read(1) == 0


def test_a_dropped_one_stores_what_it_has_and_leaves_no_thread(driver: Driver, control: ControlMemory) -> None:
    acknowledger = made(control, by_stream=False)
    acknowledger.acknowledge(1, 5, [Stream(7, 2)])
    del acknowledger
    assert eventually(lambda: not threads("cuda-"))
    assert control.read(1) == 5
    assert not driver.registered
