"""Where a model comes from: a preset or a checkpoint folder. Free of torch: the coordinator resolves models too."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encoder.config import PRESETS, EncoderConfig, ProcessorConfig
from encoder.config_files import parse_encoder_config, parse_processor_config
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

    A folder needs `config.json`; without `preprocessor_config.json` the processor is that of Kimi-K2.5. Raises
    `CheckpointError` if `model` is neither, or if a settings file is missing, damaged or asks for what is unsupported.
    """
    if model in PRESETS:
        return ModelSource(model, PRESETS[model], ProcessorConfig(), None)
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"model {model!r} is neither a folder nor a preset ({', '.join(PRESETS)})")
    config = parse_encoder_config(read_json(folder / "config.json"))
    processor = _processor(folder / "preprocessor_config.json")
    return ModelSource(model, config, processor, folder)


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file. Raises `CheckpointError` naming the file if it does not hold one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return data


def _processor(path: Path) -> ProcessorConfig:
    return parse_processor_config(read_json(path)) if path.exists() else ProcessorConfig()
