"""Reads one JSON object of settings: takes what is known, and refuses what is left over. Free of torch."""

import math
from collections.abc import Mapping
from typing import Any, Final

from encoder.errors import CheckpointError
from encoder.files import shown

# What every model and processor of transformers carries along and no part of this encoder depends on.
_IRRELEVANT: Final = """
    _attn_implementation _name_or_path architectures attn_implementation auto_map chunk_size_feed_forward
    config_type data_format disable_grouping diversity_penalty do_sample_frames dtype encoder_no_repeat_ngram_size
    id2label image_processor_type initializer_range input_data_format label2id length_penalty max_length min_length
    model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences processor_class
    repetition_penalty return_dict return_metadata return_tensors temperature timestamp_mode top_k top_p torch_dtype
    transformers_version typical_p video_processor_type
"""

MAX_SHOWN: Final = 50
"""Faults that an error lists; the others are counted."""


class Settings:
    """One JSON object being read: keeps what was not read yet, and what is wrong.

    Every reader returns None for a setting that is not set or at fault; `finish` raises all faults as one error.
    """

    def __init__(self, where: str, data: object) -> None:
        if not isinstance(data, Mapping):
            raise CheckpointError(f"{where}: expected an object, got {shown(data)}")
        self._where = where
        self._unread = {str(name): value for name, value in data.items() if value is not None}
        self._faults: list[str] = []

    def take(self, *names: str) -> Any:
        """Return the value under whichever of these names is set, or None; two that differ are a fault."""
        found = {name: self._unread.pop(name) for name in names if name in self._unread}
        values = list(found.values())
        if any(differ(value, values[0]) for value in values):
            self._faults.append(f"{shown(found)} contradict each other")
        return values[0] if values else None

    def integers(self, table: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
        """Return the integer of each field of a table, which lists the names that it goes by."""
        return {field: self.integer(*names) for field, names in table.items()}

    def integer(self, *names: str) -> Any:
        """Return an integer, under whichever of these names it is set."""
        return self._checked(names, self.take(*names), int, "an integer")

    def number(self, *names: str) -> float | None:
        """Return a float whichever way the number is spelled: equal settings must have equal canonical forms."""
        value = self._checked(names, self.take(*names), int | float, "a number")
        if value is not None and (number := _finite(value)) is None:
            self._faults.append(f"{' or '.join(names)} must be a finite number, got {shown(value)}")
            return None
        return None if value is None else number

    def square(self, *names: str) -> Any:
        """Return the side of a kernel given as one integer or as two equal ones."""
        value = self.take(*names)
        side = value[0] if isinstance(value, list) and len(value) == 2 and value[0] == value[1] else value
        return self._checked(names, side, int, "one integer or two equal ones")

    def channels(self, name: str) -> tuple[float, ...] | None:
        """Return three numbers."""
        value = self.take(name)
        if value is None:
            return None
        parts = [_finite(part) for part in value] if isinstance(value, list) and len(value) == 3 else [None]
        if None in parts:
            self._faults.append(f"{name} must be three finite numbers, got {shown(value)}")
            return None
        return tuple(part for part in parts if part is not None)

    def side(self, name: str) -> Any:
        """Return the side of a limit given as an equal height and width."""
        value = self.take(name)
        if value is None:
            return None
        sides = dict(value) if isinstance(value, Mapping) else {}
        if set(sides) != {"max_height", "max_width"} or sides["max_height"] != sides["max_width"]:
            self._faults.append(f"{name} must be equal max_height and max_width, got {shown(value)}")
            return None
        return self._checked((name,), sides["max_height"], int, "an integer")

    def rope_theta(self) -> float | None:
        """Return the base of the rotary frequencies; its kind must be the one that the model has."""
        rope = self.take("rope_parameters")
        if rope is None:
            return None
        inner = Settings(f"{self._where}.rope_parameters", rope)
        inner.fixed({"rope_type": "axial"})
        theta = inner.number("rope_theta")
        inner.finish()
        return theta

    def fixed(self, table: Mapping[str, object]) -> None:
        """Take settings of which one value is supported."""
        for name, supported in table.items():
            value = self.take(name)
            if value is not None and value != supported:
                self._faults.append(f"{name} must be {supported!r}, got {shown(value)}")

    def finish(self) -> None:
        """Raise everything that is wrong; what nobody read and is switched on is not supported."""
        extra = {name: value for name, value in self._unread.items() if value not in (False, "", [], {})}
        self._faults += [
            f"{shown(name)[1:-1]} is not supported: {shown(extra[name])}"
            for name in extra
            if name not in _IRRELEVANT.split()
        ]
        self.raise_faults()

    def raise_faults(self) -> None:
        """Raise what is wrong so far."""
        if self._faults:
            raise CheckpointError(f"{self._where}: " + "; ".join(_first(self._faults)))

    def _checked(self, names: tuple[str, ...], value: Any, kind: Any, wanted: str) -> Any:
        if value is not None and not _is(value, kind):
            self._faults.append(f"{' or '.join(names)} must be {wanted}, got {shown(value)}")
            return None
        return value


def differ(one: object, other: object) -> bool:
    """Whether two values of a setting differ. NaN is unequal to itself, and is refused as what it is."""
    return one is not other and one != other


def _finite(value: object) -> float | None:
    """The value as a float, or None if it is no number, or none that a float can be."""
    if not _is(value, int | float):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _first(faults: list[str]) -> list[str]:
    more = [f"and {len(faults) - MAX_SHOWN} more"] if len(faults) > MAX_SHOWN else []
    return faults[:MAX_SHOWN] + more


def _is(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
