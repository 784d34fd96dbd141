"""Whole encodes on one GPU, from pixels in host memory to checked embeddings: what a rank waits for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from benchmarks.encoder_gpu_parts import BUDGET, REAL_SIZES, useful_flops
from benchmarks.gpu_timing import Findings
from encoder.device_options import DeviceOptions
from encoder.difference import difference
from encoder.model import Encoder
from encoder.preprocess import Pixels
from encoder.sizing import grid_thw, num_patches, num_tokens
from encoder.source import resolve_model
from encoder.weights import build_model

SIZES: Final[dict[str, list[tuple[int, int]]]] = {
    "1x1024": [(448, 448)],
    "4x1024": [(448, 448)] * 4,
    "16x256": [(224, 224)] * 16,
    "4x4096": [(896, 896)] * 4,
    "1x10764": [(1932, 1092)],
    "small mix": [(224, 224), (336, 336), (640, 480), (250, 170), (420, 300), (112, 112)],
}
REPEATS: Final = 9


def encode(found: Findings) -> None:
    """The encoder as it is, with and without graphs, and with the plain model, whose preprocessing is the host's."""
    source = resolve_model("kimi-k2.5")
    model = build_model(source, torch.bfloat16).cuda()
    started = time.perf_counter()
    ours = Encoder(model, source.processor)
    ours.warm_up()
    eager_s = time.perf_counter() - started
    plain = Encoder(model, source.processor, options=DeviceOptions(attention="sdpa"))
    plain._accelerated = None  # as on a device without Triton
    truth = {name: run_once(plain, pictures(sizes)) for name, sizes in SIZES.items()}
    for name, sizes in SIZES.items():
        found.attempt(f"{name}, Encoder without graphs", partial(timed, ours, pictures(sizes), truth[name]))
    started = time.perf_counter()
    ours.use_graphs()
    torch.cuda.synchronize()
    found.attempt("start", lambda: {"eager_s": eager_s, "graphs_s": time.perf_counter() - started})
    for name, sizes in SIZES.items():
        found.attempt(f"{name}, Encoder", partial(timed, ours, pictures(sizes), truth[name]))
    found.attempt("64 real, Encoder", partial(stream, ours))
    for name, sizes in SIZES.items():
        found.attempt(f"{name}, Encoder, plain model", partial(timed, plain, pictures(sizes), truth[name]))
    found.attempt("acceleration", lambda: str(ours.acceleration))


def pictures(sizes: Sequence[tuple[int, int]]) -> list[Pixels]:
    draw = np.random.default_rng(1)
    return [draw.integers(0, 256, (height, width, 3), dtype=np.uint8) for width, height in sizes]


def outs_for(encoder: Encoder, items: Sequence[Pixels]) -> list[torch.Tensor]:
    tokens = [num_tokens(grid_thw(item.shape[1], item.shape[0], encoder.processor), 2) for item in items]
    return [torch.empty(n, encoder.config.text_width, dtype=encoder.dtype, device=encoder.device) for n in tokens]


def run_once(encoder: Encoder, items: Sequence[Pixels]) -> list[torch.Tensor]:
    outs = outs_for(encoder, items)
    assert all(encoder.encode(items, outs))
    return outs


def timed(encoder: Encoder, items: Sequence[Pixels], truth: Sequence[torch.Tensor]) -> dict[str, float]:
    """Milliseconds of a call, which ends when the device is done, and how near the plain model's bfloat16 is."""
    outs = outs_for(encoder, items)
    times = []
    for _ in range(REPEATS + 2):
        started = time.perf_counter()
        encoder.encode(items, outs)
        times.append((time.perf_counter() - started) * 1e3)
    cosine = min(difference(mine, other).min_cosine for mine, other in zip(outs, truth, strict=True))
    assert cosine >= 0.9998, f"cosine {cosine:.6f}"
    return {"ms": round(statistics.median(times[2:]), 3), "cosine": cosine}


def stream(encoder: Encoder) -> dict[str, Any]:
    """64 pictures of real sizes, in batches under the budget, one call after the other."""
    batches: list[list[Pixels]] = [[]]
    used = 0
    for item in pictures(REAL_SIZES * 4):
        patches = num_patches(grid_thw(item.shape[1], item.shape[0], encoder.processor))
        if batches[-1] and used + patches > BUDGET:
            batches.append([])
            used = 0
        batches[-1].append(item)
        used += patches
    outs = [outs_for(encoder, batch) for batch in batches]
    for _ in range(2):
        started = time.perf_counter()
        for batch, to in zip(batches, outs, strict=True):
            encoder.encode(batch, to)
        seconds = time.perf_counter() - started
    grids = [grid_thw(item.shape[1], item.shape[0], encoder.processor) for batch in batches for item in batch]
    return {"ms": round(seconds * 1e3, 1), "tflops": round(useful_flops(grids, encoder.config) / seconds / 1e12, 1)}
