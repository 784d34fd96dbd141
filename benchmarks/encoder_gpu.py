"""The forward pass on one GPU: tests, the whole, its parts, and how near the result is to float32, in one run.

    python -m benchmarks.encoder_gpu [--only PART,...] [--output FOLDER] [--seconds 465] [--tiny]

Each part runs in a process of its own and prints to FOLDER/encoder_gpu.log; tables follow here, and
FOLDER/encoder_gpu.json has everything. Where a fault ends a part's CUDA context it goes on behind the fault in a fresh
process. Needs torch, triton, pytest; a wheel of FlashAttention and transformers are measured where they are
installed. `--tiny` checks on a CPU, under Triton's interpreter, that the forward pass agrees.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import torch

from benchmarks.encoder_gpu_tables import tables
from benchmarks.gpu_timing import LOST, Findings

MAX_STARTS: Final = 8
MODULES: Final = dict.fromkeys(("whole", "reference", "compiled", "tiny"), "whole") | {"encode": "encode"}
TESTED: Final = ("fa3", "triton", "torch-varlen", "sdpa", "auto")


@dataclass(frozen=True, slots=True)
class Part:
    """A command, and the seconds it may take; `is_own` if it is a part of this script, which writes findings."""

    name: str
    seconds: float
    command: tuple[str, ...] = ()

    @property
    def is_own(self) -> bool:
        return not self.command


def parts() -> list[Part]:
    """All parts, those first whose results decide most."""
    test = ("-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider")
    forward = [
        Part(
            f"tests of {name}",
            45,
            (
                *test,
                "tests/encoder/test_gpu_forward.py",
                "-k",
                f"[{name}" if name != "triton" else "[triton or every_remainder",
            ),
        )
        for name in TESTED
    ]
    preprocess = ("-m", "benchmarks.preprocess_gpu", "--tilings")
    tested = [
        f"tests/encoder/test_{name}.py"
        for name in ("gpu_encoder", "device_encoder", "device_forward", "device_preprocess", "gpu")
    ]
    return [
        *forward,
        Part("whole", 140),
        Part("encode", 60),
        Part("attention", 60),
        Part("preprocess", 40, preprocess),
        Part("reference", 60),
        Part("compiled", 90),
        *(Part(f"tests in {path}", 75, (*test, path)) for path in tested),
        Part("products", 30),
        Part("elementwise", 40),
    ]


def run_here(part: str, folder: Path) -> None:
    import importlib

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    run = getattr(importlib.import_module(f"benchmarks.encoder_gpu_{MODULES.get(part, 'parts')}"), part)
    with torch.inference_mode():
        run(Findings(found_path(folder, part)))


def found_path(folder: Path, part: str) -> Path:
    return folder / f"encoder_gpu_{part}.found"


def run_part(part: Part, folder: Path, seconds: float) -> dict[str, Any]:
    """Run a part, anew while faults end it, within its time."""
    started, path = time.perf_counter(), found_path(folder, part.name)
    code: int | str = LOST
    num_starts = 0
    path.unlink(missing_ok=True)
    own = ("-m", "benchmarks.encoder_gpu", "--part", part.name, "--output", str(folder))
    with (folder / "encoder_gpu.log").open("a") as log:
        log.write(f"\n==== {part.name}\n")
        log.flush()
        while was_lost(code) and num_starts < (MAX_STARTS if part.is_own else 1):
            left = min(part.seconds, seconds) - (time.perf_counter() - started)
            code = run_command((sys.executable, *(part.command or own)), log, left)
            num_starts += 1
    found = json.loads(path.read_text()) if path.exists() else {}
    path.unlink(missing_ok=True)
    took = round(time.perf_counter() - started, 1)
    return {"exit": code, "starts": num_starts, "seconds": took, "found": found}


def was_lost(code: int | str) -> bool:
    """Whether a fault ended the process, its CUDA context or all of it."""
    return code == LOST or (isinstance(code, int) and code < 0)


def run_command(command: tuple[str, ...], log: IO[str], seconds: float) -> int | str:
    try:
        return subprocess.run(command, timeout=max(seconds, 1), check=False, stdout=log, stderr=log).returncode
    except subprocess.TimeoutExpired:
        return "timed out"


def setup() -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda, "date": time.strftime("%F")}


def run_all(options: argparse.Namespace) -> None:
    deadline = time.perf_counter() + options.seconds
    results: dict[str, Any] = {"setup": setup()}
    print(results["setup"], flush=True)
    (options.output / "encoder_gpu.log").unlink(missing_ok=True)
    chosen = [part for part in parts() if not options.only or part.name in options.only.split(",")]
    for part in chosen:
        left = deadline - time.perf_counter()
        if left < 5:
            print(f"{part.name}: no time left", flush=True)
            continue
        results[part.name] = result = run_part(part, options.output, left)
        (options.output / "encoder_gpu.json").write_text(json.dumps(results, indent=1, default=str))
        print(f"{part.name}: exit {result['exit']}, {result['starts']} starts, {result['seconds']} s", flush=True)
        if not part.is_own:
            print_log(options.output, part)
    print(tables(results), flush=True)


def print_log(folder: Path, part: Part) -> None:
    """The last lines of a command's output."""
    lines = (folder / "encoder_gpu.log").read_text().split(f"==== {part.name}\n")[-1].splitlines()
    num_lines = 90 if part.name == "preprocess" else 4
    short = [line[:150] for line in lines if not line.startswith("{")]
    print("\n".join(short[-num_lines:]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"parts to run, of {', '.join(part.name for part in parts())}")
    parser.add_argument("--output", type=Path, default=Path(), help="folder for encoder_gpu.json and encoder_gpu.log")
    parser.add_argument("--seconds", type=float, default=465, help="for all of it")
    parser.add_argument("--tiny", action="store_true", help="check on a CPU, time nothing")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.tiny:
        found_path(options.output, "tiny").unlink(missing_ok=True)
        run_here("tiny", options.output)
    elif options.part:
        run_here(options.part, options.output)
    else:
        run_all(options)


if __name__ == "__main__":
    main()
