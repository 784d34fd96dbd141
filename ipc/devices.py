"""How many CUDA devices there are, for a process that wants neither a context on any of them, nor torch."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg")
_COUNT = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
print(0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value)
"""


@functools.cache
def num_devices() -> int:
    """Devices that this process could use: what `CUDA_VISIBLE_DEVICES` hides is not counted. 0 without a driver.

    The driver is asked in a process of its own: even without a context it would keep threads and devices open here.
    """
    if not any(map(os.path.exists, DEVICE_FILES)):
        return 0
    asked = subprocess.run([sys.executable, "-I", "-c", _COUNT], capture_output=True, text=True, check=False)
    return int(asked.stdout) if asked.returncode == 0 else 0
