"""A full pool on the trace of benchmarks/allocator.py: real item sizes, Zipf popularity, 20 % leased at any time."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.allocator import GIB, Simulation, trace


@pytest.mark.parametrize("sizes", ["common", "zipf"])
def test_a_full_pool_is_well_used_and_no_request_evicts_much_more_than_it_needs(sizes: str) -> None:
    simulation = Simulation(8 * GIB, "window")
    outcome = simulation.run(trace(40_000, 2_400, sizes))
    simulation.allocator.check()
    assert len(outcome.ratios) > 5_000
    assert statistics.mean(outcome.used) >= 0.95
    assert max(outcome.ratios) <= 3.5
    assert outcome.num_refused == 0
