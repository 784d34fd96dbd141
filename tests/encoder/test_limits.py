"""Settings beyond every model, and numbers that are none."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from encoder.config import PRESETS, EncoderConfig, ProcessorConfig
from encoder.config_files import parse_encoder_config, parse_processor_config, parse_video_processor
from encoder.errors import CheckpointError
from encoder.source import resolve_model
from tests.encoder.config_tables import ORIGINAL, with_vision

CONFIGS = [PRESETS["moonvit-tiny"], ProcessorConfig()]
CASES = [
    pytest.param(config, name, id=name)
    for config in CONFIGS
    for name, value in asdict(config).items()
    if not isinstance(value, tuple)
]


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, 1 << 62, 10**400], ids=str)
@pytest.mark.parametrize(("config", "name"), CASES)
def test_every_setting_has_bounds(config: EncoderConfig | ProcessorConfig, name: str, value: float) -> None:
    with pytest.raises(CheckpointError, match=f"{name} must be positive, at most") as caught:
        replace(config, **{name: value})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["image_mean", "image_std"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1e308, 1e7, 1e-320])
def test_channels_have_bounds(name: str, value: float) -> None:
    if (name, value) == ("image_mean", 1e-320):
        return
    with pytest.raises(CheckpointError, match=name):
        ProcessorConfig(**{name: (0.5, value, 0.5)})


HUGE = 10**400


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, HUGE], ids=lambda value: str(value)[:9])
def test_a_number_that_is_none_is_called_that(value: float) -> None:
    for data in (
        with_vision(ORIGINAL, projector_ln_eps=value),
        with_vision(ORIGINAL, rope_parameters={"rope_theta": value, "rope_type": "axial"}),
    ):
        with pytest.raises(CheckpointError, match=r"(eps|theta) must be a finite number, got") as caught:
            parse_encoder_config(data)
        assert "contradict" not in str(caught.value)
    processors: list[dict[str, Any]] = [
        {"fps": value},
        {"image_mean": [0.5, value, 0.5]},
        {"media_proc_cfg": {"fps": value}},
    ]
    for settings in processors:
        with pytest.raises(CheckpointError, match="finite number") as caught:
            parse_processor_config(settings)
        assert "contradict" not in str(caught.value)
    twice = {"fps": value, "media_proc_cfg": {"fps": value}}
    with pytest.raises(CheckpointError, match="fps must be a finite number"):
        parse_processor_config(json.loads(json.dumps(twice)))
    with pytest.raises(CheckpointError, match="finite number"):
        parse_video_processor({"fps": value}, "video", ProcessorConfig())


def test_nan_is_no_integer() -> None:
    with pytest.raises(CheckpointError, match="vt_num_hidden_layers must be an integer, got nan"):
        parse_encoder_config(with_vision(ORIGINAL, vt_num_hidden_layers=math.nan))


def test_more_frames_than_the_model_has_positions_for(tmp_path: Path) -> None:
    """Seen in the settings alone: a wrong `--model` is a wrong setting."""
    (tmp_path / "config.json").write_text(json.dumps(ORIGINAL))
    with pytest.raises(CheckpointError, match=r"frames_per_chunk is 4 in the processor.*2 frames \(pos_time\)"):
        resolve_model(str(tmp_path))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"temporal_patch_size": 2}))
    assert resolve_model(str(tmp_path)).processor.frames_per_chunk == 2


def test_many_faults_are_counted() -> None:
    data = with_vision(ORIGINAL, **{f"unknown_{number}": "x" * 10_000 for number in range(1000)})
    with pytest.raises(CheckpointError, match="and 950 more") as caught:
        parse_encoder_config(data)
    assert len(str(caught.value)) < 20_000
