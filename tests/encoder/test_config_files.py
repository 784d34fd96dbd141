"""None"""

from dataclasses import replace
from typing import Any

import pytest

from encoder.config import PRESETS, EncoderConfig, ProcessorConfig
from encoder.config_files import parse_encoder_config, parse_processor_config, parse_video_processor
from encoder.errors import CheckpointError
from tests.encoder.config_tables import ORIGINAL, with_vision

SMALL = EncoderConfig(
    hidden_size=48, num_layers=3, num_heads=2, mlp_size=80, text_width=40, pos_height=8, pos_width=10, pos_time=2,
    projector_layer_norm_eps=1e-6,
)  # fmt: skip
TRANSFORMERS: dict[str, Any] = {
    "model_type": "kimi_k25",
    "projection_hidden_size": 48,
    "projection_layer_norm_eps": 1e-6,
    "text_config": {"hidden_size": 40, "num_hidden_layers": 61},
    "vision_config": {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 48,
        "intermediate_size": 80,
        "merge_kernel_size": [2, 2],
        "model_type": "kimi_k25_vision",
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "patch_size": 14,
        "pos_emb_height": 8,
        "pos_emb_time": 2,
        "pos_emb_width": 10,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
    },
}
NESTED: dict[str, Any] = {
    "auto_map": {"AutoProcessor": "processor.Processor"},
    "media_proc_cfg": {
        "in_patch_limit": 400,
        "patch_limit_on_one_side": 40,
        "in_patch_limit_each_frame": 100,
        "in_patch_limit_video": None,
        "merge_kernel_size": 2,
        "temporal_merge_kernel_size": 2,
        "sample_fps": 1.5,
        "fixed_output_tokens": None,
        "patch_size": 14,
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4, 0.5, 0.6],
        "timestamp_mode": "hh:mm:ss.fff",
    },
}
FLAT: dict[str, Any] = {
    "image_processor_type": "Kimi_K25ImageProcessor",
    "max_patches": 400,
    "size": {"max_height": 40, "max_width": 40},
    "merge_size": 2,
    "patch_size": 14,
    "image_mean": [0.1, 0.2, 0.3],
    "image_std": [0.4, 0.5, 0.6],
    "do_resize": True,
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
}
SMALL_PROCESSOR = ProcessorConfig(
    max_patches=400, max_patches_per_side=40, image_mean=(0.1, 0.2, 0.3), image_std=(0.4, 0.5, 0.6)
)


@pytest.mark.parametrize("data", [ORIGINAL, TRANSFORMERS], ids=["original", "transformers"])
def test_both_spellings_of_the_model_say_the_same(data: dict[str, Any]) -> None:
    assert parse_encoder_config(data) == SMALL


def test_what_is_omitted_is_the_true_shape() -> None:
    assert parse_encoder_config({"model_type": "kimi_k25", "vision_config": {}}) == PRESETS["kimi-k2.5"]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"model_type": "llava", "vision_config": {}}, "model_type"),
        ({"model_type": "kimi_k25"}, "vision_config"),
        (with_vision(ORIGINAL, vt_num_hidden_layers="3"), "vt_num_hidden_layers"),
        (with_vision(ORIGINAL, vt_num_hidden_layers=True), "vt_num_hidden_layers"),
        (with_vision(ORIGINAL, num_hidden_layers=4), "contradict"),
        (with_vision(ORIGINAL, merge_kernel_size=[2, 4]), "merge_kernel_size"),
        (with_vision(ORIGINAL, mm_hidden_size=64), "64"),
        (with_vision(ORIGINAL, merge_type="sd2"), "merge_type"),
        (with_vision(ORIGINAL, window_size=7), "window_size is not supported"),
        (with_vision(ORIGINAL, vt_num_attention_heads=5), "num_heads"),
        (with_vision(TRANSFORMERS, hidden_act="silu"), "hidden_act"),
        (with_vision(TRANSFORMERS, rope_parameters={"rope_type": "default"}), "rope_type"),
        (with_vision(TRANSFORMERS, rope_parameters={"rope_type": "axial", "factor": 2.0}), "factor"),
        ({**TRANSFORMERS, "projection_layer_norm_eps": "small"}, "projection_layer_norm_eps"),
        ({**TRANSFORMERS, "text_config": {"hidden_size": 40.5}}, "hidden_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_model_setting_is_named(data: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse_encoder_config(data)


def test_every_wrong_setting_is_named_at_once() -> None:
    with pytest.raises(CheckpointError, match=r"patch_size must be.*merge_type must be.*depth is not supported"):
        parse_encoder_config(with_vision(ORIGINAL, patch_size=1.5, merge_type="x", depth=3))


def test_the_original_processor_is_nested() -> None:
    config = parse_processor_config(NESTED)
    assert config == ProcessorConfig(
        max_patches=400,
        max_patches_per_side=40,
        max_patches_per_frame=100,
        frames_per_chunk=2,
        frames_per_second=1.5,
        image_mean=(0.1, 0.2, 0.3),
        image_std=(0.4, 0.5, 0.6),
    )
    assert parse_processor_config(NESTED["media_proc_cfg"]) == config


def test_the_processor_of_transformers_is_flat() -> None:
    assert parse_processor_config(FLAT) == SMALL_PROCESSOR


def test_an_empty_processor_is_the_default() -> None:
    assert parse_processor_config({}) == ProcessorConfig()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"fixed_output_tokens": 64}, "fixed_output_tokens"),
        ({"in_patch_limit_video": 9000}, "in_patch_limit_video"),
        ({"do_resize": False}, "do_resize"),
        ({"resample": 2}, "resample"),
        ({"rescale_factor": 0.5}, "rescale_factor"),
        ({"size": {"max_height": 40, "max_width": 41}}, "size"),
        ({"size": {"shortest_edge": 40}}, "size"),
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
        ({"max_patches": 0}, "max_patches"),
        ({"in_patch_limit": 300}, "contradict"),
        ({"media_proc_cfg": 3}, "media_proc_cfg"),
        ({"media_proc_cfg": {"max_patches": 401}}, "max_patches inside and outside media_proc_cfg contradict"),
        ({"media_proc_cfg": {"fixed_output_tokens": 64}}, "fixed_output_tokens"),
        ({"do_rescale": False}, "do_rescale"),
        ({"do_normalize": False}, "do_normalize"),
        ({"do_convert_rgb": False}, "do_convert_rgb"),
        ({"do_pad": True}, "do_pad"),
        ({"image_mean": [0.5, float("nan"), 0.5]}, "image_mean"),
        ({"image_std": [0.5, 0.5, float("inf")]}, "image_std"),
        ({"merge_size": [2, 3]}, "merge_size"),
        ({"fps": "2"}, "fps"),
        ({"sharpen": "yes"}, "sharpen"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_processor_setting_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse_processor_config({**FLAT, **settings})


def test_an_absent_nested_part_is_no_fault() -> None:
    assert parse_processor_config({**FLAT, "media_proc_cfg": None}) == SMALL_PROCESSOR
    assert parse_processor_config({**FLAT, "media_proc_cfg": {"max_patches": 400}}) == SMALL_PROCESSOR


def test_whole_numbers_are_the_same_settings() -> None:
    """A fingerprint is made of the canonical form, which must not tell 2 from 2.0."""
    whole = {"fps": 2, "image_mean": [0, 0, 0], "image_std": [1, 1, 1]}
    floats = {"fps": 2.0, "image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]}
    assert parse_processor_config(whole).canonical() == parse_processor_config(floats).canonical()
    ropes = [with_vision(TRANSFORMERS, rope_parameters={"rope_theta": theta}) for theta in (10000, 10000.0)]
    assert len({parse_encoder_config(data).canonical() for data in ropes}) == 1


VIDEO: dict[str, Any] = {
    "do_resize": True,
    "do_sample_frames": True,
    "fps": 1,
    "max_patches": 90,
    "return_metadata": False,
    "size": {"max_height": 40, "max_width": 40},
    "temporal_patch_size": 2,
    "video_processor_type": "Kimi_K25VideoProcessor",
}


def test_the_video_processor_of_transformers_holds_the_limits_of_frames() -> None:
    expected = replace(SMALL_PROCESSOR, max_patches_per_frame=90, frames_per_chunk=2, frames_per_second=1.0)
    assert parse_video_processor(VIDEO, "video", SMALL_PROCESSOR) == expected


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"size": {"max_height": 41, "max_width": 41}}, "video: max_patches_per_side must be what the image processor"),
        ({"patch_size": 16, "image_mean": [0.5, 0.5, 0.5]}, "patch_size, image_mean must be"),
        ({"max_patches": 0}, "max_patches_per_frame"),
        ({"num_frames": 8}, "num_frames is not supported"),
        ({"do_normalize": False}, "do_normalize"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_setting_of_the_video_processor_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse_video_processor({**VIDEO, **settings}, "video", SMALL_PROCESSOR)
