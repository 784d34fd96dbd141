"""Where a model comes from: a preset or a checkpoint folder. Free of torch: the coordinator resolves models too."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encoder.config import PRESETS, EncoderConfig, ProcessorConfig
from encoder.config_files import parse_encoder_config, parse_processor_config, parse_video_processor
from encoder.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's settings and the folder of its weights; a preset has no folder."""

    name: str
    config: EncoderConfig
    processor: ProcessorConfig
    folder: Path | None

    def __post_init__(self) -> None:
        for setting in ("patch_size", "merge_size"):
            ours, theirs = getattr(self.config, setting), getattr(self.processor, setting)
            if ours != theirs:
                raise CheckpointError(f"model {self.name}: {setting} is {ours} in the model, {theirs} in its processor")


def resolve_model(model: str) -> ModelSource:
    """Return the preset of that name, or what the settings files of that folder say. Weights are not read.

    A folder needs `config.json`; without settings of a processor it is that of Kimi-K2.5. Raises `CheckpointError` if
    `model` is neither, or if a settings file is missing, damaged, contradicts another or asks for what is unsupported.
    """
    if model in PRESETS:
        return ModelSource(model, PRESETS[model], ProcessorConfig(), None)
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"model {model!r} is neither a folder nor a preset ({', '.join(PRESETS)})")
    config = parse_encoder_config(read_json(folder / "config.json"))
    return ModelSource(model, config, read_processor(folder), folder)


def read_processor(folder: Path) -> ProcessorConfig:
    """Return the processor's settings from a checkpoint folder.

    Those of images are in `preprocessor_config.json`, or in `processor_config.json` under `image_processor`, where
    transformers puts them when it saves a whole processor. Those of video frames are beside them, or transformers puts
    them in `video_preprocessor_config.json` or under `video_processor`. Raises `CheckpointError` if two files disagree.
    """
    whole = folder / "processor_config.json"
    parts = read_json(whole) if whole.exists() else {}
    image = _agreed(
        {
            name: parse_processor_config(data, name)
            for name, data in _candidates(folder / "preprocessor_config.json", parts, "image_processor")
        },
        ProcessorConfig(),
    )
    return _agreed(
        {
            name: parse_video_processor(data, name, image)
            for name, data in _candidates(folder / "video_preprocessor_config.json", parts, "video_processor")
        },
        image,
    )


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file. Raises `CheckpointError` naming the file if it does not hold one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return data


def _candidates(path: Path, parts: Mapping[str, Any], part: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path.exists():
        yield path.name, read_json(path)
    if parts.get(part) is not None:
        if not isinstance(parts[part], Mapping):
            raise CheckpointError(f"processor_config.json: {part} must be an object, got {parts[part]!r}")
        yield f"processor_config.json: {part}", parts[part]


def _agreed(found: Mapping[str, ProcessorConfig], default: ProcessorConfig) -> ProcessorConfig:
    if len(set(found.values())) > 1:
        raise CheckpointError(f"{' and '.join(found)} contradict each other")
    return next(iter(found.values()), default)
