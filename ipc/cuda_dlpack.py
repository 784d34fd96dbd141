"""Memory as tensors whose storage keeps its owners alive, on a device that the caller names.

Torch takes such memory over by DLPack: a record with an address, a device and a function that torch calls once, from
whatever thread drops the last tensor. Given a plain pointer torch would infer the device, which is wrong for memory
that one device maps of another.
"""

from __future__ import annotations

import atexit
import ctypes
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from torch.utils.dlpack import from_dlpack

if TYPE_CHECKING:
    import torch

CPU = 1
CUDA = 2


class Type(NamedTuple):
    """A type of values, as DLPack says it."""

    code: int
    num_bits: int


TYPES = {"uint8": Type(1, 8), "float16": Type(2, 16), "float32": Type(2, 32), "bfloat16": Type(4, 16)}
"""By the names that torch has for them."""


class _Managed(ctypes.Structure):
    """DLManagedTensor of two dimensions, contiguous, followed by what its shape points to."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_columns", ctypes.c_int64),
    )


_SHAPE = _Managed.num_rows.offset
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_NEW_CAPSULE = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class _Exports:
    """The records that torch holds, with their owners.

    Torch may drop a tensor after the interpreter is gone, when no Python may run. So nothing is called back once the
    interpreter begins to exit, and neither the records nor the function they name are ever freed after that.
    """

    def __init__(self) -> None:
        self._live: dict[int, tuple[_Managed, object]] = {}
        self._function = _DELETER(self._live.pop)
        self._deleter = ctypes.cast(self._function, ctypes.c_void_p).value
        self._new_capsule = _NEW_CAPSULE(("PyCapsule_New", ctypes.pythonapi))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        atexit.register(self._disarm)

    def wrap(
        self, address: int, shape: tuple[int, int], dtype: str, device_type: int, device_id: int, owner: object
    ) -> torch.Tensor:
        code, num_bits = TYPES[dtype]
        record = _Managed(address, device_type, device_id, 2, code, num_bits, 1, 0, 0, 0, 0, self._deleter, *shape)
        key = ctypes.addressof(record)
        record.shape = key + _SHAPE
        self._live[key] = (record, owner)
        try:
            tensor: torch.Tensor = from_dlpack(self._new_capsule(key, b"dltensor", None))
        except BaseException:
            self._live.pop(key, None)
            raise
        return tensor

    def _disarm(self) -> None:
        self._deleter = None
        for record, _ in list(self._live.values()):
            record.deleter = None


@cache
def _exports() -> _Exports:
    return _Exports()


def wrap(
    address: int, shape: tuple[int, int], dtype: str, device_type: int, device_id: int, owner: object
) -> torch.Tensor:
    """A contiguous tensor over memory at `address` on the device (`CPU` or `CUDA`, and its ordinal), without a copy.

    `dtype`: a name of `TYPES`.

    Its storage keeps `owner`, and loses it when the last tensor that shares the storage dies: in whatever thread that
    happens, and never while the interpreter exits.
    """
    return _exports().wrap(address, shape, dtype, device_type, device_id, owner)
