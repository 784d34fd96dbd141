"""When a rank believes costs that were measured before, and when it measures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from encoder.sharding import NUM_NUMBERS, CostModel
from mmcache.keys import checksum
from mmcache.server.calibrations import CalibrationCache
from tests.mmcache.model_reports import report_of
from tests.mmcache.weights import write_checkpoint

NUMBERS = [0.5, 0.25, 0.125, 0.0, 2.0]
TINY = Path("moonvit-tiny")


def test_known_costs_are_believed() -> None:
    measured = report_of(TINY)
    assert CostModel.from_numbers(measured.cost).item_seconds(4) > 0
    believed = report_of(TINY, costs={measured.cost_identity: NUMBERS})
    assert (believed.cost_identity, believed.cost) == (measured.cost_identity, NUMBERS)
    assert report_of(TINY, costs={"0" * 32: NUMBERS}).cost != NUMBERS


def test_the_identity_covers_what_decides_the_speed(tmp_path: Path) -> None:
    one, other = write_checkpoint(tmp_path / "one", 1), write_checkpoint(tmp_path / "other", 2)
    before = report_of(one)
    assert report_of(other).cost_identity == before.cost_identity, "other weights take as long"
    different = [report_of(TINY), report_of(one, dtype="bfloat16"), report_of(one, deterministic=True)]
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads + 1)
        different.append(report_of(one))
    finally:
        torch.set_num_threads(num_threads)
    assert len({report.cost_identity for report in [before, *different]}) == 5


def test_the_file_keeps_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "calibrations.json"
    cache = CalibrationCache(path)
    exact = CostModel(1 / 3, 1e-300, 2e-17, 0.1 + 0.2, 7).numbers()
    cache.add("a" * 32, exact)
    again = CalibrationCache(path)
    again.load()
    assert again.known == {"a" * 32: exact}


@pytest.mark.parametrize(
    "numbers",
    [
        NUMBERS[:-1],
        [*NUMBERS, 1.0],
        [-1.0, *NUMBERS[1:]],
        [float("inf"), *NUMBERS[1:]],
        [float("nan"), *NUMBERS[1:]],
        [0.5, 0.0, 0.0, 0.5, 1.0],
        [*NUMBERS[:-1], 0.0],
        [*NUMBERS[:-1], 1.5],
        ["0.5", *NUMBERS[1:]],
        "0.5",
        None,
    ],
)
def test_numbers_that_no_calibration_gives_are_not_used(tmp_path: Path, numbers: object) -> None:
    """Even with a checksum that is right."""
    path = tmp_path / "calibrations.json"
    entries = {"a" * 32: numbers}
    check = f"{checksum(json.dumps(entries, sort_keys=True).encode()):016x}"
    path.write_text(json.dumps({"version": 1, "calibrations": entries, "checksum": check}))
    path.chmod(0o600)
    cache = CalibrationCache(path)
    cache.load()
    assert cache.known == {}
    cache.add("b" * 32, NUMBERS)
    again = CalibrationCache(path)
    again.load()
    assert again.known == {"b" * 32: NUMBERS}


@pytest.mark.parametrize("numbers", [NUMBERS, [0, 1, 0, 0, 1]])
def test_numbers_make_the_same_model_again(numbers: Sequence[float]) -> None:
    model = CostModel.from_numbers(numbers)
    assert model.numbers() == list(numbers)
    assert len(numbers) == NUM_NUMBERS
