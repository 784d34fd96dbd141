"""Kernels in Triton run on the device if there is one, else under Triton's interpreter, which has to be told first."""

import os

from tests.conftest import has_cuda

if not has_cuda():
    os.environ["TRITON_INTERPRET"] = "1"
