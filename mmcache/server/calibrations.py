"""Costs that were measured before, so that a restart need not measure: by model, device, dtype and threads."""

from __future__ import annotations

from pathlib import Path

from encoder.sharding import CostModel
from mmcache.server.state_cache import StateCache


class CalibrationCache(StateCache[list[float]]):
    """Numbers of a `CostModel` by the identity of all that decides how fast a model is, 32 hex digits."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "calibrations", _checked)


def _checked(value: object) -> list[float]:
    if not isinstance(value, list) or not all(isinstance(number, int | float) for number in value):
        raise ValueError("it holds something else than calibrations")
    return CostModel.from_numbers(value).numbers()
