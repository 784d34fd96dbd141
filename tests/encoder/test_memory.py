"""What an encode takes of memory: the arithmetic against what torch's allocator was asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from encoder.config import EncoderConfig, ProcessorConfig
from encoder.memory import ActivationMemory, is_out_of_memory, measure_activations, predict_activations
from encoder.model import Encoder
from encoder.moonvit import MoonViT
from encoder.sizing import grid_thw, num_patches, num_tokens

SHAPES = [
    EncoderConfig(hidden_size=128, num_layers=2, num_heads=4, mlp_size=512, text_width=256),
    EncoderConfig(hidden_size=128, num_layers=1, num_heads=4, mlp_size=128, text_width=256),
    EncoderConfig(hidden_size=256, num_layers=1, num_heads=4, mlp_size=128, text_width=64),
]


def encoder_of(config: EncoderConfig, dtype: torch.dtype) -> Encoder:
    model = MoonViT(config).to(dtype)
    for parameter in model.parameters():
        parameter.data.normal_()
    return Encoder(model, ProcessorConfig())


def peak_bytes(encoder: Encoder, side: int, num_items: int) -> tuple[int, int]:
    """Patches of a batch of squares, and the most bytes that torch had given out at one time while it was encoded."""
    grid = grid_thw(side, side, encoder.processor)
    tokens, width = num_tokens(grid, encoder.config.merge_size), encoder.config.text_width
    outs = [torch.empty(tokens, width, dtype=encoder.dtype) for _ in range(num_items)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        encoder.encode([np.zeros((side, side, 3), np.uint8)] * num_items, outs)
    assert seen.profiler is not None
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    taken = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return num_items * num_patches(grid), int(taken.max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", SHAPES, ids=["wide MLP", "narrow MLP", "wide projector"])
def test_the_arithmetic_is_not_less_than_what_is_taken_and_not_much_more(
    config: EncoderConfig, dtype: torch.dtype
) -> None:
    encoder, predicted = encoder_of(config, dtype), predict_activations(config, dtype)
    for side, num_items in ((896, 1), (448, 4)):
        patches, taken = peak_bytes(encoder, side, num_items)
        bound = predicted.fixed_bytes + patches * predicted.bytes_per_patch
        assert taken <= bound <= 1.3 * taken


def test_what_fits() -> None:
    memory = ActivationMemory(fixed_bytes=1000, bytes_per_patch=10)
    assert memory.patches_in(23_000) == 1900, "a part is left for what an allocator cannot use"
    assert memory.patches_in(0) == 1, "an item has to be tried"
    assert memory.scaled(2.0) == ActivationMemory(2000, 20)


def test_what_says_that_memory_ran_out() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(1 << 50)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(1 << 50)
    assert is_out_of_memory(of_torch.value)
    assert is_out_of_memory(of_numpy.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("DefaultCPUAllocator: can't allocate memory"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_measured_on_a_device_holds_for_larger_batches(dtype: torch.dtype) -> None:
    encoder = Encoder.load("moonvit-tiny", device="cuda", dtype=dtype)
    encoder.warm_up()
    found = measure_activations(encoder)
    for side, num_items in ((1792, 1), (448, 16), (56, 1000)):
        grid = grid_thw(side, side, encoder.processor)
        shape = (num_tokens(grid, encoder.config.merge_size), encoder.config.text_width)
        outs = [torch.empty(shape, dtype=dtype, device="cuda") for _ in range(num_items)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        encoder.encode([np.zeros((side, side, 3), np.uint8)] * num_items, outs)
        taken = torch.cuda.max_memory_allocated() - before
        bound = found.fixed_bytes + num_items * num_patches(grid) * found.bytes_per_patch
        assert 0.5 * bound <= taken <= 1.15 * bound, (side, num_items, taken, bound)
