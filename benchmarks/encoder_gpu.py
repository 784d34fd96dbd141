"""The forward pass on one GPU: its parts, the whole, and how near the result is to float32, in one run.

    python -m benchmarks.encoder_gpu [--only products,elementwise,attention,model,reference] [--output FOLDER] [--tiny]

Each part runs in a process of its own, since a failing kernel can end a CUDA context, and prints what it finds as it
goes; FOLDER/encoder_gpu.json has everything. Needs torch; with a wheel of FlashAttention that is measured too, and
with transformers its model. `--tiny` checks on a CPU, under Triton's interpreter, that the forward pass agrees.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from benchmarks.gpu_timing import attempt, events_ms, host_ms, kernel_table
from encoder.config import EncoderConfig, ProcessorConfig
from encoder.difference import difference
from encoder.moonvit import MoonViT
from encoder.sizing import Grid, num_patches, num_tokens
from encoder.source import ModelSource, resolve_model
from encoder.spans import exact_shape, plan_spans
from encoder.weights import build_model

PARTS: Final = ("attention", "model", "products", "elementwise", "reference")
PART_SECONDS: Final = {"attention": 100, "model": 130, "products": 50, "elementwise": 60, "reference": 150}
VIDEO: Final[list[Grid]] = [(1, 16, 16), (1, 2, 2), (2, 4, 6), (1, 6, 30), (4, 10, 12), (3, 8, 2), (1, 20, 22)]
TINY: Final = EncoderConfig(hidden_size=144, num_layers=2, num_heads=2, mlp_size=200, text_width=96)
TINY_GRIDS: Final[list[Grid]] = [(1, 4, 6), (2, 2, 4), (1, 2, 2)]
MAX_ERROR: Final = 2e-2
MIN_COSINE: Final = 0.9999
KERNELS: Final = ("fa3", "cudnn", "triton", "torch-varlen")


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
    return {"error": error, "cosine": cosine}


def draw_rows(grids: Sequence[Grid], device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(sum(map(num_patches, grids)), 588, generator=generator) * 2 - 1).to(device)


class Whole:
    """The model of the true shape as this project runs it, in bfloat16, and its float32 truth with the same weights."""

    def __init__(self) -> None:
        source = resolve_model("kimi-k2.5")
        self.config = source.config
        self.model = build_model(source, torch.bfloat16).cuda()
        self.exact = copy.deepcopy(self.model).float()

    def truth(self, grids: Sequence[Grid]) -> torch.Tensor:
        return embeddings(self.exact, draw_rows(grids, "cuda").bfloat16().float(), grids)

    def mix(self, kernel: str, grids: list[Grid]) -> dict[str, Any]:
        from benchmarks.encoder_gpu_parts import useful_flops
        from encoder.attention import load_attention
        from encoder.device_forward import DeviceForward

        rows, truth, found = draw_rows(grids, "cuda").bfloat16(), self.truth(grids), {}
        forward, flops = DeviceForward(self.model, load_attention(kernel)), useful_flops(grids, self.config)
        attempt(found, f"{kernel} eager", partial(self.eager, forward, rows, grids, truth, flops))
        attempt(found, f"{kernel} graph", partial(self.graph, forward, rows, grids, truth, flops))
        return found

    def eager(
        self, forward: Any, rows: torch.Tensor, grids: list[Grid], truth: torch.Tensor, flops: float
    ) -> dict[str, Any]:
        def run() -> torch.Tensor:
            padded = nn.functional.pad(rows, (0, forward.patch_values - rows.shape[1]))
            out: torch.Tensor = forward(padded, plan_spans(grids, self.config, rows.device))
            return out

        found = near(without_sync(run), truth, grids)
        return found | timed(run, flops) | {"host_ms": round(host_ms(run), 3), "peak_mib": peak_mib(run)}

    def graph(
        self, forward: Any, rows: torch.Tensor, grids: list[Grid], truth: torch.Tensor, flops: float
    ) -> dict[str, Any]:
        from encoder.graphs import GraphCache, GraphLimits

        outs = [rows.new_empty(num_tokens(grid, 2), self.config.text_width) for grid in grids]
        cache = GraphCache(forward, GraphLimits(max_patches=17408))
        started = time.perf_counter()
        cache.warm([grids])
        torch.cuda.synchronize()
        capture_s = round(time.perf_counter() - started, 2)

        def run() -> None:
            torch._foreach_copy_(outs, cache.run(rows, grids).split([len(out) for out in outs]))

        without_sync(run)
        shape = cache.bucket(grids)
        found = near(torch.cat(outs), truth, grids) | timed(run, flops) | {"host_ms": round(host_ms(run), 3)}
        return found | {"capture_s": capture_s, "padded_to": shape and shape.num_patches}

    def real(self, name: str) -> dict[str, float]:
        """64 items of real sizes, in as many batches as the budget asks for, without graphs."""
        from benchmarks.encoder_gpu_parts import real_batches, useful_flops
        from encoder.attention import load_attention
        from encoder.device_forward import DeviceForward

        forward, batches = DeviceForward(self.model, load_attention(name)), real_batches()
        rows = [nn.functional.pad(draw_rows(grids, "cuda").bfloat16(), (0, 4)) for grids in batches]

        def run() -> None:
            for patches, grids in zip(rows, batches, strict=True):
                forward(patches, plan_spans(grids, self.config, patches.device))

        flops = sum(useful_flops(grids, self.config) for grids in batches)
        return timed(run, flops, 2) | {"batches": len(batches), "patches": sum(map(len, rows))}


def timed(run: Callable[[], object], flops: float, repeats: int = 15) -> dict[str, float]:
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


def model() -> dict[str, Any]:
    from benchmarks.encoder_gpu_parts import MIXES

    whole, found = Whole(), {}
    for kernel in KERNELS:
        for name, grids in {"video": VIDEO, **MIXES}.items():
            attempt(found, f"{name}, {kernel}", partial(whole.mix, kernel, grids))
        attempt(found, f"64 real, {kernel}", partial(whole.real, kernel))
        for mix in ("1x1024", "4x4096"):
            attempt(found, f"kernels of {mix}, {kernel}", partial(kernels_of, whole, kernel, MIXES[mix]))
    for name, grids in MIXES.items():
        run = partial(embeddings, whole.model, draw_rows(grids, "cuda").bfloat16(), grids)
        attempt(found, f"{name}, plain model", partial(events_ms, run, 5))
    return found


def kernels_of(whole: Whole, kernel: str, grids: list[Grid]) -> list[dict[str, Any]]:
    from encoder.attention import load_attention
    from encoder.device_forward import DeviceForward

    rows = nn.functional.pad(draw_rows(grids, "cuda").bfloat16(), (0, 4))
    spans = plan_spans(grids, whole.config, rows.device)
    return kernel_table(partial(DeviceForward(whole.model, load_attention(kernel)), rows, spans))


def reference() -> dict[str, Any]:
    """transformers' vision model as it comes, tower only, and with the fastest attention that it takes."""
    from benchmarks.encoder_gpu_parts import MIXES
    from benchmarks.fidelity import TRUE_WIDTH
    from tests.encoder.oracle import build_oracle

    oracle = build_oracle(**TRUE_WIDTH, num_hidden_layers=27).bfloat16().cuda()
    found: dict[str, Any] = {}
    for implementation in ("sdpa", "flash_attention_3", "flash_attention_2"):
        for name, grids in MIXES.items():
            rows = draw_rows(grids, "cuda").bfloat16().view(-1, 3, 14, 14)
            grid_thw = torch.tensor(grids, device="cuda")

            def time_tower(
                implementation: str = implementation, rows: torch.Tensor = rows, grid_thw: torch.Tensor = grid_thw
            ) -> float:
                oracle.set_attn_implementation(implementation)
                with torch.inference_mode():
                    return events_ms(partial(oracle.model.vision_tower, rows, grid_thw=grid_thw), 5)

            attempt(found, f"{implementation} {name}", time_tower)
    return found


def tiny() -> dict[str, Any]:
    """The same pass on a CPU: float32 against the plain model, plain and padded, with every kernel that runs there."""
    os.environ["TRITON_INTERPRET"] = "1"
    from encoder.attention import load_attention
    from encoder.device_forward import DeviceForward
    from encoder.graphs import bucket_of

    plain, device = build_model(ModelSource("tiny", TINY, ProcessorConfig(), None), torch.float32), torch.device("cpu")
    rows, found = draw_rows(TINY_GRIDS, "cpu"), {}
    truth = embeddings(plain, rows, TINY_GRIDS)
    shape = bucket_of(exact_shape(TINY_GRIDS, TINY), TINY.merge_size)
    for name in ("sdpa", "triton"):
        forward = DeviceForward(plain, load_attention(name))
        for padded_to in (None, shape):
            spans = plan_spans(TINY_GRIDS, TINY, device, padded_to)
            padding = (0, forward.patch_values - 588, 0, spans.num_patches - len(rows))
            out = forward(nn.functional.pad(rows, padding), spans)[: len(truth)]
            attempt(found, f"{name}, padded to {padded_to}", partial(near, out, truth, TINY_GRIDS))
    return found


def run_part(part: str) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    here = {"model": model, "reference": reference, "tiny": tiny}
    run = here.get(part) or getattr(importlib.import_module("benchmarks.encoder_gpu_parts"), part)
    with torch.inference_mode():
        found: dict[str, Any] = run()
    return found


def run_in_process(part: str, folder: Path) -> dict[str, Any]:
    path, started = folder / f"encoder_gpu_{part}.json", time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.encoder_gpu", "--part", part, "--output", str(folder)]
    try:
        code: int | str = subprocess.run(command, timeout=PART_SECONDS[part], check=False).returncode
    except subprocess.TimeoutExpired:
        code = "timed out"
    found = json.loads(path.read_text()) if path.exists() else {}
    path.unlink(missing_ok=True)
    return {"found": found, "exit": code, "seconds": round(time.perf_counter() - started, 1)}


def setup() -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda, "date": time.strftime("%F")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS[:4]), help=f"parts to run, of {','.join(PARTS)}")
    parser.add_argument("--output", type=Path, default=Path(), help="folder for encoder_gpu.json")
    parser.add_argument("--tiny", action="store_true", help="check on a CPU, time nothing")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part or options.tiny:
        found = run_part(options.part or "tiny")
        (options.output / f"encoder_gpu_{options.part or 'tiny'}.json").write_text(json.dumps(found, default=str))
        return
    results: dict[str, Any] = {"setup": setup()}
    for part in options.only.split(","):
        print(f"{part}:", flush=True)
        results[part] = run_in_process(part, options.output)
        (options.output / "encoder_gpu.json").write_text(json.dumps(results, indent=1, default=str))
        print(f"{part}: exit {results[part]['exit']}, {results[part]['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
