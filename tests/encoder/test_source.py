import json
from pathlib import Path

import pytest

from encoder.config import PRESETS, ProcessorConfig
from encoder.errors import CheckpointError
from encoder.source import resolve_model


def test_a_preset_by_name() -> None:
    source = resolve_model("moonvit-tiny")
    assert (source.config, source.processor, source.folder) == (PRESETS["moonvit-tiny"], ProcessorConfig(), None)


def test_neither_preset_nor_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither a folder nor a preset \(moonvit-tiny, kimi-k2\.5\)"):
        resolve_model(str(tmp_path / "missing"))


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "\ud800"], ids=["missing", "empty", "cut", "list", "binary"])
def test_an_unusable_settings_file_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        resolve_model(str(tmp_path))


def test_model_and_processor_must_agree(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "vision_config": {}}))
    assert resolve_model(str(tmp_path)).processor == ProcessorConfig()
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"patch_size": 16}))
    with pytest.raises(CheckpointError, match="patch_size is 14 in the model, 16 in its processor"):
        resolve_model(str(tmp_path))
