"""What every test has: tests of a CUDA device are skipped, with the reason, where there is none."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.stand_in_driver import Driver


def has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:  # the tests of resizing run without it too
        return False
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    of_device = [item for item in items if item.get_closest_marker("gpu")]
    if of_device and not has_cuda():
        for item in of_device:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def driver() -> Iterator[Driver]:
    """Stands in for the driver of a device; see `tests/stand_in_driver.py`."""
    from tests import stand_in_driver

    with stand_in_driver.installed() as driver:
        yield driver
