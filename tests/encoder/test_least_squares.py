from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder.least_squares import Moments

COEFFICIENTS = st.lists(st.floats(0.01, 10), min_size=3, max_size=3)


def fitted(rows: np.ndarray, targets: np.ndarray) -> list[float]:
    moments = Moments(rows.shape[1])
    for row, target in zip(rows.tolist(), targets.tolist(), strict=True):
        moments.add(row, target)
    return moments.fit()


@given(COEFFICIENTS, st.integers(0, 99))
def test_what_made_the_targets_is_found(coefficients: list[float], seed: int) -> None:
    scale = np.array([1, 1e3, 1e6])
    rows = np.random.default_rng(seed).uniform(0, 1, (20, 3)) * scale
    assert fitted(rows, rows @ (coefficients / scale)) * scale == pytest.approx(coefficients, rel=1e-5)


@given(st.integers(0, 199))
def test_no_other_choice_is_better(seed: int) -> None:
    """At the best coefficients that are not negative, the slope is zero in those above zero, and upward in others."""
    draw = np.random.default_rng(seed)
    rows, targets = draw.uniform(-1, 1, (12, 4)), draw.uniform(-1, 1, 12)
    found = np.array(fitted(rows, targets))
    slope = rows.T @ (rows @ found - targets)
    assert (found >= 0).all()
    assert slope[found > 0] == pytest.approx(0, abs=1e-9)
    assert (slope >= -1e-9).all()


def test_columns_that_say_nothing() -> None:
    rows = np.array([[1.0, 0.0, 2.0], [2.0, 0.0, 4.0], [3.0, 0.0, 6.0]])
    first, second, third = fitted(rows, np.array([2.0, 4.0, 6.0]))
    assert second == 0
    assert first + 2 * third == pytest.approx(2)
    assert min(first, third) == 0
    assert Moments(2).fit() == [0.0, 0.0]


def test_rows_fade_and_join() -> None:
    old, new = Moments(1), Moments(1)
    old.add([1.0], 1.0)
    new.add([1.0], 4.0)
    assert old.joined(new).fit() == pytest.approx([2.5])
    old.fade(0.5)
    assert old.joined(new).fit() == pytest.approx([3.0])
    assert old.fit() == pytest.approx([1.0]), "it stays as it is"


def test_errors_count_in_parts() -> None:
    moments = Moments(1)
    moments.add_relative([1.0], 1.0)
    moments.add_relative([100.0], 300.0)
    assert moments.fit()[0] == pytest.approx((1 + 1 / 3) / (1 + 1 / 9))
