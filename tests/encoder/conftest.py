"""Kernels in Triton run on the device if there is one, else under Triton's interpreter, which has to be told first."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
