import json
from pathlib import Path

import pytest

from encoder.config import PRESETS, ProcessorConfig
from encoder.errors import CheckpointError
from encoder.source import read_processor, resolve_model


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


def write(folder: Path, **files: object) -> None:
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data))


def test_processors_saved_as_one(tmp_path: Path) -> None:
    parts = {"image_processor": {"max_patches": 500}, "video_processor": {"max_patches": 90, "fps": 1}}
    write(tmp_path, processor_config=parts)
    expected = ProcessorConfig(max_patches=500, max_patches_per_frame=90, frames_per_second=1.0)
    assert read_processor(tmp_path) == expected


def test_processors_saved_apart(tmp_path: Path) -> None:
    write(tmp_path, preprocessor_config={"max_patches": 500}, video_preprocessor_config={"max_patches": 90})
    assert read_processor(tmp_path) == ProcessorConfig(max_patches=500, max_patches_per_frame=90)


def test_two_files_may_agree_and_must_not_disagree(tmp_path: Path) -> None:
    write(tmp_path, preprocessor_config={"max_patches": 500}, processor_config={"processor_class": "P"})
    assert read_processor(tmp_path).max_patches == 500
    write(tmp_path, processor_config={"image_processor": {"max_patches": 500}})
    assert read_processor(tmp_path).max_patches == 500
    write(tmp_path, processor_config={"image_processor": {"max_patches": 501}})
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json and processor_config\.json: image_processor"):
        read_processor(tmp_path)


def test_unsupported_settings_are_refused_wherever_they_are(tmp_path: Path) -> None:
    write(tmp_path, processor_config={"image_processor": {"fixed_output_tokens": 64}})
    with pytest.raises(CheckpointError, match=r"processor_config\.json: image_processor: fixed_output_tokens"):
        read_processor(tmp_path)
    write(tmp_path, processor_config={"video_processor": 3})
    with pytest.raises(CheckpointError, match="video_processor must be an object"):
        read_processor(tmp_path)
    write(tmp_path, processor_config={}, video_preprocessor_config={"in_patch_limit_video": 9})
    with pytest.raises(CheckpointError, match=r"video_preprocessor_config\.json: in_patch_limit_video"):
        read_processor(tmp_path)
