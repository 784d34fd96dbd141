"""The one home of the CUDA driver API and its run-time compiler. Importing it needs cuda-bindings and no device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver

from ipc.errors import CudaFailed, DeviceUnavailable

if TYPE_CHECKING:
    import torch

__all__ = [
    "CAPTURE_ERRORS",
    "OUT_OF_MEMORY",
    "Context",
    "call",
    "compile_cubin",
    "driver",
    "initialise",
    "is_captured",
    "is_capturing",
    "is_event_done",
    "primary_context",
    "relaxed",
]

_SUCCESS = int(driver.CUresult.CUDA_SUCCESS)
OUT_OF_MEMORY = int(driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
CAPTURE_ERRORS = range(
    int(driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
    int(driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD) + 1,
)
"""Codes of calls that are refused, or fail, because a graph is being captured; torch's errors have the same."""


def call(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function of the driver. Returns its one value, or None. Raises `CudaFailed`, which names it."""
    code, *values = function(*arguments)
    if code != _SUCCESS:
        raise CudaFailed(f"{function.__name__}: {_describe(code)}", int(code))
    return values[0] if len(values) == 1 else values or None


def initialise() -> int:
    """Start the driver; makes no context. Returns how many devices are visible, at least one.

    Raises `DeviceUnavailable` where there is no driver or none of its devices is visible.
    """
    try:
        call(driver.cuInit, 0)
        num_devices: int = call(driver.cuDeviceGetCount)
    except (
        CudaFailed,
        RuntimeError,
    ) as error:  # cuda-bindings raises RuntimeError where the driver's library is missing
        raise DeviceUnavailable(f"no CUDA device can be used in this process: {error}") from error
    if not num_devices:
        raise DeviceUnavailable("no CUDA device is visible to this process")
    return num_devices


class Context:
    """A device's primary context, the one torch uses. It is the thread's current one within `with context:`."""

    __slots__ = ("_handle",)

    def __init__(self, ordinal: int) -> None:
        """Makes the context if the process has none on that device, and keeps it for good. Use `primary_context`."""
        self._handle = call(driver.cuDevicePrimaryCtxRetain, call(driver.cuDeviceGet, ordinal))

    def __enter__(self) -> None:
        call(driver.cuCtxPushCurrent, self._handle)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        call(driver.cuCtxPopCurrent)


@cache
def primary_context(ordinal: int) -> Context:
    """The primary context of the visible device `ordinal`."""
    initialise()
    return Context(ordinal)


@contextmanager
def relaxed() -> Iterator[None]:
    """Calls that allocate or map would spoil a graph capture of another thread; within this they do not."""
    mode = call(driver.cuThreadExchangeStreamCaptureMode, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        call(driver.cuThreadExchangeStreamCaptureMode, mode)


def is_capturing(stream: int) -> bool:
    """Whether the stream, of the current context, is being captured into a graph, or cannot be used because one is."""
    code, status = driver.cuStreamIsCapturing(stream)
    if code == driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
        return True
    if code != _SUCCESS:
        raise CudaFailed(f"cuStreamIsCapturing: {_describe(code)}", int(code))
    return bool(status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


def is_captured(stream: torch.cuda.Stream) -> bool:
    """The same of torch's stream, whatever context is current."""
    with primary_context(stream.device_index):
        return is_capturing(stream.cuda_stream)


def is_event_done(event: int) -> bool:
    """Whether the work that an event of the current context stands for is done; False while a capture forbids to look.

    Raises `CudaFailed` if the device failed.
    """
    (code,) = driver.cuEventQuery(event)
    if code == _SUCCESS:
        return True
    if code == driver.CUresult.CUDA_ERROR_NOT_READY or int(code) in CAPTURE_ERRORS:
        return False
    raise CudaFailed(f"cuEventQuery: {_describe(code)}", int(code))


def compile_cubin(source: str, name: str, capability: tuple[int, int]) -> bytes:
    """CUDA C++ to machine code for devices of that compute capability. Raises `CudaFailed` with the compiler's log."""
    from cuda.bindings import nvrtc

    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode(), b"--std=c++17"]
    code, program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], [])
    if code == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CudaFailed(f"{name} cannot be compiled for {options[0].decode()}: {_log(nvrtc, program)}", int(code))
    _, nbytes = nvrtc.nvrtcGetCUBINSize(program)
    cubin = bytes(nbytes)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


def _log(nvrtc: Any, program: object) -> str:
    _, nbytes = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytes(nbytes)
    nvrtc.nvrtcGetProgramLog(program, log)
    return log.rstrip(b"\0").decode(errors="replace")


def _describe(code: Any) -> str:
    _, name = driver.cuGetErrorName(code)
    _, text = driver.cuGetErrorString(code)
    return f"{name.decode()}, {text.decode()}" if name and text else f"error {int(code)}"
