"""What `config.json` and the processors' settings say, in the original spelling and in that of transformers.

A setting that is set and not supported is refused, never ignored: it would change embeddings. Free of torch.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from encoder.config import PRESETS, EncoderConfig, ProcessorConfig
from encoder.errors import CheckpointError
from encoder.files import shown
from encoder.quantization import SCHEMES, refuse_quantized
from encoder.settings import Settings, differ

_VISION_NAMES: Final = {
    "hidden_size": ("hidden_size", "vt_hidden_size"),
    "num_layers": ("num_hidden_layers", "vt_num_hidden_layers"),
    "num_heads": ("num_attention_heads", "vt_num_attention_heads"),
    "mlp_size": ("intermediate_size", "vt_intermediate_size"),
    "patch_size": ("patch_size",),
    "pos_height": ("pos_emb_height", "init_pos_emb_height"),
    "pos_width": ("pos_emb_width", "init_pos_emb_width"),
    "pos_time": ("pos_emb_time", "init_pos_emb_time"),
    "text_width": ("text_hidden_size",),
}
_VISION_FIXED: Final = {
    "hidden_act": "gelu_pytorch_tanh",
    "projector_hidden_act": "gelu",
    "mm_projector_type": "patchmerger",
    "merge_type": "sd2_tpool",
    "pos_emb_type": "divided_fixed",
    "video_attn_type": "spatial_temporal",
}
_PROCESSOR_NAMES: Final = {
    "patch_size": ("patch_size",),
    "max_patches": ("max_patches", "in_patch_limit"),
    "max_patches_per_side": ("patch_limit_on_one_side",),
    "max_patches_per_frame": ("in_patch_limit_each_frame",),
    "frames_per_chunk": ("temporal_merge_kernel_size", "temporal_patch_size"),
}
_FRAME_NAMES: Final = {"max_patches": (), "max_patches_per_frame": ("max_patches",)}
_SHARED: Final = ("patch_size", "merge_size", "max_patches_per_side", "image_mean", "image_std")
_PROCESSOR_FIXED: Final = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 3,
    "rescale_factor": 1 / 255,
}
Config = TypeVar("Config", EncoderConfig, ProcessorConfig)


def parse_encoder_config(data: Mapping[str, Any]) -> EncoderConfig:
    """Return the tower's shape from the content of `config.json`; omitted settings are those of Kimi-K2.5.

    Raises `CheckpointError` listing every setting that is malformed, contradictory, unknown or unsupported, and if the
    vision weights are quantized.
    """
    if data.get("model_type") != "kimi_k25":
        raise CheckpointError(f"config.json: model_type must be 'kimi_k25', got {shown(data.get('model_type'))}")
    vision = Settings("config.json: vision_config", _without_scheme(data.get("vision_config")))
    outer = Settings("config.json", data)
    found = vision.integers(_VISION_NAMES)
    found["merge_size"] = vision.square("merge_kernel_size")
    found["rope_theta"] = vision.rope_theta()
    found["projector_layer_norm_eps"] = _first(
        vision.number("projector_ln_eps"), outer.number("projection_layer_norm_eps")
    )
    found["text_width"] = _first(found["text_width"], _text_width(outer))
    projected = _first(vision.integer("mm_hidden_size"), outer.integer("projection_hidden_size"))
    vision.fixed(_VISION_FIXED)
    outer.raise_faults()
    config = _override(PRESETS["kimi-k2.5"], found, vision)
    if projected not in (None, config.hidden_size):
        raise CheckpointError(
            f"config.json: the projector takes {shown(projected)} wide rows, not {config.hidden_size}"
        )
    refuse_quantized(data, config.num_layers)
    return config


def parse_processor_config(data: Mapping[str, Any], where: str = "preprocessor_config.json") -> ProcessorConfig:
    """Return the settings of an image processor, nested or flat; `where` is what errors call them.

    Omitted settings are those of Kimi-K2.5. Raises `CheckpointError` listing every setting that is malformed,
    contradictory, unknown or unsupported.
    """
    nested = data.get("media_proc_cfg") if data.get("media_proc_cfg") is not None else {}
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"{where}: media_proc_cfg must be an object, got {shown(nested)}")
    outer = {name: value for name, value in data.items() if name != "media_proc_cfg"}
    twice = sorted(name for name in outer.keys() & nested.keys() if differ(outer[name], nested[name]))
    if twice:
        raise CheckpointError(
            f"{where}: {shown(', '.join(twice))[1:-1]} inside and outside media_proc_cfg contradict each other"
        )
    return _processor({**outer, **nested}, where, _PROCESSOR_NAMES, ProcessorConfig())


def parse_video_processor(data: Mapping[str, Any], where: str, image: ProcessorConfig) -> ProcessorConfig:
    """Return an image processor's settings with those of frames, which transformers keeps in a video processor.

    Omitted settings are the image processor's. Raises `CheckpointError` as `parse_processor_config` does, and if the
    two differ in what they share.
    """
    video = _processor(data, where, {**_PROCESSOR_NAMES, **_FRAME_NAMES}, image)
    differ = [name for name in _SHARED if getattr(video, name) != getattr(image, name)]
    if differ:
        raise CheckpointError(f"{where}: {', '.join(differ)} must be what the image processor has")
    return video


def _processor(
    data: Mapping[str, Any], where: str, names: Mapping[str, tuple[str, ...]], base: ProcessorConfig
) -> ProcessorConfig:
    settings = Settings(where, data)
    found = settings.integers(names)
    found["merge_size"] = settings.square("merge_kernel_size", "merge_size")
    found["frames_per_second"] = settings.number("sample_fps", "fps")
    found["image_mean"] = settings.channels("image_mean")
    found["image_std"] = settings.channels("image_std")
    if found["max_patches_per_side"] is None:
        found["max_patches_per_side"] = settings.side("size")
    settings.fixed(_PROCESSOR_FIXED)
    return _override(base, found, settings)


def _without_scheme(vision: Any) -> Any:
    """The quantization scheme has a judge of its own."""
    return {k: v for k, v in vision.items() if k not in SCHEMES} if isinstance(vision, Mapping) else vision


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _text_width(outer: Settings) -> Any:
    value = outer.take("text_config")
    if value is None:
        return None
    text = Settings("config.json: text_config", value)
    width = text.integer("hidden_size")
    text.raise_faults()
    return width


def _override(base: Config, found: Mapping[str, Any], settings: Settings) -> Config:
    settings.finish()
    return replace(base, **{name: value for name, value in found.items() if value is not None})
