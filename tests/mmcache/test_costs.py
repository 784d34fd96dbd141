"""Predictions that learn from what batches take."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from encoder.sharding import CostModel
from mmcache.server.costs import NUM_ERRORS, Predictor, error_counters
from tests.mmcache.support import SidecarProcess, image

CALIBRATED = CostModel(0.003, 1e-6, 2e-11)
SIZES = [64, 256, 1024, 2048, 4096, 10_000, 16_384]


def batches(seed: int, count: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(SIZES, k=draw.randint(1, 8)) for _ in range(count)]


def taught(truth: CostModel, count: int, *, noise: float = 0.0, seed: int = 1) -> Predictor:
    predictor, draw = Predictor(CALIBRATED), random.Random(seed)
    for patches in batches(seed, count):
        predictor.observe(patches, truth.batch_seconds(patches) * draw.uniform(1 - noise, 1 + noise))
    return predictor


def worst_error(predictor: Predictor, truth: CostModel) -> float:
    pairs = [(predictor.batch_seconds(patches), truth.batch_seconds(patches)) for patches in batches(99, 50)]
    return max(abs(predicted / actual - 1) for predicted, actual in pairs)


def test_before_anything_is_known_the_calibration_holds() -> None:
    predictor = Predictor(CALIBRATED)
    assert predictor.item_seconds(1000) == CALIBRATED.item_seconds(1000)
    assert predictor.batch_seconds([5, 6]) == CALIBRATED.batch_seconds([5, 6])
    assert predictor.counters()["batches"] == 0


@pytest.mark.parametrize("factor", [0.3, 0.9, 1.0, 4.0])
def test_another_speed_is_learned_from_a_few_batches(factor: float) -> None:
    truth = CALIBRATED.scaled(factor)
    assert worst_error(taught(truth, 15), truth) < 0.03


@pytest.mark.parametrize("truth", [CostModel(0.01, 1e-6, 2e-11), CostModel(0.003, 5e-7, 1e-10, 0.001)])
def test_another_dependence_on_patches_is_learned_slowly(truth: CostModel) -> None:
    early, late = taught(truth, 20, noise=0.05), taught(truth, 400, noise=0.05)
    assert worst_error(late, truth) < 0.12
    assert worst_error(late, truth) < worst_error(early, truth) / 2


@pytest.mark.parametrize("factor", [1000.0, 0.001])
def test_one_batch_that_a_pause_made_late_changes_little(factor: float) -> None:
    predictor = taught(CALIBRATED, 200, noise=0.05)
    before = [predictor.batch_seconds(patches) for patches in batches(5, 20)]
    predictor.observe([4096, 256], factor * CALIBRATED.batch_seconds([4096, 256]))
    for patches in batches(6, 40):
        predictor.observe(patches, CALIBRATED.batch_seconds(patches))
    after = [predictor.batch_seconds(patches) for patches in batches(5, 20)]
    assert after == pytest.approx(before, rel=0.05)


def test_one_size_alone_teaches_the_speed_and_leaves_the_rest() -> None:
    truth = CALIBRATED.scaled(2)
    predictor = Predictor(CALIBRATED)
    for _ in range(300):
        predictor.observe([1024], truth.batch_seconds([1024]))
    assert predictor.batch_seconds([1024]) == pytest.approx(truth.batch_seconds([1024]), rel=0.01)
    assert worst_error(predictor, truth) < 0.1


def test_a_device_that_slows_down_for_good() -> None:
    predictor = taught(CALIBRATED, 300, noise=0.05)
    slower = CALIBRATED.scaled(3)
    for patches in batches(8, 20):
        predictor.observe(patches, slower.batch_seconds(patches))
    assert worst_error(predictor, slower) < 0.1


def test_items_side_by_side_are_learned_as_such() -> None:
    truth = CostModel(0.001, 3e-5, 3e-9, 0.002, num_at_once=4)
    predictor = Predictor(CostModel(0.002, 1e-5, 2e-9, 0.001, num_at_once=4))
    for patches in batches(3, 400):
        predictor.observe(patches, truth.batch_seconds(patches))
    assert worst_error(predictor, truth) < 0.05


def test_batches_that_say_nothing() -> None:
    predictor = Predictor(CALIBRATED)
    predictor.observe([], 1.0)
    predictor.observe([4], 0.0)
    assert predictor.counters()["batches"] == 0
    assert predictor.batch_seconds([4]) == CALIBRATED.batch_seconds([4])


def test_any_times_leave_predictions_that_grow() -> None:
    draw = random.Random(4)
    predictor = Predictor(CALIBRATED)
    for patches in batches(4, 300):
        predictor.observe(patches, 10 ** draw.uniform(-6, 3))
        assert 0 < predictor.item_seconds(4) < predictor.item_seconds(4000) < predictor.item_seconds(16_384)


def test_errors_are_those_of_predictions_made_before() -> None:
    one, other = Predictor(CostModel(0.0, 1.0, 0.0)), Predictor(CostModel(0.0, 1.0, 0.0))
    one.observe([8], 10.0)
    other.observe([12], 10.0)
    assert error_counters([one]) == {"batches": 1, "error_percent": 20.0, "bias_percent": -20.0}
    assert error_counters([one, other]) == {"batches": 2, "error_percent": 20.0, "bias_percent": 0.0}
    assert error_counters([]) == {"batches": 0, "error_percent": 0.0, "bias_percent": 0.0}
    for _ in range(2 * NUM_ERRORS):
        one.observe([8], 10.0)
    assert abs(one.counters()["error_percent"]) < 0.1, "the first ones are forgotten"


def test_a_sidecar_measures_once_and_learns(tmp_path: Path) -> None:
    """Real sidecars: what was measured is kept for the next start, and every batch is observed."""
    calibrations = tmp_path / "state" / "calibrations.json"
    with SidecarProcess(tmp_path) as sidecar, sidecar.connect() as client:
        for seed in range(3):
            client.encode([image(seed, 56, 56)])[0].release()
        cost = client.stats()["cost"]
        assert cost["batches"] == 3
        assert cost["error_percent"] >= abs(cost["bias_percent"]) > 0
        assert cost["ranks"][0]["seconds_per_patch"] > 0
    kept = calibrations.read_bytes()
    with SidecarProcess(tmp_path) as sidecar:
        assert sidecar.stats()["cost"]["batches"] == 0
    assert calibrations.read_bytes() == kept
    calibrations.write_bytes(kept[:-20])
    with SidecarProcess(tmp_path) as sidecar:
        assert sidecar.stats()["cost"]["ranks"][0]["seconds_per_patch"] > 0
    assert json.loads(calibrations.read_bytes()).keys() == json.loads(kept).keys(), (
        "it was damaged, and is written anew"
    )
