"""What a driver and torch's streams do, as far as acknowledgements need it: for tests of what no device has to show.

`installed` puts it where cuda-bindings would be, so that the modules of ipc run as they are. Work of a stream is done
when `arrive` is called; until then what it is to write is not written.
"""

# ruff: noqa: N802
from __future__ import annotations

import ctypes
import enum
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ipc.cuda_devices import VisibleDevice

MODULES = (
    "control_cuda", "cuda_driver", "cuda_host", "cuda_mapping", "cuda_waiting", "materialize_cuda", "memory_cuda",
)  # fmt: skip


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908


class Named(type):
    """Every constant is there, and is its own name."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("CU_"):
            return name
        raise AttributeError(name)


class Constants(metaclass=Named):
    """An enumeration whose values do not matter."""


class Event:
    """Of work that is done once a driver says so."""

    numbers = itertools.count(1)

    def __init__(self) -> None:
        self.cuda_event = next(self.numbers)


class Stream:
    """As torch has it."""

    def __init__(self, cuda_stream: int, device_index: int = 0) -> None:
        self.cuda_stream = cuda_stream
        self.device_index = device_index
        self.waits_for: list[Event] = []
        self.recorded: list[Event] = []

    def record_event(self) -> Event:
        self.recorded.append(Event())
        return self.recorded[-1]

    def wait_event(self, event: Event) -> None:
        self.waits_for.append(event)


class Driver(types.ModuleType):
    """The functions that are called, and what a test sets and sees.

    Attributes:
        capturing: numbers of streams that are being captured.
        written: (stream, address, value) of words that are queued.
        on_write: called before each is queued.
        write_code, register_code, synchronize_codes, event_codes: what calls return, besides success; by event.
        registered: addresses of host memory that is locked; registrations: the contexts in which it was, and the mode.
        owner: the device whose memory any descriptor is.
    """

    CUstreamCaptureMode = CUmemAllocationHandleType = CUdevice_attribute = CUstreamCaptureStatus = Constants
    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.CUresult = CUresult
        self.capturing: set[int] = set()
        self.written: list[tuple[int, int, int]] = []
        self.on_write: Callable[[], object] = lambda: None
        self.on_register: Callable[[], object] = lambda: None
        self.write_code = self.register_code = CUresult.CUDA_SUCCESS
        self.synchronize_codes: list[CUresult] = []
        self.event_codes: dict[int, CUresult] = {}
        self.query_contexts: list[int | None] = []
        self.registered: set[int] = set()
        self.registrations: list[tuple[int | None, object]] = []
        self.owner = 0
        self.has_stream_writes = True
        self.here = threading.local()

    def arrive(self) -> None:
        """All streams get to the end of what is queued on them."""
        while self.written:
            _, address, value = self.written.pop()
            ctypes.c_uint32.from_address(address).value = value

    @property
    def contexts(self) -> list[int]:
        """The calling thread's, the current one last."""
        if not hasattr(self.here, "contexts"):
            self.here.contexts, self.here.mode = [], "CU_STREAM_CAPTURE_MODE_GLOBAL"
        found: list[int] = self.here.contexts
        return found

    @property
    def context(self) -> int | None:
        return self.contexts[-1] if self.contexts else None

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (CUresult.CUDA_SUCCESS,)

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, 4

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, ordinal

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, device

    def cuCtxPushCurrent(self, context: int) -> tuple[Any, ...]:
        self.contexts.append(context)
        return (CUresult.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, self.contexts.pop()

    def cuThreadExchangeStreamCaptureMode(self, mode: object) -> tuple[Any, ...]:
        _ = self.contexts
        self.here.mode, before = mode, self.here.mode
        return CUresult.CUDA_SUCCESS, before

    def cuDeviceGetAttribute(self, attribute: object, device: int) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, self.has_stream_writes

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[Any, ...]:
        self.on_register()
        if self.register_code != CUresult.CUDA_SUCCESS:
            return (self.register_code,)
        if address in self.registered:
            return (CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,)
        self.registered.add(address)
        self.registrations.append((self.context, self.here.mode))
        return (CUresult.CUDA_SUCCESS,)

    def cuMemHostUnregister(self, address: int) -> tuple[Any, ...]:
        self.registered.remove(address)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, address

    def cuMemImportFromShareableHandle(self, fd: int, kind: object) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, "handle"

    def cuMemGetAllocationPropertiesFromHandle(self, handle: object) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, types.SimpleNamespace(location=types.SimpleNamespace(id=self.owner))

    def cuMemRelease(self, handle: object) -> tuple[Any, ...]:
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamIsCapturing(self, stream: int) -> tuple[Any, ...]:
        is_captured = stream in self.capturing
        return CUresult.CUDA_SUCCESS, f"CU_STREAM_CAPTURE_STATUS_{'ACTIVE' if is_captured else 'NONE'}"

    def cuStreamWriteValue32(self, stream: int, address: int, value: int, flags: int) -> tuple[Any, ...]:
        self.on_write()
        if self.write_code == CUresult.CUDA_SUCCESS:
            self.written.append((stream, address, value))
        return (self.write_code,)

    def cuEventQuery(self, event: int) -> tuple[Any, ...]:
        self.query_contexts.append(self.context)
        return (self.event_codes.get(event, CUresult.CUDA_SUCCESS),)

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        if self.synchronize_codes:
            return (self.synchronize_codes.pop(0),)
        self.arrive()
        return (CUresult.CUDA_SUCCESS,)

    def cuGetErrorName(self, code: CUresult) -> tuple[Any, ...]:
        return 0, CUresult(code).name.encode()

    def cuGetErrorString(self, code: CUresult) -> tuple[Any, ...]:
        return 0, b"as a test wants it"

    def current_stream(self, device: torch.device | int | None = None) -> Stream:
        """What the calling thread queues work on; a default stream of the device, unless it is in `stream`."""
        ordinal = (device if isinstance(device, int) else device.index if device is not None else 0) or 0
        stream: Stream = getattr(self.here, "stream", None) or Stream(1000 + ordinal, ordinal)
        return stream

    def current_device(self) -> int:
        """Of the calling thread: that of the stream that it is in."""
        return self.current_stream().device_index

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.here.stream = getattr(self.here, "stream", None), stream
        try:
            yield
        finally:
            self.here.stream = before

    def is_current_stream_capturing(self) -> bool:
        return self.current_stream().cuda_stream in self.capturing


def machine() -> tuple[VisibleDevice, ...]:
    """Four devices, of which the last is reached by none of the others."""
    names = ("aaaa", "bbbb", "cccc", "dddd")
    return tuple(
        VisibleDevice(
            ordinal, name, "NVIDIA X", True, True, frozenset(names[:3]) - {name} if ordinal < 3 else frozenset()
        )
        for ordinal, name in enumerate(names)
    )


@contextmanager
def installed() -> Iterator[Driver]:
    """In the place of cuda-bindings, and of torch's streams."""
    with pytest.MonkeyPatch.context() as patch:
        driver, bindings, cuda = Driver(), types.ModuleType("cuda.bindings"), types.ModuleType("cuda")
        bindings.driver, cuda.bindings = driver, bindings  # type: ignore[attr-defined]
        for name in MODULES:
            patch.delitem(sys.modules, f"ipc.{name}", raising=False)
        for module in (cuda, bindings, driver):
            patch.setitem(sys.modules, module.__name__, module)
        for name in ("current_device", "current_stream", "stream", "is_current_stream_capturing"):
            patch.setattr(torch.cuda, name, getattr(driver, name))
        try:
            yield driver
        finally:
            for name in MODULES:
                sys.modules.pop(f"ipc.{name}", None)
