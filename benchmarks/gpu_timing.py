"""How times on a GPU are taken: by its own events, medians, and for what is short by replays of a graph."""

from __future__ import annotations

import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

NUM_REPLAYS: Final = 7
LOST: Final = 3
"""Exit status of a process whose CUDA context a fault has ended."""
SLOW_MS: Final = 200.0
"""Runs that take longer are repeated three times only."""


def events_ms(run: Callable[[], object], repeats: int = 15) -> float:
    """Median milliseconds on the device of single runs, launched one after the other without a wait."""
    run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    if (time.perf_counter() - started) * 1e3 > SLOW_MS:
        repeats = min(repeats, 3)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in pairs))


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


class Findings:
    """What the variants of a part give, in a file as soon as it is known, so that no failure hides what was found.

    A variant whose name is in the file already is not run again: a part that a fault has ended is started anew, in a
    fresh process, and goes on behind the fault.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def attempt(self, name: str, run: Callable[[], Any]) -> None:
        """Put what a variant gives under its name, or how it failed. Ends the process if the device is lost."""
        if name in self.values:
            return
        self._put(name, {"error": "the process ended"})
        try:
            self._put(name, run())
        except Exception as error:  # noqa: BLE001
            where = traceback.extract_tb(error.__traceback__)[-1]
            self._put(name, {"error": f"{type(error).__name__}: {str(error)[:160]} ({where.name}:{where.lineno})"})
            if is_lost():
                sys.exit(LOST)
        print(f"  {name}: {self.values[name]}", flush=True)

    def _put(self, name: str, value: Any) -> None:
        self.values[name] = value
        self._path.write_text(json.dumps(self.values, default=str))


def is_lost() -> bool:
    """Whether the CUDA context of this process is beyond use."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").sum().item()
    except RuntimeError:
        return True
    return False
