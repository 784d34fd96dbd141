"""What a forward takes of memory beside the weights, so that a batch can be bounded by the memory that there is."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from encoder.config import EncoderConfig
from encoder.model import Encoder
from encoder.sizing import grid_thw, num_patches, num_tokens

SMALL_SIDE_TILES: Final = 8
LARGE_SIDE_TILES: Final = 32
"""Sides of the two square images that are measured, in tiles: 256 and 4096 patches of the usual sizes."""
THREAD_BYTES: Final = 64 << 10
"""What attention on a CPU takes for each thread, beside its output: 45 KB were seen with heads of 32."""
MARGIN: Final = 1.15
"""For what an allocator rounds up, and what it cannot join again."""


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """Most bytes that an encode takes at one time beside the weights and its outputs: fixed, and for each patch.

    It is linear in the patches of a batch, however they are divided among items: attention makes no mask.
    """

    fixed_bytes: int
    bytes_per_patch: int

    def patches_in(self, free_bytes: int) -> int:
        """Return how many patches a batch may have in so much memory; at least 1, since an item has to be tried."""
        return max(1, int((free_bytes / MARGIN - self.fixed_bytes) / self.bytes_per_patch))

    def scaled(self, factor: float) -> "ActivationMemory":
        """Return what a model takes whose activations are so many times as large."""
        return ActivationMemory(int(self.fixed_bytes * factor), max(1, int(self.bytes_per_patch * factor)))


def measure_activations(encoder: Encoder) -> ActivationMemory:
    """Return what the encoder takes: measured on CUDA, by two encodes; by `predict_activations` on a CPU.

    Nothing else may use the device from this process meanwhile. Raises `torch.OutOfMemoryError` if not even a small
    image fits.
    """
    if encoder.device.type != "cuda":
        return predict_activations(encoder.config, encoder.dtype)
    side = LARGE_SIDE_TILES
    small_patches, small_bytes = _measured(encoder, SMALL_SIDE_TILES)
    while side > SMALL_SIDE_TILES:
        try:
            large_patches, large_bytes = _measured(encoder, side)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            side //= 2
            continue
        slope = max(1, -(-(large_bytes - small_bytes) // (large_patches - small_patches)))
        return ActivationMemory(max(0, small_bytes - slope * small_patches), slope)
    return ActivationMemory(0, -(-small_bytes // small_patches))


def predict_activations(config: EncoderConfig, dtype: torch.dtype) -> ActivationMemory:
    """Return what a forward takes by the sizes of the tensors that are alive at its widest place.

    That is in the preparation of the rows, in a block's attention, in its MLP, or in the projector; the rows and the
    plan of the pack stay until the end. Attention on a CPU takes a fixed amount a thread beside its output.
    """
    item, hidden, is_narrow = dtype.itemsize, config.hidden_size, dtype != torch.float32
    prepared = config.patch_values * (1 + 4 + item * is_narrow)
    kept = config.patch_values * item + _PLAN_BYTES + 8 * (config.head_dim // 2)
    positions = hidden * (item + 4 + item * is_narrow)
    attention = hidden * (5 * item + max(2 * item, 2 * 4 * is_narrow))
    mlp = 2 * (hidden + config.mlp_size) * item
    projector = 5 * hidden * item + (hidden * 4 if is_narrow else 0)
    table_bytes = config.pos_height * config.pos_width * hidden * 4 * is_narrow
    fixed = table_bytes + torch.get_num_threads() * THREAD_BYTES
    return ActivationMemory(fixed, max(prepared, kept + max(positions, attention, mlp, projector)))


_PLAN_BYTES: Final = 16 * (8 + 4) + 2 * 8
"""Of a patch's taps into the position table, its frame and its place; its rotation is beside that."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out: Python's own, a device's, or that of torch's CPU allocator."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)


_SIGNS: Final = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def free_device_bytes(device: torch.device, num_sharing: int, limit_bytes: int) -> int:
    """Return what this process may still allocate on a CUDA device for activations.

    `num_sharing`: processes that share what is free there equally. `limit_bytes`: most that this one may have in all;
    0 for no limit.
    """
    free, _ = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    free = free // num_sharing + torch.cuda.memory_reserved(device) - allocated
    return max(0, min(free, limit_bytes - allocated) if limit_bytes else free)


def _measured(encoder: Encoder, side_tiles: int) -> tuple[int, int]:
    """Patches of a square image, and the most bytes that its encode takes."""
    side = side_tiles * encoder.processor.tile
    grid = grid_thw(side, side, encoder.processor)
    tokens = num_tokens(grid, encoder.config.merge_size)
    out = torch.empty(tokens, encoder.config.text_width, dtype=encoder.dtype, device=encoder.device)
    torch.cuda.synchronize(encoder.device)
    torch.cuda.reset_peak_memory_stats(encoder.device)
    before = torch.cuda.memory_allocated(encoder.device)
    encoder.encode([np.zeros((side, side, 3), np.uint8)], [out])
    return num_patches(grid), torch.cuda.max_memory_allocated(encoder.device) - before
