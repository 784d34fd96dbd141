"""Whether a checkpoint's settings say that its vision weights are quantized. Free of torch.

Only plain weights are read. Where a scheme lies in the settings of the text model, or leaves tower and projector out
by name, nothing here is in the way. What the tensors themselves show is for `weights` to refuse.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from encoder.errors import CheckpointError
from encoder.files import shown
from encoder.patterns import Matcher

SCHEMES: Final = ("quantization_config", "compression_config")
"""Settings that hold a quantization scheme."""
_EXCLUSIONS: Final = (
    "ignore",
    "ignored_layers",
    "modules_to_not_convert",
    "exclude_modules",
    "exclude",
    "llm_int8_skip_modules",
)
# These quantize the text model's blocks and name no others; if a tower is quantized after all, its tensors tell.
_TEXT_ONLY: Final = ("gptq", "auto-round")

Layer: TypeAlias = tuple[str, ...]
"""One linear layer under every name that it has in some spelling, the original checkpoint's first."""

_BLOCK_LAYERS: Final[tuple[Layer, ...]] = (
    ("encoder.blocks.{}.wqkv", "layers.{}.attn.q_proj", "layers.{}.attn.k_proj", "layers.{}.attn.v_proj"),
    ("encoder.blocks.{}.wo", "layers.{}.attn.proj"),
    ("encoder.blocks.{}.mlp.fc0", "layers.{}.mlp.fc1"),
    ("encoder.blocks.{}.mlp.fc1", "layers.{}.mlp.fc2"),
)
_PROJECTOR_LAYERS: Final[tuple[Layer, ...]] = (("proj.0", "linear_1", "in_proj"), ("proj.2", "linear_2", "out_proj"))


def refuse_quantized(data: Mapping[str, Any], num_layers: int) -> None:
    """Raise `CheckpointError` if a quantization scheme in the content of `config.json` covers vision layers.

    A scheme covers what its groups target and its exclusions do not name. The message counts the layers covered and
    names the first.
    """
    for where, scheme in _schemes(data):
        covered = _covered(scheme, num_layers)
        if covered:
            method = scheme["quant_method"] if isinstance(scheme.get("quant_method"), str) else "of no method"
            raise CheckpointError(
                f"config.json: {where} ({shown(method)[1:-1]}) covers {len(covered)} of the vision layers, first "
                f"{covered[0][0]}: only plain weights of vision_tower and mm_projector are read"
            )


def vision_layers(num_layers: int) -> Iterator[Layer]:
    """Yield the linear layers of a tower of that many blocks and of its projector."""
    for block in range(num_layers):
        for names in _BLOCK_LAYERS:
            yield _prefixed("vision_tower", tuple(name.format(block) for name in names))
    for names in _PROJECTOR_LAYERS:
        yield _prefixed("mm_projector", names)


def _prefixed(part: str, names: Layer) -> Layer:
    return tuple(f"{outer}{part}.{name}" for outer in ("", "model.") for name in names)


def _schemes(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    text = data.get("text_config")
    of_text = [text.get(name) for name in SCHEMES] if isinstance(text, Mapping) else []
    for where, settings in (("", data), ("vision_config.", data.get("vision_config"))):
        for name in SCHEMES:
            scheme = settings.get(name) if isinstance(settings, Mapping) else None
            if not scheme or scheme in of_text:  # a copy of the text model's own
                continue
            if not isinstance(scheme, Mapping):
                raise CheckpointError(f"config.json: {where}{name} must be an object, got {shown(scheme)}")
            yield where + name, scheme


def _covered(scheme: Mapping[str, Any], num_layers: int) -> list[Layer]:
    if scheme.get("quant_method") in _TEXT_ONLY:
        return []
    groups = scheme.get("config_groups")
    targeted = [_targets(group) for group in groups.values()] if isinstance(groups, Mapping) else [None]
    excluded = Matcher([pattern for name in _EXCLUSIONS for pattern in _strings(scheme.get(name))])
    return [
        layer
        for layer in vision_layers(num_layers)
        if any(target is None or target.matches(layer) for target in targeted) and not excluded.matches(layer)
    ]


def _targets(group: Any) -> Matcher | None:
    """What a group targets; None if that is every linear layer."""
    targets = _strings(group.get("targets")) if isinstance(group, Mapping) else []
    return Matcher(targets) if targets and "Linear" not in targets else None


def _strings(value: Any) -> list[str]:
    return [part for part in value if isinstance(part, str)] if isinstance(value, list) else []
