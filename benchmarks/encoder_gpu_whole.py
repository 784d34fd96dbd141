"""Whole forward passes on one GPU: this project's, its plain model, that one compiled, and the reference's."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Final

import torch
from torch import nn

from benchmarks.encoder_gpu_parts import MIXES, real_batches, useful_flops
from benchmarks.gpu_timing import Findings, events_ms, host_ms, kernel_table
from encoder.attention_choice import AttentionChoice
from encoder.config import EncoderConfig, ProcessorConfig
from encoder.difference import difference
from encoder.moonvit import MoonViT
from encoder.sizing import Grid, num_patches, num_tokens
from encoder.source import ModelSource, resolve_model
from encoder.spans import exact_shape, plan_spans
from encoder.weights import build_model

VIDEO: Final[list[Grid]] = [(1, 16, 16), (1, 2, 2), (2, 4, 6), (1, 6, 30), (4, 10, 12), (3, 8, 2), (1, 20, 22)]
SMALL_MIX: Final[list[Grid]] = [(1, 16, 16), (1, 24, 24), (1, 34, 46), (1, 12, 18), (1, 22, 30), (1, 8, 8)]
ALL_MIXES: Final[dict[str, list[Grid]]] = {**MIXES, "small mix": SMALL_MIX, "video": VIDEO}
TINY: Final = EncoderConfig(hidden_size=144, num_layers=2, num_heads=2, mlp_size=200, text_width=96)
TINY_GRIDS: Final[list[Grid]] = [(1, 4, 6), (2, 2, 4), (1, 2, 2)]
MAX_ERROR: Final = 2e-2
MIN_COSINE: Final = 0.9999
KERNELS: Final = ("auto", "fa3", "triton")


def embeddings(model: MoonViT, rows: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
    """What the plain model gives, end to end."""
    width = model.config.text_width
    outs = [rows.new_empty(num_tokens(grid, model.config.merge_size), width) for grid in grids]
    model(rows, grids, outs)
    return torch.cat(outs)


def near(out: torch.Tensor, truth: torch.Tensor, grids: Sequence[Grid], merge_size: int = 2) -> dict[str, float]:
    """The worst relative error of an item and the least cosine of a token, which have to be within the bounds."""
    sizes = [num_tokens(grid, merge_size) for grid in grids]
    found = [difference(mine.float(), other) for mine, other in zip(out.split(sizes), truth.split(sizes), strict=True)]
    error, cosine = max(item.relative_error for item in found), min(item.min_cosine for item in found)
    assert error <= MAX_ERROR, f"relative error {error:.2e}"
    assert cosine >= MIN_COSINE, f"cosine {cosine:.6f}"
    return {"relative_error": error, "cosine": cosine}


def draw_rows(grids: Sequence[Grid], device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(sum(map(num_patches, grids)), 588, generator=generator) * 2 - 1).to(device)


class Whole:
    """The model of the true shape as this project runs it, in bfloat16, and its float32 truth with the same weights."""

    def __init__(self) -> None:
        source = resolve_model("kimi-k2.5")
        self.config = source.config
        self.model = build_model(source, torch.bfloat16).cuda()
        self._truths: dict[str, torch.Tensor] = {}

    @cached_property
    def exact(self) -> MoonViT:
        return copy.deepcopy(self.model).float()

    def truth(self, name: str) -> torch.Tensor:
        if name not in self._truths:
            grids = ALL_MIXES[name]
            self._truths[name] = embeddings(self.exact, draw_rows(grids, "cuda").bfloat16().float(), grids)
        return self._truths[name]

    def choice(self, kernel: str) -> AttentionChoice:
        return AttentionChoice("triton", "fa3") if kernel == "auto" else AttentionChoice(kernel, kernel)

    def forward(self, kernel: str) -> Any:
        from encoder.device_forward import DeviceForward

        return DeviceForward(self.model, self.choice(kernel).load())

    def outs(self, grids: Sequence[Grid]) -> list[torch.Tensor]:
        options = {"device": "cuda", "dtype": torch.bfloat16}
        return [torch.empty(num_tokens(grid, 2), self.config.text_width, **options) for grid in grids]

    def plain(self, name: str) -> dict[str, Any]:
        grids = ALL_MIXES[name]
        rows = draw_rows(grids, "cuda").bfloat16()
        run = partial(embeddings, self.model, rows, grids)
        return near(run(), self.truth(name), grids) | self.timed(run, grids)

    def eager(self, kernel: str, name: str) -> dict[str, Any]:
        grids, forward = ALL_MIXES[name], self.forward(kernel)
        rows = draw_rows(grids, "cuda").bfloat16()

        outs = self.outs(grids)

        def run() -> None:
            padded = nn.functional.pad(rows, (0, forward.patch_values - rows.shape[1]))
            forward(padded, plan_spans(grids, self.config, rows.device), outs)

        without_sync(run)
        return near(torch.cat(outs), self.truth(name), grids) | self.timed(run, grids)

    def graph(self, kernel: str, name: str) -> dict[str, Any]:
        from encoder.graphs import GraphCache, GraphLimits

        grids = ALL_MIXES[name]
        rows = draw_rows(grids, "cuda").bfloat16()
        outs, forward = self.outs(grids), self.forward(kernel)
        cache = GraphCache(forward, self.choice(kernel), GraphLimits(max_patches=17408, max_bytes=8 << 30))
        started = time.perf_counter()
        cache.warm([grids])
        torch.cuda.synchronize()
        capture_s = round(time.perf_counter() - started, 2)

        def run() -> None:
            batch = cache.begin(grids)
            assert batch is not None, cache.failure
            batch.rows[:, : rows.shape[1]].copy_(rows)
            hidden, spans = cache.run(batch, grids)
            forward.project(hidden, spans.cu_tokens, outs)

        without_sync(run)
        bucket = cache.bucket(grids)
        found = near(torch.cat(outs), self.truth(name), grids) | self.timed(run, grids)
        padded_to = bucket and bucket.num_patches
        return found | {"capture_s": capture_s, "padded_to": padded_to, "graph_mib": cache.num_bytes >> 20}

    def timed(self, run: Callable[[], object], grids: Sequence[Grid]) -> dict[str, float]:
        found = rated(run, useful_flops(grids, self.config))
        return found | {"host_ms": round(host_ms(run, 3), 3), "peak_mib": peak_mib(run)}

    def real(self, kernel: str) -> dict[str, float]:
        """64 items of real sizes, in as many batches as the budget asks for, without graphs."""
        forward, batches = self.forward(kernel), real_batches()
        rows = [nn.functional.pad(draw_rows(grids, "cuda").bfloat16(), (0, 4)) for grids in batches]
        outs = [self.outs(grids) for grids in batches]

        def run() -> None:
            for patches, grids, to in zip(rows, batches, outs, strict=True):
                forward(patches, plan_spans(grids, self.config, patches.device), to)

        flops = sum(useful_flops(grids, self.config) for grids in batches)
        return rated(run, flops, 2) | {"batches": len(batches), "patches": sum(map(len, rows))}

    def kernels(self, kernel: str, name: str) -> list[dict[str, Any]]:
        grids = ALL_MIXES[name]
        rows = nn.functional.pad(draw_rows(grids, "cuda").bfloat16(), (0, 4))
        spans = plan_spans(grids, self.config, rows.device)
        return kernel_table(partial(self.forward(kernel), rows, spans, self.outs(grids)))


def rated(run: Callable[[], object], flops: float, repeats: int = 11) -> dict[str, float]:
    ms = events_ms(run, repeats)
    return {"ms": round(ms, 3), "tflops": round(flops / ms / 1e9, 1)}


def without_sync(run: Callable[[], Any]) -> Any:
    """Run twice, the second time with every wait for the device an error."""
    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def peak_mib(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def whole(found: Findings) -> None:
    ours = Whole()
    for kernel in KERNELS:
        for name in ALL_MIXES:
            found.attempt(f"{name}, {kernel} eager", partial(ours.eager, kernel, name))
            found.attempt(f"{name}, {kernel} graph", partial(ours.graph, kernel, name))
        if kernel in ("auto", "triton"):
            found.attempt(f"64 real, {kernel} eager", partial(ours.real, kernel))
    for name in ALL_MIXES:
        found.attempt(f"{name}, plain model", partial(ours.plain, name))
    for name in ("1x1024", "16x256", "4x1024"):
        found.attempt(f"{name}, kernels of auto", partial(ours.kernels, "auto", name))


def compiled(found: Findings) -> None:
    """The plain model with each block compiled by torch, as a graph: what this project has to beat."""
    ours = Whole()
    for block in ours.model.vision_tower.encoder.blocks:
        block.compile(dynamic=False)
    for name in ("1x1024", "16x256", "4x1024", "4x4096"):
        found.attempt(f"{name}, torch.compile, graph", partial(compiled_ms, ours.model, ALL_MIXES[name]))


def compiled_ms(model: MoonViT, grids: list[Grid]) -> float:
    from encoder.packing import plan_pack

    plan = plan_pack(grids, model.config, torch.device("cuda"))
    rows = draw_rows(grids, "cuda").bfloat16()
    outs = [rows.new_empty(num_tokens(grid, 2), model.config.text_width) for grid in grids]

    def run() -> None:
        model.mm_projector(model.vision_tower(rows, plan), plan, outs)

    return graphed_ms(run)


def graphed_ms(run: Callable[[], object]) -> float:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
        run()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        run()
    return events_ms(graph.replay, 11)


def reference(found: Findings) -> None:
    """transformers' vision model as it comes, tower only, and with the fastest attention that it takes."""
    from benchmarks.fidelity import TRUE_WIDTH
    from tests.encoder.oracle import build_oracle

    oracle = build_oracle(**TRUE_WIDTH, num_hidden_layers=27).bfloat16().cuda()
    for implementation in ("sdpa", "flash_attention_3"):
        for name, grids in MIXES.items():
            run = partial(reference_ms, oracle, implementation, grids)
            found.attempt(f"{name}, transformers {implementation}", run)


def reference_ms(oracle: Any, implementation: str, grids: list[Grid]) -> float:
    rows = draw_rows(grids, "cuda").bfloat16().view(-1, 3, 14, 14)
    grid_thw = torch.tensor(grids, device="cuda")
    oracle.set_attn_implementation(implementation)
    return events_ms(partial(oracle.model.vision_tower, rows, grid_thw=grid_thw), 5)


def tiny(found: Findings) -> None:
    """The same pass on a CPU: float32 against the plain model, plain and padded, with every kernel that runs there."""
    os.environ["TRITON_INTERPRET"] = "1"
    from encoder.attention import load_attention
    from encoder.device_forward import DeviceForward
    from encoder.graphs import bucket_of

    plain, device = build_model(ModelSource("tiny", TINY, ProcessorConfig(), None), torch.float32), torch.device("cpu")
    rows = draw_rows(TINY_GRIDS, "cpu")
    truth = embeddings(plain, rows, TINY_GRIDS)
    shape = bucket_of(exact_shape(TINY_GRIDS, TINY), TINY.merge_size)
    for name in ("sdpa", "triton"):
        forward = DeviceForward(plain, load_attention(name))
        for padded_to in (None, shape):
            spans = plan_spans(TINY_GRIDS, TINY, device, padded_to)
            padding = (0, forward.patch_values - 588, 0, spans.num_patches - len(rows))
            outs = [torch.empty(num_tokens(grid, TINY.merge_size), TINY.text_width) for grid in TINY_GRIDS]
            forward(nn.functional.pad(rows, padding), spans, outs)
            found.attempt(f"{name}, padded to {padded_to}", partial(near, torch.cat(outs), truth, TINY_GRIDS))
