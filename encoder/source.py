"""Where a model comes from: a preset or a checkpoint folder. Free of torch: the coordinator resolves models too."""

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from encoder.config import PRESETS, EncoderConfig, ProcessorConfig, check_frames
from encoder.config_files import parse_encoder_config, parse_processor_config, parse_video_processor
from encoder.errors import CheckpointError
from encoder.files import exists, read_json, shown, unusable

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
CONFIG_FILE: Final = "config.json"
IMAGE_FILE: Final = "preprocessor_config.json"
VIDEO_FILE: Final = "video_preprocessor_config.json"
WHOLE_FILE: Final = "processor_config.json"
SETTINGS_FILES: Final = (CONFIG_FILE, IMAGE_FILE, VIDEO_FILE, WHOLE_FILE, INDEX_FILE)
"""What is read of a folder besides tensors, each if it is there."""


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
        check_frames(self.config, self.processor)


def resolve_model(model: str) -> ModelSource:
    """Return the preset of that name, or what the settings files of that folder say. Weights are not read.

    A folder needs `config.json`; without settings of a processor it is that of Kimi-K2.5. Raises `CheckpointError`,
    and nothing else, if `model` is neither, or if a settings file is missing, damaged, contradicts another or asks for
    what is unsupported.
    """
    if model in PRESETS:
        return ModelSource(model, PRESETS[model], ProcessorConfig(), None)
    folder = _folder(model)
    try:
        config = parse_encoder_config(read_json(folder / CONFIG_FILE))
        return ModelSource(model, config, read_processor(folder), folder)
    except RecursionError as error:  # two values are compared: they may be as deep as the parser goes
        raise CheckpointError(f"{folder}: settings of too great a depth") from error


def _folder(model: str) -> Path:
    neither = f"model {shown(model)} is neither a folder nor a preset ({', '.join(PRESETS)})"
    try:
        model.encode()
        folder = Path(model).expanduser()
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise CheckpointError(neither)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(neither) from error
    except OSError as error:
        raise unusable(f"model {model}", error) from error
    except (RuntimeError, ValueError) as error:  # no such user; no file can have such a name
        raise CheckpointError(f"{neither}: {error}") from error
    return folder


def read_processor(folder: Path) -> ProcessorConfig:
    """Return the processor's settings from a checkpoint folder.

    Those of images are in `preprocessor_config.json`, or in `processor_config.json` under `image_processor`, where
    transformers puts them when it saves a whole processor. Those of video frames are beside them, or transformers puts
    them in `video_preprocessor_config.json` or under `video_processor`. Raises `CheckpointError` if two files disagree.
    """
    whole = folder / WHOLE_FILE
    parts = read_json(whole) if exists(whole) else {}
    image = _agreed(
        {
            name: parse_processor_config(data, name)
            for name, data in _candidates(folder / IMAGE_FILE, parts, "image_processor")
        },
        ProcessorConfig(),
    )
    return _agreed(
        {
            name: parse_video_processor(data, name, image)
            for name, data in _candidates(folder / VIDEO_FILE, parts, "video_processor")
        },
        image,
    )


def _candidates(path: Path, parts: Mapping[str, Any], part: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if exists(path):
        yield path.name, read_json(path)
    if parts.get(part) is not None:
        if not isinstance(parts[part], Mapping):
            raise CheckpointError(f"{WHOLE_FILE}: {part} must be an object, got {shown(parts[part])}")
        yield f"{WHOLE_FILE}: {part}", parts[part]


def _agreed(found: Mapping[str, ProcessorConfig], default: ProcessorConfig) -> ProcessorConfig:
    if len(set(found.values())) > 1:
        raise CheckpointError(f"{' and '.join(found)} contradict each other")
    return next(iter(found.values()), default)
