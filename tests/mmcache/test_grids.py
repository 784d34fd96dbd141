"""Grids of what clients bring ready made: all that the processor can make, and little more."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from encoder.config import ProcessorConfig
from encoder.sizing import Grid, grid_thw
from mmcache.server.grids import grid_fault

KIMI = ProcessorConfig()


@st.composite
def processors(draw: st.DrawFn) -> ProcessorConfig:
    return ProcessorConfig(
        patch_size=draw(st.sampled_from([1, 2, 14, 16])), merge_size=draw(st.integers(1, 4)),
        max_patches=draw(st.integers(1, 20_000)), max_patches_per_frame=draw(st.integers(1, 20_000)),
        max_patches_per_side=draw(st.integers(1, 600)),
    )  # fmt: skip


@example(processor=KIMI, width=34 * 14 + 13, height=482 * 14 + 13, num_frames=0)
@example(processor=ProcessorConfig(max_patches=16), width=20, height=14_000, num_frames=0)
@given(
    processor=processors(),
    width=st.integers(1, 20_000),
    height=st.integers(1, 20_000),
    num_frames=st.integers(0, 4),
)
@settings(max_examples=300, deadline=None)
def test_no_grid_that_the_processor_makes_is_refused(
    processor: ProcessorConfig, width: int, height: int, num_frames: int
) -> None:
    assert grid_fault(grid_thw(width, height, processor, num_frames), processor) == ""


@pytest.mark.parametrize(
    ("grid", "rule"),
    [
        ((0, 4, 6), "1 to 4 frames"),
        ((5, 4, 6), "1 to 4 frames"),
        ((1, 0, 6), "sides of 2 to 512 patches"),
        ((1, 4, 514), "sides of 2 to 512 patches"),
        ((1, 3, 6), "multiples of 2"),
        ((1, 132, 132), "132×132 are more than 16384 patches before padding (max_patches)"),
        ((1, 512, 512), "(max_patches)"),
        ((2, 68, 68), "68×68 are more than 4096 patches before padding (max_patches_per_frame)"),
    ],
)
def test_each_bound_is_named(grid: Grid, rule: str) -> None:
    assert rule in grid_fault(grid, KIMI)


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 128, 128), (1, 2, 512), (1, 32, 512), (4, 64, 64), (1, 68, 68)])
def test_what_is_within_the_bounds_has_no_fault(grid: Grid) -> None:
    assert grid_fault(grid, KIMI) == ""
