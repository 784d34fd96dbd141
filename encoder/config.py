"""What decides an embedding besides the weights and the content: the model's shape and the processor's settings.

Free of torch and numpy: client and coordinator import this module.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Final

from encoder.errors import CheckpointError

NUMERICS_VERSION: Final = 2
"""Raised by every change that alters the bytes of an embedding; part of the fingerprint."""

_ENCODER_LIMITS: Final = MappingProxyType(
    {
        "hidden_size": 1 << 20,
        "num_layers": 1024,
        "num_heads": 1 << 12,
        "mlp_size": 1 << 20,
        "text_width": 1 << 20,
        "patch_size": 128,
        "merge_size": 8,
        "pos_height": 1 << 16,
        "pos_width": 1 << 16,
        "pos_time": 1024,
        "layer_norm_eps": 1.0,
        "projector_layer_norm_eps": 1.0,
        "rope_theta": 1e15,
    }
)
"""The most that each setting may be: far beyond any model, and such that no setting by itself takes all memory."""
_PROCESSOR_LIMITS: Final = MappingProxyType(
    {
        "patch_size": 128,
        "merge_size": 8,
        "max_patches": 1 << 24,
        "max_patches_per_side": 1 << 20,
        "max_patches_per_frame": 1 << 24,
        "frames_per_chunk": 1024,
        "frames_per_second": 1e6,
    }
)
_CHANNEL_LIMIT: Final = 1e6
"""Of means and deviations, and of what they are divided by: float32 has room for what becomes of them."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Shape of a MoonViT-3D tower with its projector.

    `pos_height` and `pos_width` are the sides of the learned position table in patches; `pos_time` is the most frames
    that one item may have; `text_width` is the width of an embedding row. Raises `CheckpointError` naming every
    setting out of range.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_size: int
    text_width: int
    patch_size: int = 14
    merge_size: int = 2
    pos_height: int = 64
    pos_width: int = 64
    pos_time: int = 4
    layer_norm_eps: float = 1e-5
    projector_layer_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        faults = _out_of_range(self, _ENCODER_LIMITS)
        if not faults and self.hidden_size % (4 * self.num_heads):
            faults.append(
                f"hidden_size {self.hidden_size} must be a multiple of 4 x num_heads ({4 * self.num_heads}): "
                "rotary embedding turns pairs along two axes"
            )
        _refuse("model config", faults)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """Values of one patch row: three channels of a square."""
        return 3 * self.patch_size**2

    @property
    def merged_width(self) -> int:
        """Width of one merged token before the projector."""
        return self.hidden_size * self.merge_size**2

    def canonical(self) -> str:
        """One stable JSON line of every setting, for the fingerprint."""
        return _canonical(self)


@dataclass(frozen=True, slots=True)
class ProcessorConfig:
    """How pixels become patch rows.

    `max_patches` bounds an image before padding, `max_patches_per_frame` a video frame, `max_patches_per_side` either
    side of both. Channels are scaled to 0..1, then `(x - image_mean) / image_std`. Raises `CheckpointError` naming
    every setting out of range.
    """

    patch_size: int = 14
    merge_size: int = 2
    max_patches: int = 16384
    max_patches_per_side: int = 512
    max_patches_per_frame: int = 4096
    frames_per_chunk: int = 4
    frames_per_second: float = 2.0
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        faults = _out_of_range(self, _PROCESSOR_LIMITS)
        if not all(1 / _CHANNEL_LIMIT <= value <= _CHANNEL_LIMIT for value in self.image_std):
            faults.append(f"image_std must be {1 / _CHANNEL_LIMIT:g} to {_CHANNEL_LIMIT:g}, got {self.image_std}")
        if not all(abs(value) <= _CHANNEL_LIMIT for value in self.image_mean):
            faults.append(f"image_mean must be {-_CHANNEL_LIMIT:g} to {_CHANNEL_LIMIT:g}, got {self.image_mean}")
        _refuse("processor config", faults)

    @property
    def max_side(self) -> int:
        """Longest side of a resized image, in pixels."""
        return self.max_patches_per_side * self.patch_size

    @property
    def tile(self) -> int:
        """Both sides of a padded image are multiples of this many pixels."""
        return self.patch_size * self.merge_size

    def canonical(self) -> str:
        """One stable JSON line of every setting, for the fingerprint."""
        return _canonical(self)


def _canonical(config: EncoderConfig | ProcessorConfig) -> str:
    return json.dumps(asdict(config), sort_keys=True, separators=(",", ":"), allow_nan=False)


def check_frames(config: EncoderConfig, processor: ProcessorConfig) -> None:
    """Raise `CheckpointError` if the processor's chunks have more frames than the model has positions for."""
    if processor.frames_per_chunk > config.pos_time:
        raise CheckpointError(
            f"frames_per_chunk is {processor.frames_per_chunk} in the processor, but the model has positions for "
            f"{config.pos_time} frames (pos_time)"
        )


def _out_of_range(config: EncoderConfig | ProcessorConfig, limits: Mapping[str, float]) -> list[str]:
    """What is not above zero and at most its limit, NaN too."""
    numbers = {name: getattr(config, name) for name in limits}
    return [
        f"{name} must be positive, at most {limits[name]}, got {_short(value)}"
        for name, value in numbers.items()
        if not 0 < value <= limits[name]
    ]


def _short(value: float) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}... ({len(text)} digits)"


def _refuse(what: str, faults: list[str]) -> None:
    if faults:
        raise CheckpointError(f"{what}: " + "; ".join(faults))


PRESETS: Final = MappingProxyType(
    {
        "moonvit-tiny": EncoderConfig(hidden_size=128, num_layers=2, num_heads=4, mlp_size=512, text_width=256),
        "kimi-k2.5": EncoderConfig(hidden_size=1152, num_layers=27, num_heads=16, mlp_size=4304, text_width=7168),
    }
)
"""Models that need no checkpoint: their weights are random, from a fixed seed."""
