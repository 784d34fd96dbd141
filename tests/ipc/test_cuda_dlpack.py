"""Tensors that keep their owners: on memory of the host, where the same code runs."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch

from ipc.cuda_dlpack import CPU, wrap
from tests.ipc.cuda_processes import ROOT


class Owner:
    """Something to be kept."""


def wrapped(owner: object, nbytes: int = 256) -> tuple[torch.Tensor, np.ndarray]:
    memory = np.arange(nbytes, dtype=np.uint8)
    return wrap(memory.ctypes.data, (1, nbytes), "uint8", CPU, 0, (memory, owner))[0], memory


def test_a_tensor_is_the_memory_itself() -> None:
    tensor, memory = wrapped(None)
    assert (tensor.dtype, tensor.shape, tensor.is_contiguous()) == (torch.uint8, (256,), True)
    assert tensor.untyped_storage().nbytes() == 256
    assert tensor.data_ptr() == memory.ctypes.data
    tensor[3] = 77
    assert memory[3] == 77
    assert tensor.view(torch.float32).view(4, 16)[1:].shape == (3, 16)


def test_the_owner_goes_with_the_last_view() -> None:
    owner = Owner()
    gone = weakref.ref(owner)
    tensor, _ = wrapped(owner)
    del owner
    last = tensor[8:].view(torch.int32).view(2, 31)[1]
    storage = tensor.untyped_storage()
    del tensor
    gc.collect()
    assert gone() is not None
    del last
    assert gone() is not None
    del storage
    assert gone() is None


def test_an_empty_tensor_keeps_its_owner_too() -> None:
    owner = Owner()
    gone = weakref.ref(owner)
    tensor, _ = wrapped(owner, 0)
    del owner
    assert tensor.numel() == 0
    assert gone() is not None
    del tensor
    assert gone() is None


def test_the_last_view_may_die_in_another_thread_or_in_a_cycle() -> None:
    owners = [Owner(), Owner()]
    gone = [weakref.ref(owner) for owner in owners]
    held = [wrapped(owner)[0] for owner in owners]
    owners.clear()
    thread = threading.Thread(target=held.pop)
    thread.start()
    thread.join()
    assert [ref() is None for ref in gone] == [False, True]
    cycle: list[object] = [held.pop()]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert gone[0]() is None


def test_autograd_may_hold_the_last_view() -> None:
    owner = Owner()
    gone = weakref.ref(owner)
    tensor, _ = wrapped(owner)
    del owner
    weight = torch.ones(64, requires_grad=True)
    loss = (tensor.view(torch.float32) * weight).sum()
    del tensor
    gc.collect()
    assert gone() is not None
    loss.backward()
    del loss
    assert gone() is None


EXIT = """
import gc, sys, threading
import numpy as np, torch
from ipc.cuda_dlpack import CPU, wrap
class Owner:
    def __del__(self):
        print("dropped", flush=True)
memory = np.zeros(64, np.uint8)
def tensor():
    return wrap(memory.ctypes.data, (1, 64), "uint8", CPU, 0, Owner())
gc.disable()
torch.left = tensor()
here = tensor()
cycle = [tensor()]; cycle.append(cycle)
weight = torch.ones(64, requires_grad=True)
torch.graph = (tensor() * weight).sum()
threading.Thread(target=lambda view: threading.Event().wait(), args=[tensor()], daemon=True).start()
if sys.argv[1] == "late":
    import atexit
    atexit._run_exitfuncs()
    after = tensor()
    del after, here
"""


@pytest.mark.parametrize("when", ["now", "late"])
def test_tensors_that_outlive_the_interpreter_call_nothing_back(when: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT, when], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "bfloat16"])
def test_types_and_shapes(dtype: str) -> None:
    memory = np.random.default_rng(3).integers(0, 256, 4096, np.uint8)
    torch_type = getattr(torch, dtype)
    shape = (4, 1024 // torch_type.itemsize)
    tensor = wrap(memory.ctypes.data, shape, dtype, CPU, 0, memory)
    assert (tensor.dtype, tuple(tensor.shape), tensor.is_contiguous()) == (torch_type, shape, True)
    assert torch.equal(tensor.view(torch.uint8).flatten(), torch.from_numpy(memory))
    assert wrap(memory.ctypes.data, (0, 8), dtype, CPU, 0, memory).shape == (0, 8)
