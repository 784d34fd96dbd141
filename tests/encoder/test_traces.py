"""Assignments on the committed traces of item sizes, by the costs of an H200."""

from __future__ import annotations

from statistics import fmean

import pytest

from benchmarks.assignment import H200, by_cost, floor, makespan, most_patches_first, windows
from benchmarks.make_traces import FOLDER, TRACES, read, text_of, trace
from encoder.calibration import fit
from encoder.config import PRESETS, ProcessorConfig
from encoder.sizing import grid_thw, num_patches

MODEL = fit(PRESETS["kimi-k2.5"], H200)


def patches_of(name: str) -> list[int]:
    return [num_patches(grid_thw(size.width, size.height, ProcessorConfig(), size.frames)) for size in read(name)]


def test_the_cost_model_says_what_was_measured() -> None:
    for batch in H200:
        assert MODEL.batch_seconds(batch.patches) == pytest.approx(batch.seconds, rel=0.02)


@pytest.mark.parametrize("name", list(TRACES))
def test_traces_are_what_is_drawn(name: str) -> None:
    assert (FOLDER / f"{name}.csv").read_text() == text_of(trace(name))


@pytest.mark.parametrize("name", list(TRACES))
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_no_rank_works_much_longer_than_the_mean(name: str, num_ranks: int) -> None:
    parts = list(windows(patches_of(name), 8 * num_ranks))
    floors = [floor(part, MODEL, num_ranks) for part in parts]
    ours, common = (
        fmean(
            makespan(part, rule(part, MODEL, num_ranks), MODEL, num_ranks) / bound
            for part, bound in zip(parts, floors, strict=True)
        )
        for rule in (by_cost, most_patches_first)
    )
    assert ours <= 1.02
    assert ours < common
