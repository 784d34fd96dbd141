"""Settings that change between their reading and that of the weights: a model that nobody wrote is not served."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from encoder import stamps
from encoder.errors import CheckpointError
from encoder.model import Encoder
from tests.mmcache.model_reports import change_settings, report_of
from tests.mmcache.weights import write_checkpoint

IMAGE_FILE = "preprocessor_config.json"
INDEX_FILE = "model.safetensors.index.json"


def touch_index(folder: Path) -> None:
    (folder / INDEX_FILE).write_bytes((folder / INDEX_FILE).read_bytes())


CHANGES: dict[str, Callable[[Path], object]] = {
    "config": change_settings,
    "processor": lambda folder: (folder / IMAGE_FILE).write_text(json.dumps({"in_patch_limit": 8})),
    "processor vanishes": lambda folder: (folder / IMAGE_FILE).unlink(),
    "processor of videos appears": lambda folder: (folder / "video_preprocessor_config.json").write_text("{}"),
    "whole processor appears": lambda folder: (folder / "processor_config.json").write_text("{}"),
    "index": touch_index,
    "single file appears": lambda folder: (folder / "model.safetensors").write_bytes(b""),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_files_that_change_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    folder = write_checkpoint(tmp_path / "model", 1, num_shards=3, processor={"in_patch_limit": 16})
    load = Encoder.load

    def load_slowly(*args: Any, **kwargs: Any) -> Encoder:
        encoder = load(*args, **kwargs)
        time.sleep(0.02)  # the file system's clock ticks
        change(folder)
        return encoder

    monkeypatch.setattr(Encoder, "load", load_slowly)
    with pytest.raises(CheckpointError, match="changed while they were read"):
        report_of(folder)


def test_settings_are_no_part_of_the_weights_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamps, "SETTLED_NS", -(1 << 62))
    folder = write_checkpoint(tmp_path / "model", 1, num_shards=3, processor={"in_patch_limit": 16})
    before = report_of(folder)
    CHANGES["processor"](folder)
    touch_index(folder)
    after = report_of(folder)
    assert before.identity == after.identity != ""
    assert before.processor_json != after.processor_json
