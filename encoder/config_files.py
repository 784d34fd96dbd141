"""Readers of `config.json` and `preprocessor_config.json`, in the original spelling and in that of transformers.

A setting that is set and not supported is refused, never ignored: it would change embeddings. Free of torch.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from encoder.config import PRESETS, EncoderConfig, ProcessorConfig
from encoder.errors import CheckpointError

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
_PROCESSOR_FIXED: Final = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 3,
    "rescale_factor": 1 / 255,
}
# What every model and processor of transformers carries along and no part of this encoder depends on.
_IRRELEVANT: Final = """
    _attn_implementation _name_or_path architectures attn_implementation auto_map chunk_size_feed_forward
    config_type data_format disable_grouping diversity_penalty dtype encoder_no_repeat_ngram_size id2label
    image_processor_type initializer_range input_data_format label2id length_penalty max_length min_length
    model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences processor_class
    repetition_penalty return_dict return_tensors temperature timestamp_mode top_k top_p torch_dtype
    transformers_version typical_p
"""

Config = TypeVar("Config", EncoderConfig, ProcessorConfig)


def parse_encoder_config(data: Mapping[str, Any]) -> EncoderConfig:
    """Return the tower's shape from the content of `config.json`; omitted settings are those of Kimi-K2.5.

    Raises `CheckpointError` listing every setting that is malformed, contradictory, unknown or unsupported.
    """
    if data.get("model_type") != "kimi_k25":
        raise CheckpointError(f"config.json: model_type must be 'kimi_k25', got {data.get('model_type')!r}")
    vision = _Settings("config.json: vision_config", data.get("vision_config"))
    outer = _Settings("config.json", data)
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
        raise CheckpointError(f"config.json: the projector takes {projected} wide rows, not {config.hidden_size}")
    return config


def parse_processor_config(data: Mapping[str, Any]) -> ProcessorConfig:
    """Return the processor's settings from the content of `preprocessor_config.json`, nested or flat.

    Omitted settings are those of Kimi-K2.5. Raises `CheckpointError` listing every setting that is malformed,
    contradictory, unknown or unsupported.
    """
    nested = data.get("media_proc_cfg", {})
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"preprocessor_config.json: media_proc_cfg must be an object, got {nested!r}")
    outer = {name: value for name, value in data.items() if name != "media_proc_cfg"}
    settings = _Settings("preprocessor_config.json", {**outer, **nested})
    found = settings.integers(_PROCESSOR_NAMES)
    found["merge_size"] = settings.square("merge_kernel_size", "merge_size")
    found["frames_per_second"] = settings.number("sample_fps", "fps")
    found["image_mean"] = settings.channels("image_mean")
    found["image_std"] = settings.channels("image_std")
    if found["max_patches_per_side"] is None:
        found["max_patches_per_side"] = settings.side("size")
    settings.fixed(_PROCESSOR_FIXED)
    return _override(ProcessorConfig(), found, settings)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _text_width(outer: "_Settings") -> Any:
    value = outer.take("text_config")
    if value is None:
        return None
    text = _Settings("config.json: text_config", value)
    width = text.integer("hidden_size")
    text.raise_faults()
    return width


def _override(base: Config, found: Mapping[str, Any], settings: "_Settings") -> Config:
    settings.finish()
    return replace(base, **{name: value for name, value in found.items() if value is not None})


class _Settings:
    """One JSON object being read: keeps what was not read yet, and what is wrong."""

    def __init__(self, where: str, data: object) -> None:
        if not isinstance(data, Mapping):
            raise CheckpointError(f"{where}: expected an object, got {data!r}")
        self._where = where
        self._unread = {str(name): value for name, value in data.items() if value is not None}
        self._faults: list[str] = []

    def take(self, *names: str) -> Any:
        """Return the value under whichever of these names is set, or None; two that differ are a fault."""
        found = {name: self._unread.pop(name) for name in names if name in self._unread}
        values = list(found.values())
        if any(value != values[0] for value in values):
            self._faults.append(f"{found} contradict each other")
        return values[0] if values else None

    def integers(self, table: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
        return {field: self.integer(*names) for field, names in table.items()}

    def integer(self, *names: str) -> Any:
        return self._checked(names, self.take(*names), int, "an integer")

    def number(self, *names: str) -> Any:
        return self._checked(names, self.take(*names), int | float, "a number")

    def square(self, *names: str) -> Any:
        """Return the side of a kernel given as one integer or as two equal ones."""
        value = self.take(*names)
        side = value[0] if isinstance(value, list) and len(value) == 2 and value[0] == value[1] else value
        return self._checked(names, side, int, "one integer or two equal ones")

    def channels(self, name: str) -> tuple[float, ...] | None:
        value = self.take(name)
        if value is None:
            return None
        if not (isinstance(value, list) and len(value) == 3 and all(_is(part, int | float) for part in value)):
            self._faults.append(f"{name} must be three numbers, got {value!r}")
            return None
        return tuple(float(part) for part in value)

    def side(self, name: str) -> Any:
        value = self.take(name)
        if value is None:
            return None
        sides = dict(value) if isinstance(value, Mapping) else {}
        if set(sides) != {"max_height", "max_width"} or sides["max_height"] != sides["max_width"]:
            self._faults.append(f"{name} must be equal max_height and max_width, got {value!r}")
            return None
        return self._checked((name,), sides["max_height"], int, "an integer")

    def rope_theta(self) -> float | None:
        rope = self.take("rope_parameters")
        if rope is None:
            return None
        inner = _Settings(f"{self._where}.rope_parameters", rope)
        inner.fixed({"rope_type": "axial"})
        theta: float | None = inner.number("rope_theta")
        inner.finish()
        return theta

    def fixed(self, table: Mapping[str, object]) -> None:
        """Take settings of which one value is supported."""
        for name, supported in table.items():
            value = self.take(name)
            if value is not None and value != supported:
                self._faults.append(f"{name} must be {supported!r}, got {value!r}")

    def finish(self) -> None:
        """Raise everything that is wrong; what nobody read and is switched on is not supported."""
        extra = {name: value for name, value in self._unread.items() if value not in (False, "", [], {})}
        self._faults += [
            f"{name} is not supported: {extra[name]!r}" for name in extra if name not in _IRRELEVANT.split()
        ]
        self.raise_faults()

    def raise_faults(self) -> None:
        if self._faults:
            raise CheckpointError(f"{self._where}: " + "; ".join(self._faults))

    def _checked(self, names: tuple[str, ...], value: Any, kind: Any, wanted: str) -> Any:
        if value is not None and not _is(value, kind):
            self._faults.append(f"{' or '.join(names)} must be {wanted}, got {value!r}")
            return None
        return value


def _is(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
