"""What decides an embedding besides the weights and the content: the model's shape and the processor's settings.

Free of torch and numpy: client and coordinator import this module.
"""

import json
import math
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Final

from encoder.errors import CheckpointError

NUMERICS_VERSION: Final = 1
"""Raised by every change that alters the bytes of an embedding; part of the fingerprint."""


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
        faults = _not_positive(self)
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
        faults = _not_positive(self)
        if not all(0 < value < math.inf for value in self.image_std):
            faults.append(f"image_std must be positive, got {self.image_std}")
        if not all(map(math.isfinite, self.image_mean)):
            faults.append(f"image_mean must be finite, got {self.image_mean}")
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


def _not_positive(config: EncoderConfig | ProcessorConfig) -> list[str]:
    numbers = {name: value for name, value in asdict(config).items() if isinstance(value, int | float)}
    return [f"{name} must be positive, got {value}" for name, value in numbers.items() if not 0 < value < math.inf]


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
