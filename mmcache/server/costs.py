"""What a rank's work will cost in seconds: predicted by a model that learns from every batch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from encoder.least_squares import Moments
from encoder.sharding import CostModel

NUM_RECENT: Final = 9
"""Batches whose median says how fast the device is now: four of them may be anything."""
STEP: Final = 0.3
"""The part of the way to that speed that predictions go with each batch."""
NUM_ERRORS: Final = 128
"""Batches whose errors are in the counters."""

REFIT_EVERY: Final = 32
KEEP: Final = 0.99
"""What a batch weighs in a fit, one batch later: about a hundred batches decide it."""
MAX_RATIO: Final = 2.0
"""A batch that took longer than others by this factor, or less, says nothing about how costs depend on patches."""

LOG_MAX_RATIO: Final = math.log(MAX_RATIO)

REFERENCE: Final[tuple[tuple[int, ...], ...]] = ((4,), (256,), (1024,), (4096,), (16384,), (256,) * 16)
REFERENCE_WEIGHT: Final = 2.0
"""Batches as the fit before predicts them are fitted too: of sizes that do not come, nothing else is known."""


@dataclass(frozen=True, slots=True)
class _Batch:
    patches: tuple[int, ...]
    seconds: float


class Predictor:
    """Predicts the seconds of items and batches on one rank, and learns from what they take.

    Two things are learned: how fast the device is now, from the median of a few batches, so that one that a pause made
    late changes little; and slowly, by fits over many batches, how the cost depends on the patches.
    """

    def __init__(self, calibrated: CostModel) -> None:
        self._fitted = calibrated
        self._log_pace = 0.0
        self._model = calibrated
        self._recent: deque[_Batch] = deque(maxlen=NUM_RECENT)
        self._log_ratios: deque[float] = deque(maxlen=NUM_RECENT)  # of the recent batches, under the fitted model
        self._moments = Moments(4)
        self._collected: list[_Batch] = []
        self.errors: deque[float] = deque(maxlen=NUM_ERRORS)
        self.num_batches = 0

    def item_seconds(self, patches: int) -> float:
        """Return the predicted seconds that an item of that many patches adds to a batch."""
        return self._model.item_seconds(patches)

    def batch_seconds(self, patches: Sequence[int]) -> float:
        """Return the predicted seconds of a batch of items, its launch included."""
        return self._model.batch_seconds(patches)

    def observe(self, patches: Sequence[int], seconds: float) -> None:
        """Learn what a batch took. One of no items, or of no time, says nothing."""
        predicted = self.batch_seconds(patches)
        if predicted <= 0 or seconds <= 0:
            return
        self.num_batches += 1
        self.errors.append(predicted / seconds - 1)
        batch = _Batch(tuple(patches), seconds)
        log_ratio = math.log(seconds / predicted) + self._log_pace
        self._recent.append(batch)
        self._log_ratios.append(log_ratio)
        if abs(log_ratio - median(self._log_ratios)) < LOG_MAX_RATIO:
            self._collected.append(batch)
            if len(self._collected) == REFIT_EVERY:
                self._refit()
        self._log_pace += STEP * (median(self._log_ratios) - self._log_pace)
        self._model = self._fitted.scaled(math.exp(self._log_pace))

    def counters(self) -> dict[str, float]:
        """The model and how well it did: see `error_counters`."""
        model = self._model
        return error_counters([self]) | {
            "seconds_per_launch": model.seconds_per_launch,
            "seconds_per_item": model.seconds_per_item,
            "seconds_per_patch": model.seconds_per_patch,
            "seconds_per_patch_squared": model.seconds_per_patch_squared,
        }

    def _collect(self) -> None:
        """Add what was collected to the sums, each as if what came after it had faded it."""
        collected, self._collected = self._collected, []
        self._moments.fade(KEEP ** len(collected))
        weight = 1.0
        for batch in reversed(collected):
            self._moments.add_relative(self._fitted.work(batch.patches), batch.seconds, weight)
            weight *= KEEP

    def _refit(self) -> None:
        self._collect()
        before = self._fitted.scaled(math.exp(median(self._log_ratios)))
        expected = Moments(4)
        for patches in REFERENCE:
            expected.add_relative(before.work(patches), before.batch_seconds(patches), REFERENCE_WEIGHT)
        launch, item, patch, squared = self._moments.joined(expected).fit()
        if patch + squared > 0:
            self._fitted = CostModel(launch, patch, squared, item, before.num_at_once)
            self._log_ratios.extend([_log_ratio(self._fitted, batch) for batch in self._recent])
            self._log_pace = median(self._log_ratios)


def error_counters(predictors: Sequence[Predictor]) -> dict[str, float]:
    """How far predictions were off over the last batches, each as it was before its batch was learned from.

    `error_percent`: mean of the absolute errors, in parts of what was measured. `bias_percent`: mean of the errors
    with their signs; above zero where less time was taken than predicted.
    """
    errors = [error for predictor in predictors for error in predictor.errors]
    return {
        "batches": sum(predictor.num_batches for predictor in predictors),
        "error_percent": round(100 * fmean(map(abs, errors)), 3) if errors else 0.0,
        "bias_percent": round(100 * fmean(errors), 3) if errors else 0.0,
    }


def _log_ratio(model: CostModel, batch: _Batch) -> float:
    return math.log(batch.seconds / model.batch_seconds(batch.patches))
