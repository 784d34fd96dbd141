"""The allocator's claims: time per operation at 10,000 extents, and how well a full pool is used.

    python -m benchmarks.allocator [--quick]

The trace is fixed by its seed: requests over a catalogue of pictures whose sizes are real ones (64 to 4,446 tokens of
14,336 bytes) and whose popularity is Zipf's, while 20 % of the extents are leased at any time. The alternative it is
compared with evicts in the order of last use until something fits.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from ipc.allocator import Allocator

BYTES_PER_TOKEN = 14_336
LEASED = 0.2
SEED = 20_240_601
# Tokens of common picture sizes, from thumbnails to the largest: see `encoder`'s sizing rule.
COMMON_TOKENS = (64, 100, 144, 256, 272, 414, 576, 729, 1036, 1196, 1369, 1748, 2100, 2691, 3400, 4214, 4446)
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Request:
    """One item asked for: which, how large, what encoding it costs, and when."""

    item: int
    nbytes: int
    seconds: float
    now: float


@dataclass(slots=True)
class Outcome:
    """What one policy made of a trace, counted after the pool was full for the first time."""

    used: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    num_hits: int = 0
    num_requests: int = 0
    num_refused: int = 0
    lost_seconds: float = 0.0


def catalogue(num_items: int, rng: random.Random, sizes: str) -> list[int]:
    """Tokens of each item: `common` picture sizes and crops of them, or `zipf` (the chance falls with the size)."""
    if sizes == "zipf":
        return [round(64 * (4446 / 64) ** rng.random()) for _ in range(num_items)]
    jitter = [rng.choice((1.0, 1.0, rng.uniform(0.6, 1.0))) for _ in range(num_items)]
    return [max(64, round(rng.choice(COMMON_TOKENS) * factor)) for factor in jitter]


def trace(num_requests: int, num_items: int, sizes: str) -> Iterator[Request]:
    """Requests a millisecond apart, item k asked for with a chance of 1 / k."""
    rng = random.Random(SEED)
    tokens = catalogue(num_items, rng, sizes)
    weights = list(accumulate(1 / rank for rank in range(1, num_items + 1)))
    for index in range(num_requests):
        item = bisect_left(weights, rng.random() * weights[-1])
        n = tokens[item]
        yield Request(item, n * BYTES_PER_TOKEN, 1e-3 + n * 12e-6 + n * n * 1e-9, index * 1e-3)


def evict_in_order(allocator: Allocator, in_order: list[int], nbytes: int) -> tuple[int | None, list[int]]:
    """The alternative: free the extents least recently used, one after another, until the request fits."""
    evicted: list[int] = []
    for offset in in_order:
        allocator.free(offset)
        evicted.append(offset)
        if (place := allocator.allocate(nbytes)) is not None:
            return place, evicted
    return None, evicted


def evict_window(allocator: Allocator, now: float, nbytes: int) -> tuple[int | None, list[int]]:
    """What the pool does."""
    window = allocator.window(nbytes, now)
    for offset in window or ():
        allocator.free(offset)
    return (None if window is None else allocator.allocate(nbytes)), window or []


class Simulation:
    """A pool of cached items, 20 % of them leased, fed by a trace."""

    def __init__(self, capacity_bytes: int, policy: str) -> None:
        self.allocator = Allocator(capacity_bytes)
        self.policy = policy
        self.offsets: OrderedDict[int, int] = OrderedDict()  # item -> offset, least recently used first
        self.requests: dict[int, Request] = {}  # offset -> the last request of its item
        self.leased: list[int] = []
        self.is_leased: set[int] = set()
        self.rng = random.Random(SEED + 1)
        self.outcome = Outcome()
        self.is_full = False

    def run(self, requests: Iterator[Request]) -> Outcome:
        for request in requests:
            self.serve(request)
        return self.outcome

    def serve(self, request: Request) -> None:
        outcome, offset = self.outcome, self.offsets.get(request.item)
        if offset is None:
            offset = self.make_room(request)
            outcome.lost_seconds += request.seconds * self.is_full
        outcome.num_hits += self.is_full and request.item in self.offsets
        outcome.num_requests += self.is_full
        if offset is not None:
            self.offsets[request.item] = offset
            self.offsets.move_to_end(request.item)
            self.requests[offset] = request
            self.lease(offset)
        if self.is_full:
            outcome.used.append(self.allocator.bytes_used / self.allocator.capacity_bytes)

    def make_room(self, request: Request) -> int | None:
        offset = self.allocator.allocate(request.nbytes)
        if offset is not None:
            return offset
        self.is_full = True
        if self.policy == "window":
            offset, evicted = evict_window(self.allocator, request.now, request.nbytes)
        else:
            free_to_go = [place for place in self.offsets.values() if place not in self.is_leased]
            offset, evicted = evict_in_order(self.allocator, free_to_go, request.nbytes)
        gone = [self.requests.pop(place) for place in evicted]
        for old in gone:
            del self.offsets[old.item]
        self.outcome.num_refused += offset is None
        if gone:
            self.outcome.ratios.append(sum(old.nbytes for old in gone) / request.nbytes)
        return offset

    def lease(self, offset: int) -> None:
        if offset not in self.is_leased:
            self.allocator.keep(offset)
            self.is_leased.add(offset)
            self.leased.append(offset)
        while len(self.leased) > max(1, LEASED * len(self.offsets)):
            index = self.rng.randrange(len(self.leased))
            self.leased[index], self.leased[-1] = self.leased[-1], self.leased[index]
            done = self.leased.pop()
            self.is_leased.remove(done)
            request = self.requests[done]
            self.allocator.offer(done, request.seconds, request.now)


def quality(capacity_bytes: int, num_requests: int, sizes: str) -> None:
    num_items = max(200, 4 * capacity_bytes // (1000 * BYTES_PER_TOKEN))
    outcomes = {}
    for policy in ("window", "in order"):
        simulation = Simulation(capacity_bytes, policy)
        outcomes[policy] = outcome = simulation.run(trace(num_requests, num_items, sizes))
        print(
            f"  {sizes:>6} {capacity_bytes / GIB:6.1f} GiB {simulation.allocator.num_extents:6d} extents  {policy:8}"
            f"  in use mean {statistics.mean(outcome.used):5.1%} min {min(outcome.used):5.1%}"
            f"  evicted/needed mean {statistics.mean(outcome.ratios):4.2f} max {max(outcome.ratios):5.2f}"
            f"  hits {outcome.num_hits / outcome.num_requests:5.1%}  refused {outcome.num_refused}"
        )
    saved = outcomes["in order"].lost_seconds / outcomes["window"].lost_seconds
    print(f"{'':26}seconds of encoding, in order against window: {saved:.2f} times")


def full_allocator(num_extents: int, leased: float) -> tuple[Allocator, list[int], list[int]]:
    """A full pool of `num_extents` extents in random order, and the offsets of those offered and those kept."""
    rng = random.Random(SEED)
    sizes = [n * BYTES_PER_TOKEN for n in catalogue(num_extents, rng, "common")]
    allocator = Allocator(sum(sizes))
    offsets = [allocator.allocate(size) for size in sizes]
    places = [offset for offset in offsets if offset is not None]
    kept = set(rng.sample(places, round(leased * len(places))))
    for offset in places:
        if offset not in kept:
            allocator.offer(offset, rng.uniform(1e-3, 60e-3), -rng.expovariate(1 / 600))
    return allocator, [offset for offset in places if offset not in kept], sorted(kept)


def timed(num_calls: int, call: Callable[[int], object]) -> tuple[float, float]:
    """Median and 99th percentile of `call(i)`, in microseconds."""
    times = []
    for index in range(num_calls):
        start = time.perf_counter_ns()
        call(index)
        times.append((time.perf_counter_ns() - start) / 1e3)
    times.sort()
    return times[len(times) // 2], times[len(times) * 99 // 100]


def show(name: str, bound_us: float, result: tuple[float, float]) -> None:
    print(f"  {name:44} {result[0]:7.1f} µs  p99 {result[1]:7.1f} µs  bound {bound_us:.0f} µs")


def speed(num_extents: int, leased: float) -> None:
    print(f"time at {num_extents} extents, {leased:.0%} leased")
    allocator, offered, _ = full_allocator(num_extents, leased)
    for tokens in (64, 414, 1196, 4446):
        nbytes = tokens * BYTES_PER_TOKEN
        show(f"window search, {tokens} tokens", 300, timed(200, lambda _, n=nbytes: allocator.window(n, 1.0)))
    rng = random.Random(SEED)
    gone = rng.sample(offered, 1000)
    sizes = dict(allocator.extents())
    show("free", 20, timed(len(gone), lambda index: allocator.free(gone[index])))
    rng.shuffle(gone)
    show("allocate, fitting", 20, timed(len(gone), lambda index: allocator.allocate(sizes[gone[index]] // 2)))
    show("keep and offer", 20, timed(1000, lambda index: (allocator.keep(0), allocator.offer(0, 1.0, index))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    is_quick = parser.parse_args().quick
    num_requests, capacities_gib = (10_000, (1, 8)) if is_quick else (100_000, (1, 8, 32, 128))
    for leased in (LEASED, 0.0):
        speed(10_000, leased)
    print(f"use of a full pool: {num_requests} requests, {LEASED:.0%} of extents leased, seed {SEED}")
    for sizes in ("common", "zipf"):
        for capacity_gib in capacities_gib:
            quality(capacity_gib * GIB, num_requests, sizes)


if __name__ == "__main__":
    main()
