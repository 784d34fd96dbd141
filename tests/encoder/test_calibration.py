from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from encoder import calibration
from encoder.calibration import BATCHES, MIN_BATCHES, Measured, calibrate, fit, measure
from encoder.config import PRESETS
from encoder.model import Encoder
from encoder.sharding import CostModel, attention_flops_per_patch_squared, linear_flops_per_patch

CONFIG = PRESETS["kimi-k2.5"]
PATCHES = [(4 * side**2,) * count for side, count in BATCHES]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    loaded = Encoder.load("moonvit-tiny")
    loaded.warm_up()
    return loaded


def taken_by(truth: CostModel, batches: list[tuple[int, ...]]) -> list[Measured]:
    return [Measured(patches, truth.batch_seconds(patches)) for patches in batches]


@given(
    st.floats(1e-5, 1e-2), st.floats(1e-7, 1e-4), st.floats(0.2, 5), st.floats(1e-6, 1e-3), st.sampled_from([1, 2, 3])
)
def test_a_device_that_follows_the_model_is_found(
    launch: float, patch: float, attention: float, item: float, num_at_once: int
) -> None:
    """Where attention is up to 5 times as slow, or as quick, by the operation as the rest."""
    squared = attention * patch * attention_flops_per_patch_squared(CONFIG) / linear_flops_per_patch(CONFIG)
    truth = CostModel(launch, patch, squared, item, num_at_once)
    found = fit(CONFIG, taken_by(truth, PATCHES), num_at_once)
    for patches in [(9,), (17_784,), (500, 4000, 20), (256,) * 40]:
        assert found.batch_seconds(patches) == pytest.approx(truth.batch_seconds(patches), rel=1e-3)


def test_small_images_alone_leave_the_ratio_to_the_arithmetic() -> None:
    truth = CostModel.from_config(CONFIG, flops_per_second=1e12, seconds_per_launch=0.1)
    found = fit(CONFIG, taken_by(truth, [(4,), (256,)]))
    assert found.item_seconds(16_384) == pytest.approx(truth.item_seconds(16_384))
    assert (found.seconds_per_launch, found.seconds_per_item) == (pytest.approx(0.1), 0.0)


@given(st.lists(st.floats(1e-5, 10), min_size=len(PATCHES), max_size=len(PATCHES)))
def test_whatever_was_measured_a_larger_image_costs_more(seconds: list[float]) -> None:
    measured = [Measured(patches, taken) for patches, taken in zip(PATCHES, seconds, strict=True)]
    for count in (MIN_BATCHES, len(measured)):
        found = fit(CONFIG, measured[:count])
        assert 0 < found.item_seconds(4) < found.item_seconds(1024) / 256 * 1.01 + found.seconds_per_item
        assert min(found.seconds_per_launch, found.seconds_per_item, found.seconds_per_patch_squared) >= 0


def test_batches_by_growing_work() -> None:
    linear, squared = linear_flops_per_patch(CONFIG), attention_flops_per_patch_squared(CONFIG)
    flops = [sum(linear * count + squared * count**2 for count in patches) for patches in PATCHES]
    assert flops == sorted(flops)


def test_a_real_device(encoder: Encoder) -> None:
    costs = calibrate(encoder)
    assert 0 < costs.item_seconds(4) < costs.item_seconds(1024)
    assert costs.seconds_per_patch_squared > 0
    assert costs.num_at_once == 1


def test_items_that_are_encoded_one_by_one() -> None:
    encoder = Encoder.load("moonvit-tiny", deterministic=True)
    assert calibrate(encoder, budget_s=0.0).num_at_once == encoder.num_at_once == torch.get_num_threads()


def test_a_slow_device_measures_two(encoder: Encoder) -> None:
    assert [batch.patches for batch in measure(encoder, 0.0)] == [(4,), (64,)]


def test_a_device_that_has_no_memory_for_large_ones(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def bounded(encoder: Encoder, side: int, count: int) -> float:
        if side * side * count > most:
            raise torch.OutOfMemoryError("no memory")
        return 1e-6

    monkeypatch.setattr(calibration, "_seconds", bounded)
    most = 128
    assert [batch.patches for batch in measure(encoder, 60.0)] == PATCHES[:4]
    most = 1
    with pytest.raises(torch.OutOfMemoryError):
        measure(encoder, 60.0)
