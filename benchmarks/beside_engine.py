"""An engine's decode steps on a GPU, alone and beside a sidecar that encodes there at a set rate.

    python -m benchmarks.beside_engine [--rate 20] [--side 448] [--seconds 8] [--model kimi-k2.5]

The engine is this process: a CUDA graph of small bfloat16 products, much like a decode step of a large model, replayed
one after another. Traffic comes from a process of its own: new pictures, none of them cached. Without MPS the processes
share the device by time slices, so this measures the scheduler as well as the sidecar. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.sidecars import running_sidecar

TRAFFIC = """
import sys, time
import numpy as np
import mmcache

socket, rate, side, seconds = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
draw = np.random.default_rng()
with mmcache.connect(socket) as client:
    done, handles, began = 0, [], time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        handles.append(client.submit([draw.integers(0, 256, (side, side, 3), np.uint8)], errors="return"))
        while handles and handles[0].poll():
            for lease in handles.pop(0).result():
                done += isinstance(lease, mmcache.Lease)
                if isinstance(lease, mmcache.Lease):
                    lease.release()
        time.sleep(max(0.0, began + (done + len(handles)) / rate - time.monotonic()))
    print(done / (time.monotonic() - began), len(handles), flush=True)
"""


class Steps(NamedTuple):
    """Milliseconds of an engine's steps, and pictures that were encoded meanwhile, a second."""

    p50: float
    p99: float
    longest: float
    encoded: float


class Engine:
    """A captured step: `num_layers` times two products of 64 rows."""

    def __init__(self, num_layers: int = 48, width: int = 4096, high_priority: bool = False) -> None:
        self.stream = torch.cuda.Stream(priority=-5 if high_priority else 0)
        weights = [torch.randn(width, width, device="cuda", dtype=torch.bfloat16) / width**0.5 for _ in range(4)]
        rows = torch.randn(64, width, device="cuda", dtype=torch.bfloat16)
        with torch.cuda.stream(self.stream):
            torch.mm(rows, weights[0])
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            out = rows
            for layer in range(2 * num_layers):
                out = torch.mm(out, weights[layer % 4])

    def run(self, seconds: float) -> list[float]:
        """Milliseconds of each step, as a scheduler that waits for its tokens sees them."""
        times = []
        end = time.perf_counter() + seconds
        with torch.cuda.stream(self.stream):
            while (begin := time.perf_counter()) < end:
                self.graph.replay()
                self.stream.synchronize()
                times.append((time.perf_counter() - begin) * 1e3)
        return times


def beside(engine: Engine, socket: Path | None, rate: float, side: int, seconds: float) -> Steps:
    """Run the engine, with traffic if there is a sidecar and a rate."""
    traffic = None
    if socket is not None and rate:
        command = [sys.executable, "-c", TRAFFIC, str(socket), str(rate), str(side), str(seconds + 2)]
        traffic = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        time.sleep(1.5)  # its start
    times = sorted(engine.run(seconds))
    encoded = float(traffic.communicate()[0].split()[0]) if traffic is not None else 0.0
    return Steps(statistics.median(times), times[int(len(times) * 0.99)], times[-1], encoded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=20, help="pictures a second")
    parser.add_argument("--side", type=int, default=448, help="of a picture")
    parser.add_argument("--seconds", type=float, default=8, help="of each run")
    parser.add_argument("--model", default="kimi-k2.5")
    options = parser.parse_args()
    date = datetime.datetime.now(datetime.UTC).date()
    print(f"{date}, {torch.cuda.get_device_name()}, torch {torch.__version__}, {options.model}, {vars(options)}")
    print(f"{'sidecar':<58} {'p50 ms':>8} {'p99 ms':>8} {'longest':>8} {'encoded/s':>10}")

    def show(name: str, steps: Steps) -> None:
        print(f"{name:<58} {steps.p50:8.2f} {steps.p99:8.2f} {steps.longest:8.2f} {steps.encoded:10.1f}", flush=True)

    engine = Engine()
    engine.run(1.0)
    show("none", beside(engine, None, 0, 0, options.seconds))
    variants = {
        "": {},
        "max_batch_patches 1024": {"max_batch_patches": "1024"},
        "max_batch_patches 1024, stream_priority high": {"max_batch_patches": "1024", "stream_priority": "high"},
        "max_patches_per_second 20000": {"max_patches_per_second": "20000", "max_batch_patches": "1024"},
        "max_patches_per_second 20000, device_bytes 3GiB": {
            "max_patches_per_second": "20000", "max_batch_patches": "1024", "device_bytes": "3GiB",
        },
    }  # fmt: skip
    for name, settings in variants.items():
        with running_sidecar(device="cuda", model=options.model, pool_bytes="2GiB", **settings) as socket:
            if not name:
                show("idle", beside(engine, socket, 0, 0, options.seconds))
            for rate in (options.rate, 4 * options.rate):
                steps = beside(engine, socket, rate, options.side, options.seconds)
                show(f"{rate:g}/s {name}", steps)


if __name__ == "__main__":
    main()
