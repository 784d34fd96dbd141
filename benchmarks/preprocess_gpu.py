"""Pixels that lie on a GPU to normalised patch rows: bits, device time and time of a call, beside plain torch.

    python -m benchmarks.preprocess_gpu [--out FOLDER] [--tilings] [--tiny]

Needs torch and triton alone. Every batch is checked bit for bit against the formula in numpy, and against Pillow where
it is installed, for each tiling before that is timed. The alternatives resize on the device by `interpolate` (close
to those bits, not equal), image by image or stacked where all have one size, and then pad, normalise and cut.

`device` is the device's time alone: calls wait behind a sleeping kernel until all are queued; `host` is what queuing
one takes. `call` is a call's share of many in a row, so the longer of both; `done` is one call until the device has
finished. Mixes of sizes have been seen before, but for `new mix`: sizes seen before in an order never seen. `--tiny`
runs the checks alone, on small pictures: on a CPU under Triton's interpreter (`TRITON_INTERPRET=1`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from encoder.config import ProcessorConfig
from encoder.device_plan import Tiling
from encoder.device_preprocess import DevicePreprocessor
from encoder.preprocess import Pixels, preprocess
from encoder.sizing import Grid, grid_thw, num_patches, resized_size
from tests.encoder.integer_resize import integer_resize

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
PEER_MS = {"4 x 512^2": 0.40, "8 mixed": 1.26, "32 sizes": 2.05, "4 x 4K": 2.56}
"""SGLang 0.5.23 on the same kind of chip, float32 out."""
LIMIT_MS = {"4 x 512^2 to 448^2": 0.04, **{name: ms / 8 for name, ms in PEER_MS.items()}}
TILINGS = [
    Tiling(rows, columns, rows, columns, kept, across, resized)
    for rows, columns, kept, across, resized in [
        (4, 128, 4, 8, 8), (4, 128, 4, 8, 4), (4, 128, 4, 4, 8), (4, 128, 4, 4, 4), (2, 256, 4, 8, 8), (4, 64, 2, 4, 4),
    ]
]  # fmt: skip
FUSED = [replace(TILINGS[0], max_fused_pixels=1 << 30)]

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    sizes: list[tuple[int, int]]
    processor: ProcessorConfig = field(default_factory=ProcessorConfig)

    @property
    def grids(self) -> list[Grid]:
        return [grid_thw(width, height, self.processor) for width, height in self.sizes]

    def pictures(self, seed: int = 0) -> list[Pixels]:
        draw = np.random.default_rng(seed)
        return [draw.integers(0, 256, (height, width, 3), dtype=np.uint8) for width, height in self.sizes]

    @property
    def num_bytes(self) -> int:
        """Each pixel read once and each value written once: the floor, without what lies between the passes."""
        read = sum(3 * width * height for width, height in self.sizes)
        return read + sum(num_patches(grid) * 588 for grid in self.grids) * DTYPE.itemsize


def many_sizes(count: int, mean_side: int) -> list[tuple[int, int]]:
    """Different sizes from half to one and a half of a side, wide ones and tall ones."""
    draw = np.random.default_rng(7)
    sides = draw.integers(mean_side // 2, mean_side * 3 // 2, (count, 2))
    return [(int(width), int(height)) for width, height in sides]


def all_cases() -> list[Case]:
    mixed = [(640, 480), (1280, 720), (1024, 1024), (1920, 1080), (448, 448), (800, 600), (300, 1200), (1024, 768)]
    return [
        Case("4 x 512^2 to 448^2", [(512, 512)] * 4, ProcessorConfig(max_patches_per_side=32)),
        Case("4 x 512^2", [(512, 512)] * 4),
        Case("8 mixed", mixed),
        Case("32 sizes", many_sizes(32, 725)),
        Case("32 sizes to 1024 patches", many_sizes(32, 725), ProcessorConfig(max_patches=1024)),
        Case("4 x 4K", [(3840, 2160)] * 4),
    ]


def tiny_cases() -> list[Case]:
    small = ProcessorConfig(max_patches=6)
    return [Case("2 equal", [(50, 60)] * 2, small), Case("3 mixed", [(28, 28), (90, 61), (13, 200)], small)]


def normalised(levels: torch.Tensor, processor: ProcessorConfig) -> torch.Tensor:
    """Levels `[..., 3, patch, patch]` as the encoder normalises them, one row a patch."""
    mean, std = (torch.tensor(v, device=levels.device).view(3, 1, 1) * 255.0 for v in
                 (processor.image_mean, processor.image_std))  # fmt: skip
    return levels.float().sub_(mean).div_(std).flatten(-3).flatten(0, -2).to(DTYPE)


def cut(image: torch.Tensor, grid: Grid) -> torch.Tensor:
    """`[..., 3, height, width]`, padded, as `[..., rows, columns, 3, 14, 14]`."""
    _, rows, columns = grid
    padded = F.pad(image, (0, columns * 14 - image.shape[-1], 0, rows * 14 - image.shape[-2]))
    tiles = padded.unflatten(-1, (columns, 14)).unflatten(-3, (rows, 14))
    return tiles.movedim((-4, -2, -5, -3, -1), (-5, -4, -3, -2, -1)).contiguous()


def numpy_rows(picture: Pixels, grid: Grid, processor: ProcessorConfig) -> torch.Tensor:
    """The formula: what must come out, to the bit."""
    height, width, _ = picture.shape
    resized = torch.from_numpy(np.ascontiguousarray(integer_resize(picture, *resized_size(width, height, processor))))
    _, rows, columns = grid
    padded = torch.zeros(rows * 14, columns * 14, 3, dtype=torch.uint8)
    padded[: resized.shape[0], : resized.shape[1]] = resized
    return normalised(padded.view(rows, 14, columns, 14, 3).permute(0, 2, 4, 1, 3).contiguous(), processor)


def truth(case: Case, pictures: Sequence[Pixels]) -> torch.Tensor:
    parts = [numpy_rows(picture, grid, case.processor) for picture, grid in zip(pictures, case.grids, strict=True)]
    if importlib.util.find_spec("PIL") is not None:
        for picture, part in zip(pictures, parts, strict=True):
            rows = normalised(torch.from_numpy(preprocess(picture, case.processor)[0]), case.processor)
            assert torch.equal(rows, part), f"{case.name}: the formula is not Pillow's"
    return torch.cat(parts).to(DEVICE)


def torch_resized(images: torch.Tensor, processor: ProcessorConfig) -> torch.Tensor:
    """`[n, height, width, 3]` as float levels `[n, 3, height, width]` of the new size."""
    height, width = images.shape[1:3]
    new_width, new_height = resized_size(width, height, processor)
    planes = images.permute(0, 3, 1, 2).float()
    if (new_width, new_height) == (width, height):
        return planes
    resized = F.interpolate(planes, (new_height, new_width), mode="bicubic", antialias=True, align_corners=False)
    return resized.round_().clamp_(0, 255)


def one_by_one(case: Case, items: Sequence[torch.Tensor]) -> torch.Tensor:
    """Plain torch, an image at a time; not even the copy of the padding's settings counts."""
    processor = case.processor
    parts = [cut(torch_resized(item[None], processor)[0], grid) for item, grid in zip(items, case.grids, strict=True)]
    return torch.cat([part.flatten(2).flatten(0, 1).sub_(127.5).div_(127.5).to(DTYPE) for part in parts])


def stacked(case: Case, items: Sequence[torch.Tensor]) -> torch.Tensor:
    """Plain torch, all images of one size at once."""
    parts = cut(torch_resized(torch.stack(list(items)), case.processor), case.grids[0])
    return parts.flatten(-3).flatten(0, 2).sub_(127.5).div_(127.5).to(DTYPE)


def call_ms(call: Call, num_calls: int, num_batches: int = 7) -> float:
    times = []
    for _ in range(num_batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3 / num_calls)
    return statistics.median(times)


def device_and_host_ms(call: Call, num_calls: int, share_ms: float, num_batches: int = 5) -> tuple[float, float]:
    times, host_times = [], []
    for _ in range(num_batches):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        torch.cuda._sleep(int((share_ms * num_calls * 1.5 + 0.5) * 2e6))
        begin.record()
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        host_times.append((time.perf_counter() - start) * 1e3 / num_calls)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / num_calls)
    return statistics.median(times), statistics.median(host_times)


def timed(call: Call) -> dict[str, float]:
    """Milliseconds. Calls take turns among three sets of inputs when they are made by `rotating`."""
    for _ in range(6):
        call()
    share = call_ms(call, 30)
    device, host = device_and_host_ms(call, 12, share)
    return {"device": device, "host": host, "call": share, "done": call_ms(call, 1, 60)}


def rotating(sets: Sequence[Any], call: Callable[[Any], torch.Tensor]) -> Call:
    """Each call takes the next set of inputs, so that small ones are not always in the cache alone."""
    turn = 0

    def next_call() -> torch.Tensor:
        nonlocal turn
        turn += 1
        return call(sets[turn % len(sets)])

    return next_call


def on_device(pictures: Sequence[Pixels]) -> list[torch.Tensor]:
    """Views of one buffer, one after the other at odd addresses, as an upload leaves them."""
    buffer = torch.from_numpy(np.concatenate([np.zeros(1, np.uint8), *(p.reshape(-1) for p in pictures)])).to(DEVICE)
    starts = np.cumsum([1, *(p.size for p in pictures)]).tolist()
    return [buffer[start : start + p.size].view(p.shape) for start, p in zip(starts, pictures, strict=False)]


def check(case: Case, tiling: Tiling, items: Sequence[torch.Tensor], wanted: torch.Tensor) -> DevicePreprocessor:
    preprocessor = DevicePreprocessor(case.processor, DEVICE, DTYPE, tiling)
    for _ in range(2):
        out = torch.full_like(wanted, torch.nan)
        preprocessor.rows(items, case.grids, out)
        num_wrong = int((out != wanted).sum())
        assert num_wrong == 0, f"{num_wrong} of {out.numel()} values differ"
    return preprocessor


def run_case(case: Case, tilings: Sequence[Tiling], *, only_check: bool) -> dict[str, Any]:
    pictures = case.pictures()
    wanted = truth(case, pictures)
    sets = [on_device(pictures), *([] if only_check else [on_device(case.pictures(seed)) for seed in (1, 2)])]
    result: dict[str, Any] = {"case": case.name, "patches": len(wanted), "bytes": case.num_bytes, "ours": []}
    for tiling in tilings:
        entry: dict[str, Any] = {"tiling": asdict(tiling)}
        try:
            preprocessor = check(case, tiling, sets[0], wanted)
            entry["exact"] = True
            if not only_check:
                grids = case.grids
                entry |= timed(rotating(sets, lambda items: preprocessor.rows(items, grids)))  # noqa: B023
        except Exception as error:  # noqa: BLE001 - the others are still worth their time
            entry["error"] = f"{type(error).__name__}: {error}"[:600]
            traceback.print_exc(limit=3)
        result["ours"].append(entry)
    if not only_check:
        result["one by one"] = timed(rotating(sets, lambda items: one_by_one(case, items)))
        if len(set(case.sizes)) == 1:
            result["stacked"] = timed(rotating(sets, lambda items: stacked(case, items)))
        result["largest difference of torch"] = float((one_by_one(case, sets[0]).float() - wanted.float()).abs().max())
    return result


def new_mix_ms(case: Case) -> float:
    """A call's share of many, each with the items in another order, which only sizes that differ can tell."""
    items, grids = on_device(case.pictures()), case.grids
    preprocessor = DevicePreprocessor(case.processor, DEVICE, DTYPE)
    draw = np.random.default_rng(9)

    def call() -> torch.Tensor:
        order = orders.pop()
        return preprocessor.rows([items[index] for index in order], [grids[index] for index in order])

    orders = [draw.permutation(len(items)).tolist() for _ in range(220)]
    call()
    return call_ms(call, 30)


def host_parts_us() -> dict[str, float]:
    """Microseconds of the host for the parts of a call of four small images: the copy of the plan, one launch."""
    case = all_cases()[1]
    items, grids = on_device(case.pictures()), case.grids
    preprocessor = DevicePreprocessor(case.processor, DEVICE, DTYPE)
    preprocessor.rows(items, grids)
    mix = preprocessor._plans.mix(tuple(item.shape for item in items))
    plan = preprocessor._upload(mix.plan([item.data_ptr() for item in items], 0))
    out = torch.empty(mix.num_patches, 588, dtype=DTYPE, device=DEVICE)
    tiling, finish, channels = Tiling(), preprocessor._finish, preprocessor._channels
    sizes = (14, 588, tiling.finish_rows, tiling.finish_columns, False)
    parts: dict[str, Callable[[], object]] = {
        "plan": lambda: mix.plan([item.data_ptr() for item in items], 0),
        "upload": lambda: preprocessor._upload(mix.plan([item.data_ptr() for item in items], 0)),
        "launch": lambda: finish[(mix.finish_tiles,)](plan, 4, channels, out, *sizes, num_warps=tiling.num_warps),
        "out": lambda: torch.empty(mix.num_patches, 588, dtype=DTYPE, device=DEVICE),
    }
    times = {}
    for name, part in parts.items():
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            part()
        times[name] = (time.perf_counter() - start) * 5e3
        torch.cuda.synchronize()
    return times


def cold_ms(case: Case) -> float:
    """`done` of the first call for sizes never seen: tables made and uploaded. The kernels are compiled already."""
    items, grids = on_device(case.pictures()), case.grids
    times = []
    for _ in range(5):
        preprocessor = DevicePreprocessor(case.processor, DEVICE, DTYPE)
        times.append(call_ms(lambda: preprocessor.rows(items, grids), 1, 1))  # noqa: B023
    return statistics.median(times)


def describe(tiling: dict[str, Any]) -> str:
    across = f"{tiling['across_rows']}x{tiling['across_columns']}"
    finish = f"{tiling['finish_rows']}x{tiling['finish_columns']}"
    warps = "/".join(str(tiling[name]) for name in ("across_warps", "resized_warps", "num_warps"))
    return f"{across} {finish} w{warps}{' fused' if tiling['max_fused_pixels'] else ''}"


def report(result: dict[str, Any]) -> None:
    name = result["case"]
    floor = result["bytes"] / 4.0e12 * 1e6
    print(f"{name}: {result['patches']} patches, floor {floor:.1f} us; limit {LIMIT_MS.get(name, 0) * 1e3:.0f} us")
    lines = [(describe(entry["tiling"]), entry) for entry in result["ours"]]
    lines += [(kind, result[kind]) for kind in ("one by one", "stacked") if kind in result]
    for label, entry in lines:
        if "error" in entry:
            print(f"  {label:30} {entry['error'][:80]}")
        elif "call" in entry:
            times = "".join(f"{key} {entry[key] * 1e3:8.1f} us  " for key in ("device", "host", "call", "done"))
            print(f"  {label:30} {times}{'exact' if entry.get('exact') else ''}")
        else:
            print(f"  {label:30} exact")


def versions() -> dict[str, str]:
    import triton

    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu, interpreted"
    return {"torch": torch.__version__, "triton": triton.__version__, "device": device, "dtype": str(DTYPE)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for preprocess_gpu.json")
    parser.add_argument("--tilings", action="store_true", help="every tiling, not the default alone")
    parser.add_argument("--tiny", action="store_true", help="small pictures, checks alone")
    arguments = parser.parse_args()
    started = time.perf_counter()
    cases = tiny_cases() if arguments.tiny else all_cases()
    default = Tiling(64, 128, 64, 128) if arguments.tiny else Tiling()
    tilings = [default, replace(default, max_fused_pixels=1 << 30)] if arguments.tiny else [default]
    if arguments.tilings:
        tilings = [*TILINGS, *FUSED]
    whole: dict[str, Any] = {**versions(), "cases": []}
    for case in cases:
        result = run_case(case, tilings, only_check=arguments.tiny)
        if not arguments.tiny:
            result["cold"] = cold_ms(case)
            if len(set(case.sizes)) > 1:
                result["new mix"] = new_mix_ms(case)
        whole["cases"].append(result)
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / "preprocess_gpu.json").write_text(json.dumps(whole, indent=1))
    if not arguments.tiny:
        whole["host parts"] = host_parts_us()
    whole["seconds"] = time.perf_counter() - started
    print(json.dumps(whole))
    for result in whole["cases"]:
        report(result)
        for key in ("new mix", "cold"):
            if key in result:
                print(f"  {key:30} {result[key] * 1e3:.0f} us")
    print("host, us:", whole.get("host parts"))
    print({key: whole[key] for key in ("torch", "triton", "device", "seconds")})


if __name__ == "__main__":
    main()
