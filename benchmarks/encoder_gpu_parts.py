"""Parts of the forward pass by themselves on one GPU: products, elementwise kernels, attention. For `encoder_gpu`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from benchmarks.gpu_timing import Findings, events_ms, graph_ms, host_ms
from encoder.attention import BACKENDS, AttentionKernel, load_attention, packed_attention
from encoder.config import EncoderConfig, ProcessorConfig
from encoder.moonvit import rotate_pairs_
from encoder.packing import plan_pack
from encoder.sharding import attention_flops_per_patch_squared, linear_flops_per_patch
from encoder.sizing import Grid, grid_thw, num_patches
from encoder.source import resolve_model
from encoder.spans import Spans, plan_spans

MIXES: Final[dict[str, list[Grid]]] = {
    "1x1024": [(1, 32, 32)],
    "4x1024": [(1, 32, 32)] * 4,
    "16x256": [(1, 16, 16)] * 16,
    "4x4096": [(1, 64, 64)] * 4,
    "1x10764": [(1, 78, 138)],
}
REAL_SIZES: Final = [
    (640, 480), (1280, 720), (1024, 1024), (1920, 1080), (448, 449), (3840, 2160), (800, 600), (512, 512),
    (1024, 768), (224, 224), (1600, 1200), (768, 1024), (612, 612), (336, 336), (480, 640), (1440, 900),
]  # fmt: skip
BUDGET: Final = 16384


def real_batches() -> list[list[Grid]]:
    """64 items of real sizes in batches under the default budget, filled in order of arrival."""
    batches: list[list[Grid]] = [[]]
    for size in REAL_SIZES * 4:
        grid = grid_thw(*size, ProcessorConfig())
        if batches[-1] and sum(map(num_patches, [*batches[-1], grid])) > BUDGET:
            batches.append([])
        batches[-1].append(grid)
    return batches


def useful_flops(grids: Sequence[Grid], config: EncoderConfig) -> float:
    lengths = [num_patches(grid) for grid in grids]
    squares = sum(length * length for length in lengths)
    return sum(lengths) * linear_flops_per_patch(config) + squares * attention_flops_per_patch_squared(config)


def products(found: Findings) -> None:
    """Every kind of product, with what can be part of it, through both of torch's ways to cuBLAS."""
    for library in ("cublas", "cublaslt"):
        torch.backends.cuda.preferred_blas_library(library)
        for rows in (1024, 4096, 16384):
            for name, (run, flops) in product_variants(rows).items():
                found.attempt(f"{library} {rows} {name}", partial(rated, run, flops))


def rated(run: Callable[[], object], flops: float) -> dict[str, float]:
    ms = graph_ms(run)
    return {"ms": round(ms, 4), "tflops": round(flops / ms / 1e9, 1)}


def product_variants(rows: int) -> dict[str, tuple[Callable[[], Any], float]]:
    draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    x, stream, merged = draw(rows, 1152), draw(rows, 1152), draw(rows // 4, 4608)
    variants: dict[str, tuple[Callable[[], Any], float]] = {}

    def add(name: str, run: Callable[[], Any], *sides: int) -> None:
        variants[name] = run, 2.0 * sides[0] * sides[1] * sides[2]

    wqkv, bqkv, wo = draw(3456, 1152) / 34, draw(3456), draw(1152, 1152) / 34
    add("qkv linear", lambda: nn.functional.linear(x, wqkv, bqkv), rows, 1152, 3456)
    add("qkv no bias", lambda: x @ wqkv.t(), rows, 1152, 3456)
    add("wo linear", lambda: nn.functional.linear(x, wo, bqkv[:1152]), rows, 1152, 1152)
    add("wo into stream", lambda: stream.addmm_(x, wo.t(), beta=0.5), rows, 1152, 1152)
    for width in (4304, 4352, 4608):
        up, bias, down, wide = draw(width, 1152) / 34, draw(width), draw(1152, width) / 66, draw(rows, width)
        add(f"fc0 {width} gelu", partial(gelu_product, x, up, bias), rows, 1152, 4304)
        add(f"fc0 {width} linear", partial(nn.functional.linear, x, up, bias), rows, 1152, 4304)
        add(f"fc0 {width} no bias", partial(torch.mm, x, up.t()), rows, 1152, 4304)
        add(f"fc1 {width} into stream", partial(stream.addmm_, wide, down.t(), beta=0.5), rows, 1152, 4304)
    for values in (588, 592, 640):
        patches, weight = draw(rows, values), draw(1152, values) / 24
        add(f"patches {values}", partial(stream.addmm_, patches, weight.t(), beta=0.5), rows, 588, 1152)
    first, last, bias = draw(4608, 4608) / 68, draw(7168, 4608) / 68, draw(7168)
    add("projector 1", lambda: nn.functional.linear(merged, first, bias[:4608]), rows // 4, 4608, 4608)
    add("projector 2", lambda: nn.functional.linear(merged, last, bias), rows // 4, 4608, 7168)
    return variants


def gelu_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.aten._addmm_activation(bias, x, weight.t(), use_gelu=True)
    return out


def elementwise(found: Findings) -> None:
    from encoder.kernels.rotary import bias_gelu_, rotate_
    from encoder.kernels.rows import layer_norm, merge, place

    config = resolve_model("kimi-k2.5").config
    for grids in ([(1, 32, 32)], [(1, 64, 64)] * 4):
        spans = plan_spans(grids, config, torch.device("cuda"))
        rows, draw = spans.num_patches, partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        x, qkv, wide, norm = draw(rows, 1152), draw(rows, 3, 16, 72), draw(rows, 4304), nn.LayerNorm(1152).cuda()
        norm, zero, table = norm.bfloat16(), torch.zeros(1152, device="cuda"), draw(64, 64, 1152)
        times, frequencies = torch.zeros(4, 1152, device="cuda"), torch.rand(18, device="cuda")
        _, cosines, sines = place(spans, table, times, frequencies)
        check_rotation(qkv, cosines, sines)
        plan = plan_pack(grids, config, torch.device("cuda"))
        runs: dict[str, Callable[[], Any]] = {
            f"layer norm rows {count} warps {warps}": partial(
                layer_norm, x, zero, norm.weight, norm.bias, 1e-5, rows=count, num_warps=warps
            )
            for count, warps in ((1, 2), (1, 4), (2, 2), (2, 4), (4, 4))
        }
        runs["layer norm torch"] = partial(norm, x)
        for count, block in ((4, 256), (8, 256), (16, 256), (4, 512), (8, 512)):
            name = f"rotate rows {count} block {block}"
            runs[name] = partial(rotate_, qkv, cosines, sines, rows=count, block=block)
        runs["rotate torch"] = partial(rotate_pairs_, qkv[:, :2], plan.rotation)
        runs["gelu"] = partial(bias_gelu_, wide, draw(4304))
        runs["gelu torch"] = partial(nn.functional.gelu, wide, approximate="tanh")
        runs["place"] = partial(place, spans, table, times, frequencies)
        runs["merge"] = partial(merge, x, spans, zero, norm, norm, 2)
        for name, run in runs.items():
            found.attempt(f"{rows} {name}", partial(graph_ms, run))
        found.attempt(f"{rows} plan spans, host ms", partial(host_ms, partial(plan_spans, grids, config, x.device)))


def check_rotation(qkv: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    from encoder.kernels.rotary import rotate_

    ours, theirs = qkv.clone(), qkv.clone()
    rotate_(ours, cosines, sines)
    rotate_pairs_(theirs[:, :2], torch.complex(cosines, sines))
    assert relative(ours, theirs) <= 5e-3, "the rotation is that of the model"


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def attention(found: Findings) -> None:
    """Each kernel alone, a layer's; graphs hide what a launch costs, where a kernel can be captured."""
    config = resolve_model("kimi-k2.5").config
    mixes = {**MIXES, "small mix": [(1, 16, 16), (1, 24, 24), (1, 34, 46), (1, 12, 18), (1, 22, 30), (1, 8, 8)]}
    for name, load in attention_variants().items():
        for mix, grids in {**mixes, "64 real": real_batches()[0]}.items():
            is_uniform = len(set(grids)) == 1
            if is_uniform or not name.endswith("dense"):
                found.attempt(f"{mix}, {name}", partial(attention_case, name, load, grids, config))
    for name, backend in BACKENDS.items():
        if backend.is_installed():
            found.attempt(f"NaN passes {name}", partial(leaks, partial(load_attention, name)))


def attention_variants() -> dict[str, Callable[[], AttentionKernel]]:
    from encoder.kernels.flash import FlashTuning, flash_attention

    installed = [name for name, backend in BACKENDS.items() if backend.is_installed()]
    variants: dict[str, Callable[[], AttentionKernel]] = {name: partial(load_attention, name) for name in installed}
    for keys, stages in ((64, 3), (128, 2)):
        tuned = partial(flash_attention, tuning=FlashTuning(keys=keys, num_stages=stages))
        variants[f"triton keys {keys} stages {stages}"] = partial(lambda kernel: kernel, tuned)
    return variants | {"fa3 dense": dense_fa3, "cudnn dense": dense_cudnn}


def dense_fa3() -> AttentionKernel:
    load_attention("fa3")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans) -> torch.Tensor:
        parts = [part.unflatten(0, (-1, spans.max_seqlen)) for part in (q, k, v)]
        out: torch.Tensor = torch.ops.fa3_fwd.fwd(*parts, softmax_scale=72**-0.5, num_splits=1)[0]
        return out.flatten(0, 1)

    return attend


def dense_cudnn() -> AttentionKernel:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans) -> torch.Tensor:
        parts = [part.unflatten(0, (-1, spans.max_seqlen)).transpose(1, 2) for part in (q, k, v)]
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.CUDNN_ATTENTION):
            return nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(0, 1)

    return attend


def attention_case(
    name: str, load: Callable[[], AttentionKernel], grids: list[Grid], config: EncoderConfig
) -> dict[str, Any]:
    spans = plan_spans(grids, config, torch.device("cuda"))
    qkv = torch.randn(spans.num_patches, 3, 16, 72, device="cuda", dtype=torch.bfloat16)
    run = partial(load(), *qkv.unbind(1), spans)
    error = relative(run(), packed_attention(*(part.float() for part in qkv.unbind(1)), spans.cu_seqlens))
    assert error <= 1e-2, f"relative error {error:.2e}"
    is_captured = name not in BACKENDS or BACKENDS[name].fits_graphs or (len(set(grids)) == 1 and name == "sdpa")
    ms = graph_ms(run, 5) if is_captured else events_ms(run, 5)
    flops = sum(4.0 * 1152 * num_patches(grid) ** 2 for grid in grids)
    return {"ms": round(ms, 4), "tflops": round(flops / ms / 1e9, 1), "relative_error": error, "captured": is_captured}


def leaks(load: Callable[[], AttentionKernel]) -> bool:
    """Whether an item's NaN reach its neighbours in the pack."""
    grids: list[Grid] = [(1, 10, 10), (1, 10, 12), (1, 6, 10)]
    spans = plan_spans(grids, resolve_model("kimi-k2.5").config, torch.device("cuda"))
    qkv = torch.randn(spans.num_patches, 3, 16, 72, device="cuda", dtype=torch.bfloat16)
    kernel = load()
    before = kernel(*qkv.unbind(1), spans).clone()
    qkv[100:220] = torch.nan
    after = kernel(*qkv.unbind(1), spans)
    kept = torch.cat([torch.arange(100), torch.arange(220, 280)]).cuda()
    return not torch.equal(before[kept], after[kept])
