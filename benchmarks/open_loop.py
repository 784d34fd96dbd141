"""Latency of misses under open-loop load: requests come by chance at a set rate, whether earlier ones are done or not.

    python -m benchmarks.open_loop [--device cpu] [--model moonvit-tiny] [--sides 448] [--seconds 20] [--json FILE]
    python -m benchmarks.open_loop --plot FILE.svg RESULT.json ...

Capacity is measured first: pictures a second with many requests in flight. Then pictures, each new and a request of
its own, arrive by a Poisson process at 50, 80 and 95 % of it. A latency counts from the moment at which its request was
due, so that a request that is sent late because of others counts in full. Hashing and sending are in it.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import os
import platform
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mmcache
from benchmarks.sidecars import running_sidecar

LOADS = (0.5, 0.8, 0.95)
IN_FLIGHT = 64
QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}


class Pictures:
    """New pictures without end, of a set of sides in turn: only their first pixels differ."""

    def __init__(self, sides: Sequence[int]) -> None:
        draw = np.random.default_rng(11)
        self._bases = itertools.cycle([draw.integers(0, 256, (side, side, 3), np.uint8) for side in sides])
        self._numbers = itertools.count()

    def __next__(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        picture = next(self._bases).copy()
        picture.reshape(-1)[:8] = np.frombuffer(next(self._numbers).to_bytes(8, "little"), np.uint8)
        return picture


async def capacity(client: mmcache.AsyncClient, pictures: Pictures, seconds: float) -> float:
    """Pictures a second with `IN_FLIGHT` requests at any time."""
    end, done = time.monotonic() + seconds, 0

    async def ask() -> None:
        nonlocal done
        while time.monotonic() < end:
            (lease,) = await client.encode([next(pictures)])
            lease.release()
            done += 1

    began = time.monotonic()
    await asyncio.gather(*(ask() for _ in range(IN_FLIGHT)))
    return done / (time.monotonic() - began)


async def latencies(client: mmcache.AsyncClient, pictures: Pictures, rate: float, seconds: float) -> list[float]:
    """Milliseconds of each request that was due within the time."""
    chance, times = random.Random(7), []

    async def ask(due: float, picture: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        (lease,) = await client.encode([picture])
        lease.release()
        times.append((time.monotonic() - due) * 1e3)

    began = due = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        while (due := due + chance.expovariate(rate)) < began + seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.create_task(ask(due, next(pictures)))
    return times


async def measure(socket: Path, options: argparse.Namespace) -> dict[str, Any]:
    pictures = Pictures(options.sides)
    async with await mmcache.AsyncClient.connect(socket, timeout=600) as client:
        await capacity(client, pictures, 2.0)
        most = await capacity(client, pictures, options.seconds / 2)
        print(f"capacity: {most:.1f} pictures a second")
        loads = []
        for load in LOADS:
            times = sorted(await latencies(client, pictures, load * most, options.seconds))
            found = {name: times[min(len(times) - 1, int(len(times) * at))] for name, at in QUANTILES.items()}
            lag = (await client.stats())["loop_lag"]
            loads.append({"load": load, "requests": len(times), **found, "loop_lag": lag})
            shown = ", ".join(f"{name} {value:.1f}" for name, value in found.items())
            print(f"{load:.0%} of it, {len(times)} requests: {shown} ms", flush=True)
            print(f"  lag of the loop, p99 of the last minute: {lag['p99_ms']:.2f} ms", flush=True)
    return {"capacity": most, "loads": loads}


def plot(target: Path, results: Sequence[Path]) -> None:
    """Latency by load, a panel a result."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(results), figsize=(5 * len(results), 3.6), squeeze=False)
    for panel, path in zip(panels[0], results, strict=True):
        result = json.loads(path.read_text())
        for name in QUANTILES:
            percents = [100 * load["load"] for load in result["loads"]]
            panel.plot(percents, [load[name] for load in result["loads"]], marker="o", label=name)
        panel.set(title=result["setup"], xlabel="% of capacity", ylabel="ms", yscale="log")
        panel.title.set_fontsize(8)
        panel.grid(True, alpha=0.3)
        panel.legend()
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="moonvit-tiny")
    parser.add_argument("--ranks", default="1")
    parser.add_argument("--pool-bytes", default="512MiB")
    parser.add_argument("--sides", type=int, nargs="+", default=[448])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("results", type=Path, nargs="*")
    options = parser.parse_args()
    if options.plot:
        plot(options.plot, options.results)
        return
    device = f"{len(os.sched_getaffinity(0))} cores"
    if options.device == "cuda":
        import torch

        device = torch.cuda.get_device_name()
    date = datetime.datetime.now(datetime.UTC).date()
    setup = f"{date}, {device}, Python {platform.python_version()}, {options.model}, sides {options.sides}"
    print(setup)
    settings = {"device": options.device, "model": options.model, "ranks": options.ranks}
    with running_sidecar(**settings, pool_bytes=options.pool_bytes) as socket:
        result = asyncio.run(measure(socket, options))
    if options.json:
        options.json.write_text(json.dumps({"setup": setup, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
