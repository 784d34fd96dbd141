"""Against what transformers' own processors made of photographs: see benchmarks/make_golden.py and docs/fidelity.md."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from encoder.config import ProcessorConfig
from encoder.model import Encoder
from encoder.preprocess import Pixels, preprocess
from encoder.sizing import grid_thw, resized_size
from encoder.source import read_processor
from examples.pictures import picture_folder

DATA = Path(__file__).parent.parent / "data"
MAX_PATCHES = 64
PICTURES = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "ihc.png", "color.png")


@pytest.fixture(scope="module")
def golden() -> Mapping[str, np.ndarray]:
    with np.load(DATA / "processor_golden.npz", allow_pickle=False) as file:
        return dict(file)


def pixels(name: str) -> Pixels:
    with Image.open(picture_folder() / name) as picture:
        return np.asarray(picture.convert("RGB"))


def test_sizes_are_the_references(golden: Mapping[str, np.ndarray]) -> None:
    processor = ProcessorConfig()
    assert len(golden["sizes"]) > 1000
    for (width, height), result in zip(golden["sizes"].tolist(), golden["results"].tolist(), strict=True):
        _, rows, columns = grid_thw(width, height, processor)
        assert [*resized_size(width, height, processor), columns * 14, rows * 14] == result, f"{width}x{height}"


@pytest.mark.parametrize("name", PICTURES)
def test_photographs_are_nearly_the_references(golden: Mapping[str, np.ndarray], name: str) -> None:
    """Its resize is not PIL's, to which ours is equal: one level in a few values of a thousand, nothing more."""
    theirs, grid = golden[f"{name}:rows"], tuple(golden[f"{name}:grid"].tolist())
    ours, our_grid = preprocess(pixels(name), ProcessorConfig(max_patches=MAX_PATCHES))
    assert our_grid == grid
    apart = np.abs(ours.astype(int) - theirs)
    assert apart.max() == 1
    assert 0 < (apart > 0).mean() < 0.005


def test_levels_are_normalised_as_the_reference_does(golden: Mapping[str, np.ndarray]) -> None:
    levels = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 1, 1)
    ours = Encoder.load("moonvit-tiny")._normalised(levels).numpy()
    assert ours.shape == (256, 3)
    assert np.abs(ours - golden["levels"][:, None]).max() <= np.finfo(np.float32).eps


@pytest.mark.parametrize(
    "names",
    [
        ["preprocessor_config.json"],
        ["processor_config.json"],
        ["preprocessor_config.json", "video_preprocessor_config.json"],
        ["preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"],
    ],
    ids=len,
)
def test_settings_files_that_transformers_saves(tmp_path: Path, names: list[str]) -> None:
    files: dict[str, Any] = json.loads((DATA / "processor_files.json").read_text())
    for name in names:
        (tmp_path / name).write_text(json.dumps(files[name]))
    assert read_processor(tmp_path).canonical() == ProcessorConfig().canonical()


def test_settings_that_transformers_saves_are_read_not_ignored(tmp_path: Path) -> None:
    files: dict[str, Any] = json.loads((DATA / "processor_files.json").read_text())
    parts = files["processor_config.json"]
    parts["image_processor"]["max_patches"] = 500
    parts["video_processor"]["max_patches"] = 90
    (tmp_path / "processor_config.json").write_text(json.dumps(parts))
    assert read_processor(tmp_path) == ProcessorConfig(max_patches=500, max_patches_per_frame=90)
