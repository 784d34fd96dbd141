"""How fast a device encodes: a short measurement, and the cost model that fits it."""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch

from encoder.config import NUMERICS_VERSION, EncoderConfig
from encoder.least_squares import Moments
from encoder.model import Encoder
from encoder.preprocess import Pixels
from encoder.sharding import CostModel, attention_flops_per_patch_squared, linear_flops_per_patch
from encoder.sizing import grid_thw, num_patches, num_tokens

CALIBRATION_VERSION: Final = 1
"""Raised when what is measured, or what it is fitted to, changes: what was kept before is of no use then."""

BUDGET_S: Final = {"cuda": 1.5, "cpu": 0.8}
"""A batch is left out if all of them might take longer together. The first `MIN_BATCHES` are measured however long."""
MIN_BATCHES: Final = 2
MAX_ROUNDS: Final = 8

BATCHES: Final = ((1, 1), (4, 1), (8, 1), (4, 8), (16, 1), (4, 32), (8, 8), (32, 1), (16, 8), (50, 1), (64, 1))
"""Side of square images in tiles (of 2 x 2 patches in MoonViT), and how many of them, by growing work."""

ATTENTION_SHARE: Final = 0.2
"""Least part of the arithmetic that attention has in the largest image, if its speed is to be told from the rest's."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A batch by its items' patches, and the shortest time that it took."""

    patches: tuple[int, ...]
    seconds: float


def calibrate(encoder: Encoder, budget_s: float | None = None) -> CostModel:
    """Encode a few batches of one and of many images and fit the cost model to what they took.

    Takes `budget_s` at most if the device is fast enough to measure two batches in it, by default 1.5 s on CUDA and
    0.8 s on a CPU. The encoder is warm. Nothing that was measured leaves device memory reserved.
    """
    budget = BUDGET_S[encoder.device.type] if budget_s is None else budget_s
    measured = measure(encoder, budget)
    if encoder.device.type == "cuda":
        torch.cuda.empty_cache()
    return fit(encoder.config, measured, encoder.num_at_once)


def conditions(encoder: Encoder) -> str:
    """Return one line of all that decides how fast an encoder is; equal lines have no need of two calibrations."""
    if encoder.device.type == "cuda":
        properties = torch.cuda.get_device_properties(encoder.device)
        device = f"{properties.name} {properties.multi_processor_count} {properties.total_memory}"
    else:
        device = f"{_processor_name()} {torch.backends.cpu.get_cpu_capability()}"
    acceleration = f"{encoder.acceleration.attention} {encoder.acceleration.num_graphs > 0}"
    how = f"{encoder.dtype} {encoder.is_deterministic} {torch.get_num_threads()} {acceleration}"
    versions = f"{CALIBRATION_VERSION} {NUMERICS_VERSION} {torch.__version__}"
    return f"{versions} {device} {how} {encoder.config.canonical()}"


def measure(encoder: Encoder, budget_s: float) -> list[Measured]:
    """Time batches of growing work as long as the budget lasts, then all again and again, and keep the shortest times.

    Going round, not one after the other, so that what disturbs a moment disturbs no batch every time. A batch that the
    device has no memory for is the last, and left out. Raises what torch does if that is among the first two.
    """
    ends_s = time.perf_counter() + budget_s
    found: list[Measured] = []
    for side, count in BATCHES:
        grid = grid_thw(side * encoder.processor.tile, side * encoder.processor.tile, encoder.processor)
        patches = (num_patches(grid),) * count
        # Twice: the first run of a shape may have something to set up.
        a_round_s = _foreseen(encoder.config, found, patches) + sum(batch.seconds for batch in found)
        if len(found) >= MIN_BATCHES and time.perf_counter() + 2 * a_round_s > ends_s:
            break
        try:
            found.append(Measured(patches, _seconds(encoder, side, count)))
        except torch.OutOfMemoryError:
            if len(found) < MIN_BATCHES:
                raise
            break
    for _ in range(MAX_ROUNDS - 1):
        for place, ((side, count), batch) in enumerate(zip(BATCHES, found, strict=False)):
            if time.perf_counter() + batch.seconds > ends_s:
                return found
            found[place] = replace(batch, seconds=min(batch.seconds, _seconds(encoder, side, count)))
    return found


def _foreseen(config: EncoderConfig, found: Sequence[Measured], patches: Sequence[int]) -> float:
    """Seconds of a batch, by the last that was measured and what each operation took beyond the first."""
    if not found:
        return 0.0
    first_flops, last_flops, flops = (_flops(config, of) for of in (found[0].patches, found[-1].patches, patches))
    if len(found) == 1:
        return found[0].seconds * flops / first_flops
    per_flop = max(0.0, found[-1].seconds - found[0].seconds) / (last_flops - first_flops)
    return found[-1].seconds + per_flop * (flops - last_flops)


def fit(config: EncoderConfig, measured: Sequence[Measured], num_at_once: int = 1) -> CostModel:
    """Fit the cost model by least squares of relative errors, no coefficient below zero.

    What the batches cannot tell apart is divided as the model's arithmetic is: attention from the rest where no image
    was large. An item has a cost of its own only if there were batches of several.
    """
    largest = max(max(batch.patches) for batch in measured)
    has_packs = any(len(batch.patches) > 1 for batch in measured)
    attention = attention_flops_per_patch_squared(config) * largest**2
    if attention >= ATTENTION_SHARE * (attention + linear_flops_per_patch(config) * largest):
        model = _fitted(config, measured, num_at_once, has_packs=has_packs, is_bound=False)
        if model.seconds_per_patch > 0 and model.seconds_per_patch_squared > 0:
            return model
    model = _fitted(config, measured, num_at_once, has_packs=has_packs, is_bound=True)
    if model.seconds_per_patch > 0:
        return model
    # Noise: small batches took as long as large ones. What the longest took is all that is known.
    longest = max(measured, key=lambda batch: batch.seconds)
    arithmetic = replace(CostModel.from_config(config), num_at_once=num_at_once)
    return arithmetic.scaled(longest.seconds / arithmetic.batch_seconds(longest.patches))


def _fitted(
    config: EncoderConfig, measured: Sequence[Measured], num_at_once: int, *, has_packs: bool, is_bound: bool
) -> CostModel:
    """`is_bound`: patches and their squares share one coefficient, seconds a floating-point operation."""
    linear, squared = linear_flops_per_patch(config), attention_flops_per_patch_squared(config)
    moments = Moments(4)
    shape = CostModel(0.0, 0.0, 0.0, 0.0, num_at_once)
    for batch in measured:
        launches, items, patches, squares = shape.work(batch.patches)
        parts = [linear * patches, squared * squares]
        row = [launches, items if has_packs else 0.0, *([sum(parts), 0.0] if is_bound else parts)]
        moments.add_relative(row, batch.seconds)
    per_launch, per_item, per_flop, per_attention_flop = moments.fit()
    if is_bound:
        per_attention_flop = per_flop
    return CostModel(per_launch, per_flop * linear, per_attention_flop * squared, per_item, num_at_once)


def _flops(config: EncoderConfig, patches: Sequence[int]) -> float:
    linear, squared = linear_flops_per_patch(config), attention_flops_per_patch_squared(config)
    return float(sum(linear * count + squared * count**2 for count in patches))


def _seconds(encoder: Encoder, side: int, count: int) -> float:
    pixels = side * encoder.processor.tile
    images: list[Pixels] = [np.zeros((pixels, pixels, 3), np.uint8)] * count
    tokens = num_tokens(grid_thw(pixels, pixels, encoder.processor), encoder.config.merge_size)
    outs = [torch.empty(tokens, encoder.config.text_width, dtype=encoder.dtype, device=encoder.device) for _ in images]
    timed = _device_seconds if encoder.device.type == "cuda" else _host_seconds
    return timed(lambda: encoder.encode(images, outs))


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith("model name")), platform.machine())


def _device_seconds(work: Callable[[], object]) -> float:
    """From when the device, idle before, may begin until it is done; waits for the host are part of it."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def _host_seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
