"""Deferred slices to one encoder input on CUDA: any mix of lengths and dtypes in one launch, without temporaries."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from ipc import cuda_materialize_source as layout
from ipc.cuda_driver import call, compile_cubin, driver, primary_context, relaxed
from ipc.errors import CudaFailed, DeviceUnavailable

DTYPES = {"uint8": torch.uint8, "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
"""What slices may hold, by name."""

_OUTPUTS = {torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16", torch.float32: "FLOAT32"}
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
_OLDEST = (8, 0)


class DeviceSlice(NamedTuple):
    """Rows that somebody staged.

    Attributes:
        data: their bytes, uint8 `[num_rows · width · bytes of a value]`, contiguous, at any address, only read. On the
            device of the output, or pinned on the host, from where the device reads them over its bus.
        dtype: a name of `DTYPES`.
        num_rows: how many there are; a row has as many values as one of the input has.
    """

    data: torch.Tensor
    dtype: str
    num_rows: int


class _Batch:
    """The rows of one launch, as the kernel's table has them, one after another."""

    __slots__ = ("num_tiles", "values")

    def __init__(self) -> None:
        self.num_tiles = 0
        self.values: list[int] = []


class _Arguments(ctypes.Structure):
    """What a launch is passed: a list of one pointer, and the table that it points to."""

    _fields_ = (("pointer", ctypes.c_uint64), ("table", ctypes.c_uint8 * layout.TABLE_BYTES))


_TABLE = _Arguments.table.offset


def materialize(slices: Sequence[DeviceSlice], out: torch.Tensor) -> int:
    """Convert the slices' rows, one slice after another, into `out` `[sum of num_rows, width]`, contiguous, on CUDA.

    Values are those of `.to(out.dtype)` of each slice and `torch.cat`, bit for bit (a NaN stays a NaN). The work is put
    on torch's current stream of `out.device`; the slices' bytes must stay as they are until it is done there. Returns
    the number of launches: one for every 127 slices that are not empty.

    The first call with a device and an output dtype compiles the kernel, in half a second. Raises ValueError if a slice
    or `out` is not as described, with nothing written, and `DeviceUnavailable` on devices older than 8.0.
    """
    if not out.is_cuda or out.dim() != 2 or not out.is_contiguous() or out.dtype not in _OUTPUTS:
        raise ValueError(
            f"out must be contiguous float16, bfloat16 or float32 [rows, width] on CUDA, got {out.dtype} "
            f"{list(out.shape)} on {out.device}"
        )
    batches = _batches(slices, out)
    if batches:
        ordinal = out.get_device()
        kernel = _kernel(ordinal, out.dtype)
        stream = torch._C._cuda_getCurrentRawStream(ordinal)  # what torch's own compiler uses: a tenth of the time
        with primary_context(ordinal):
            for batch in batches:
                _launch(kernel, stream, batch)
    return len(batches)


def _batches(slices: Sequence[DeviceSlice], out: torch.Tensor) -> list[_Batch]:
    ordinal, width, item_bytes = out.get_device(), out.shape[1], out.element_size()
    values_per_tile = layout.GROUP_BYTES // item_bytes * layout.GROUPS_PER_TILE
    target = out.data_ptr()
    end = target + out.nbytes
    batches: list[_Batch] = []
    num_slices = layout.MAX_SLICES
    for index, (data, dtype, num_rows) in enumerate(slices):
        length = num_rows * width
        if data.numel() != length * _ITEM_BYTES.get(dtype, -1) or data.dtype is not torch.uint8 or not _is_flat(data):
            raise _wrong(index, data, dtype, num_rows, width)
        if not length:
            continue
        if num_slices == layout.MAX_SLICES:
            batches.append(batch := _Batch())
            num_slices = 0
        num_slices += 1
        source = data.data_ptr() if data.get_device() == ordinal else _host_address(index, data, out)
        batch.values += (source, target, length, batch.num_tiles, layout.KINDS[dtype])
        batch.num_tiles += -(-(target % layout.GROUP_BYTES // item_bytes + length) // values_per_tile)
        target += length * item_bytes
    if target != end:
        raise ValueError(f"out has {out.shape[0]} rows, the slices have {sum(one.num_rows for one in slices)}")
    return batches


def _launch(kernel: Any, stream: int, batch: _Batch) -> None:
    arguments = _Arguments()
    address = ctypes.addressof(arguments)
    arguments.pointer = address + _TABLE
    num_slices = len(batch.values) // layout.ROW_VALUES
    _packer(num_slices).pack_into(arguments, _TABLE, num_slices, 0, *batch.values)
    call(driver.cuLaunchKernel, kernel, batch.num_tiles, 1, 1, layout.THREADS, 1, 1, 0, stream, address, 0)


@cache
def _packer(num_slices: int) -> struct.Struct:
    return struct.Struct(layout.HEADER_FORMAT + layout.ROW_FORMAT * num_slices)


@cache
def _kernel(ordinal: int, dtype: torch.dtype) -> Any:
    """The function, loaded on the device for good."""
    capability = torch.cuda.get_device_capability(ordinal)
    if capability < _OLDEST:
        raise DeviceUnavailable(f"cuda:{ordinal} has compute capability {capability}; materialize needs {_OLDEST}")
    with primary_context(ordinal), relaxed():
        module = call(driver.cuModuleLoadData, _cubin(capability, dtype))
        return call(driver.cuModuleGetFunction, module, b"convert")


@cache
def _cubin(capability: tuple[int, int], dtype: torch.dtype) -> bytes:
    defined = f"#define OUTPUT {_OUTPUTS[dtype]}\n#define KERNEL convert\n"
    return compile_cubin(defined + layout.SOURCE, "materialize.cu", capability)


def _is_flat(data: torch.Tensor) -> bool:
    return data.stride() == (1,) or (data.dim() == 1 and data.is_contiguous())


def _wrong(index: int, data: torch.Tensor, dtype: str, num_rows: int, width: int) -> ValueError:
    if dtype not in DTYPES:
        return ValueError(f"slice {index}: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    expected = num_rows * width * _ITEM_BYTES[dtype]
    return ValueError(
        f"slice {index}: {num_rows} rows of {width} {dtype} are {expected} contiguous bytes, "
        f"got {data.dtype} {list(data.shape)}"
    )


def _host_address(index: int, data: torch.Tensor, out: torch.Tensor) -> int:
    """Where the device of `out` finds a slice that is not on it."""
    if data.device.type != "cpu":
        raise ValueError(f"slice {index} is on {data.device}, out is on {out.device}")
    with primary_context(out.get_device()):
        try:
            return int(call(driver.cuMemHostGetDevicePointer, data.data_ptr(), 0))
        except CudaFailed as error:
            raise ValueError(f"slice {index}: memory of the host has to be pinned: {error}") from error
