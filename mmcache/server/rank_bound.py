"""How many patches a rank's batch may have, by the memory that is free beside its weights and its pool."""

from __future__ import annotations

import ctypes
import gc
import time

import torch

from encoder.memory import ActivationMemory, free_device_bytes
from mmcache.server.host_memory import free_host_bytes

LOOK_AGAIN_S = 1.0
"""After memory ran out, the bound follows what is free, looked at this often, until it is what it was."""


def free_bytes(device: torch.device, num_sharing: int, device_bytes: int) -> int | None:
    """Bytes that activations may take; None if nothing limits them.

    `num_sharing`: ranks on the same device or, on a CPU, on this host. `device_bytes`: as the setting.
    """
    if device.type == "cuda":
        return free_device_bytes(device, num_sharing, device_bytes)
    return free_host_bytes(num_sharing)


def return_memory(device: torch.device) -> None:
    """Give what is unused back to the system and the device: allocators keep it for themselves.

    What was dropped, and refers to itself as models and graphs do, is freed first.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


class MemoryBound:
    """Follows the most patches that fit into a batch.

    Attributes:
        max_patches: the bound as of now; 0 for none.
    """

    def __init__(self, device: torch.device, num_sharing: int, device_bytes: int) -> None:
        self._place = (device, num_sharing, device_bytes)
        self._activations: ActivationMemory | None = None
        self._before = 0
        self._is_reduced = False
        self._looked_s = 0.0
        self.max_patches = 0

    def adopt(self, activations: ActivationMemory, max_patches: int) -> None:
        """Batches are of another model from now on, of which so many patches fit."""
        self._activations = activations
        self._before = self.max_patches = max_patches
        self._is_reduced = False

    def failed(self) -> None:
        """Memory ran out, and what the batch took was given back."""
        self._is_reduced = True
        self._look()

    def ran(self) -> None:
        """A batch went well."""
        if self._is_reduced and time.monotonic() - self._looked_s > LOOK_AGAIN_S:
            self._look()
            is_back = not self.max_patches or 0 < self._before <= self.max_patches
            if is_back:
                self.max_patches, self._is_reduced = self._before, False

    def _look(self) -> None:
        assert self._activations is not None, "a batch ran with a model"
        self._looked_s = time.monotonic()
        self.max_patches = bound_of(self._activations, free_bytes(*self._place))


def bound_of(activations: ActivationMemory, free: int | None) -> int:
    """Most patches of a batch in so much memory; 0 if nothing limits it."""
    return 0 if free is None else activations.patches_in(free)
