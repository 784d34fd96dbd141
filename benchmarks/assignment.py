"""How evenly items are spread over ranks: `encoder.sharding.assign` against the common rule, on the committed traces.

    python -m benchmarks.assignment [--sleep] [--items 8] [--trace NAME]

The common rule: the item with most patches first, to the rank with the fewest patches. Both get the same windows of a
trace, 4, 8 and 16 items a rank. Times are those of the cost model; it is fitted to what one H200 took for moonvit in
bfloat16, compiled and with CUDA graphs. A makespan is given as a multiple of max(sum / ranks, largest item), which no
assignment can beat and which not every window can reach: `least` is a bound that no assignment of whole items beats,
by branch and bound where that ends soon, else by counting (of k times as many items as ranks, and one, some rank has
k + 1).

--sleep runs it for real: a thread a rank, with an encoder that sleeps what the cost model predicts for each
microbatch, its launch included. Nothing of that depends on how many cores there are. Sum and largest item have launches
then, too: as few as the patch budget allows, and one a rank.
"""

from __future__ import annotations

import argparse
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Final, NamedTuple, TypeAlias

from benchmarks.make_traces import TRACES, read
from encoder.calibration import Measured, fit
from encoder.config import PRESETS, ProcessorConfig
from encoder.sharding import CostModel, assign
from encoder.sizing import grid_thw, num_patches

H200: Final = [
    Measured((1024,), 3.34e-3), Measured((1024,) * 4, 10.6e-3), Measured((256,) * 16, 9.5e-3),
    Measured((4096,) * 4, 54.3e-3), Measured((10764,), 56.9e-3),
]  # fmt: skip
RANKS: Final = (2, 4, 8)
ITEMS_PER_RANK: Final = (4, 8, 16)
MAX_BATCH_PATCHES: Final = 16_384
NUM_SLEPT: Final = 3
NUM_TIMED: Final = 7
MAX_NODES: Final = 20_000

Rule: TypeAlias = Callable[[Sequence[int], CostModel, int], list[int]]


class Spread(NamedTuple):
    """Mean and worst over windows."""

    mean: float
    worst: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} {self.worst:.3f}"


def spread(values: Sequence[float]) -> Spread:
    return Spread(fmean(values), max(values))


def most_patches_first(patches: Sequence[int], _: CostModel, num_ranks: int) -> list[int]:
    totals, ranks = [0] * num_ranks, [0] * len(patches)
    for item in sorted(range(len(patches)), key=lambda item: -patches[item]):
        ranks[item] = min(range(num_ranks), key=totals.__getitem__)
        totals[ranks[item]] += patches[item]
    return ranks


def by_cost(patches: Sequence[int], model: CostModel, num_ranks: int) -> list[int]:
    return assign([model.item_seconds(count) for count in patches], [0.0] * num_ranks)


def makespan(patches: Sequence[int], ranks: Sequence[int], model: CostModel, num_ranks: int) -> float:
    ends = [0.0] * num_ranks
    for count, rank in zip(patches, ranks, strict=True):
        ends[rank] += model.item_seconds(count)
    return max(ends)


def floor(patches: Sequence[int], model: CostModel, num_ranks: int) -> float:
    costs = [model.item_seconds(count) for count in patches]
    return max(sum(costs) / num_ranks, *costs)


def floor_with_launches(patches: Sequence[int], model: CostModel, num_ranks: int) -> float:
    costs = [model.item_seconds(count) for count in patches]
    num_launches = max(num_ranks, math.ceil(sum(patches) / MAX_BATCH_PATCHES))
    launch = model.seconds_per_launch
    return max((sum(costs) + num_launches * launch) / num_ranks, max(costs) + launch)


def counted(costs: Sequence[float], num_ranks: int) -> float:
    """A bound: among the k * ranks + 1 dearest items, some rank has k + 1. `costs` are falling."""
    counts = range(1, (len(costs) - 1) // num_ranks + 1)
    return max((sum(costs[k * num_ranks - k : k * num_ranks + 1]) for k in counts), default=0.0)


def least(patches: Sequence[int], model: CostModel, num_ranks: int) -> float:
    """A makespan that no assignment beats: the best possible one if the search ends, else a bound."""
    costs = sorted((model.item_seconds(count) for count in patches), reverse=True)
    bound = max(floor(patches, model, num_ranks), counted(costs, num_ranks))
    best = makespan(patches, by_cost(patches, model, num_ranks), model, num_ranks)
    num_nodes, loads = 0, [0.0] * num_ranks

    def search(item: int) -> None:
        nonlocal best, num_nodes
        num_nodes += 1
        if num_nodes > MAX_NODES or best <= bound:
            return
        if item == len(costs):
            best = max(loads)
            return
        tried: set[float] = set()
        for rank in sorted(range(num_ranks), key=loads.__getitem__):
            before = loads[rank]
            if before not in tried and before + costs[item] < best:
                tried.add(before)
                loads[rank] = before + costs[item]
                search(item + 1)
                loads[rank] = before

    search(0)
    return best if num_nodes <= MAX_NODES else bound


def windows(patches: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    yield from (patches[start : start + size] for start in range(0, len(patches) - size + 1, size))


def compare(name: str, patches: Sequence[int], model: CostModel) -> None:
    for num_ranks in RANKS:
        for per_rank in ITEMS_PER_RANK:
            parts = list(windows(patches, num_ranks * per_rank))
            floors = [floor(part, model, num_ranks) for part in parts]

            def ends(rule: Rule) -> list[float]:
                return [makespan(part, rule(part, model, num_ranks), model, num_ranks) for part in parts]  # noqa: B023

            common, ours = (
                spread([end / bound for end, bound in zip(ends(rule), floors, strict=True)])
                for rule in (most_patches_first, by_cost)
            )
            if per_rank == ITEMS_PER_RANK[0]:
                lowest = fmean(least(part, model, num_ranks) / bound for part, bound in zip(parts, floors, strict=True))
                possible = f"{lowest:.4f}"
            else:
                possible = "      "
            print(
                f"{name:<12} {num_ranks} ranks, {per_rank:>2} items each: common {common}, ours {ours}, "
                f"least {possible}, {micros_an_item(parts, model, num_ranks):4.1f} us an item"
            )


def micros_an_item(parts: Sequence[Sequence[int]], model: CostModel, num_ranks: int) -> float:
    times = []
    for part in parts:
        costs, idle = [model.item_seconds(count) for count in part], [0.0] * num_ranks
        shortest = math.inf
        for _ in range(NUM_TIMED):
            began = time.perf_counter()
            assign(costs, idle)
            shortest = min(shortest, time.perf_counter() - began)
        times.append(shortest / len(part))
    return fmean(times) * 1e6


def microbatches(share: Sequence[int]) -> list[list[int]]:
    """In the given order, under the patch budget; an item above it alone."""
    batches: list[list[int]] = []
    for count in share:
        if not batches or sum(batches[-1]) + count > MAX_BATCH_PATCHES:
            batches.append([])
        batches[-1].append(count)
    return batches


def slept(part: Sequence[int], ranks: Sequence[int], model: CostModel, num_ranks: int) -> float:
    """Seconds until the last rank has slept through its microbatches."""
    shares = [[count for count, rank in zip(part, ranks, strict=True) if rank == mine] for mine in range(num_ranks)]
    started = threading.Barrier(num_ranks + 1)

    def encode(share: Sequence[int]) -> None:
        seconds = [model.batch_seconds(batch) for batch in microbatches(share)]
        started.wait()
        for each in seconds:
            time.sleep(each)

    threads = [threading.Thread(target=encode, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    started.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def sleep(name: str, patches: Sequence[int], model: CostModel, per_rank: int) -> None:
    for num_ranks in RANKS:
        parts = list(windows(patches, per_rank * num_ranks))[:NUM_SLEPT]
        found = {
            rule: [
                slept(part, rule(part, model, num_ranks), model, num_ranks)
                / floor_with_launches(part, model, num_ranks)
                for part in parts
            ]
            for rule in (most_patches_first, by_cost)
        }
        common, ours = (spread(found[rule]) for rule in (most_patches_first, by_cost))
        gain = fmean(c / o for c, o in zip(*found.values(), strict=True))
        what = f"{num_ranks} ranks, {per_rank} items each, slept"
        print(f"{name:<12} {what}: common {common}, ours {ours}, ratio {gain:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sleep", action="store_true", help="run it with encoders that sleep")
    parser.add_argument("--items", type=int, default=8, choices=range(4, 65), help="a rank, when it sleeps")
    parser.add_argument("--trace", choices=list(TRACES), help="one trace alone")
    options = parser.parse_args()
    model, processor = fit(PRESETS["kimi-k2.5"], H200), ProcessorConfig()
    print(model)
    for name in [options.trace] if options.trace else TRACES:
        sizes = read(name)
        patches = [num_patches(grid_thw(size.width, size.height, processor, size.frames)) for size in sizes]
        largest, mean = max(patches), fmean(patches)
        print(f"{name}: {len(patches)} items of {min(patches)} to {largest} patches, {mean:.0f} on the mean")
        if options.sleep:
            sleep(name, patches, model, options.items)
        else:
            compare(name, patches, model)


if __name__ == "__main__":
    main()
