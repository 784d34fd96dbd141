"""How times on a GPU are taken: by its own events, medians, and for what is short by replays of a graph."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any, Final

import torch

NUM_REPLAYS: Final = 7


def events_ms(run: Callable[[], object], repeats: int = 15) -> float:
    """Median milliseconds on the device of single runs, launched one after the other without a wait."""
    for _ in range(2):
        run()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def graph_ms(run: Callable[[], object], inner: int = 10) -> float:
    """Milliseconds of one run, from replays of a graph of `inner` runs: free of what a launch costs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        run()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(inner):
            run()
    return events_ms(graph.replay, NUM_REPLAYS) / inner


def host_ms(run: Callable[[], object], repeats: int = 5) -> float:
    """Least milliseconds until a run is launched, with an idle device."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e3)
    torch.cuda.synchronize()
    return min(times)


def kernel_table(run: Callable[[], object], num_rows: int = 14) -> list[dict[str, Any]]:
    """The kernels of one run, longest first: name, launches, milliseconds."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.device_time_total)
    return [
        {"kernel": row.key[:90], "launches": row.count, "ms": round(row.device_time_total / 1e3, 4)}
        for row in rows[:num_rows]
    ]


def attempt(found: dict[str, Any], name: str, run: Callable[[], Any]) -> Any:
    """Put what a variant gives under its name, or how it failed: no variant ends the others."""
    try:
        found[name] = run()
    except Exception as error:  # noqa: BLE001
        where = traceback.extract_tb(error.__traceback__)[-1]
        found[name] = {"error": f"{type(error).__name__}: {str(error)[:300]} ({where.name}:{where.lineno})"}
    print(f"  {name}: {found[name]}", flush=True)
    return found[name]
