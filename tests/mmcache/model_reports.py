"""What a rank reports of a checkpoint, and changes of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmcache.server.messages import ModelReport, StartRank
from mmcache.server.rank_model import load_model

START = StartRank(model="", device="cpu", dtype="float32", num_threads=1, pool_bytes=1 << 20, seed=1)


def report_of(
    folder: Path, known: dict[str, str] | None = None, costs: dict[str, list[float]] | None = None, **start: Any
) -> ModelReport:
    return load_model(START.model_copy(update=start), str(folder), known or {}, costs or {}).report


def change_one_weight(folder: Path) -> None:
    """The last bit of the last value of the file."""
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-4] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def change_settings(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    settings["vision_config"]["projector_ln_eps"] = 1e-4
    (folder / "config.json").write_text(json.dumps(settings))
