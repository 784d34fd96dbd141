"""Patterns of layers' names, as quantization schemes have them, matched in a time that no pattern can stretch.

Three ways of naming layers are in use: expressions after `re:`, wildcards, and beginnings or parts of names. An
expression is not given to `re`, which tries ways through a pattern one after the other and may take for ever: here all
ways are followed at once. The places of a name that are reached so far are the bits of an integer, bit i before the
character i, and a part of a pattern is a function from such places to those that it reaches.

Free of torch.
"""

import re
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from encoder.errors import CheckpointError
from encoder.files import shown

MAX_LENGTH: Final = 1000
MAX_EXPRESSIONS: Final = 256
MAX_DEPTH: Final = 3
"""Quantifiers and look-aheads within each other: each level multiplies the time by the length of a name."""
SUPPORTED: Final = "literals, ., [...], \\d \\w \\s \\D \\W \\S, ( ), (?: ), |, ^, $, * + ? {m,n}, (?= ), (?! )"

_CLASSES: Final = "dwsDWS"
_QUANTIFIER: Final = re.compile(r"([*+?]|\{(\d+)\}|\{(\d*),(\d*)\})\??")
_CLASS: Final = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")


class _Name:
    """A name to be matched. `of`: the places where each of its characters stands; `end`: the place after the last."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.end = 1 << len(text)
        self.of: dict[str, int] = {}
        for index, character in enumerate(text):
            self.of[character] = self.of.get(character, 0) | 1 << index


_Part: TypeAlias = Callable[[_Name, int], int]


class Matcher:
    """Patterns of layers' names. Raises `CheckpointError` naming a pattern that is malformed or not supported."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._plain = {pattern for pattern in patterns if not pattern.startswith("re:") and "*" not in pattern}
        others = dict.fromkeys(pattern for pattern in patterns if pattern not in self._plain)
        if len(others) > MAX_EXPRESSIONS:
            raise CheckpointError(f"config.json: {len(others)} expressions that name layers, at most {MAX_EXPRESSIONS}")
        self._parts = [_expression(pattern) if pattern.startswith("re:") else _wildcard(pattern) for pattern in others]

    def matches(self, names: Sequence[str]) -> bool:
        """Whether a pattern matches one of these names."""
        return any(self._is_plain(name) for name in names) or any(
            part(name, 1) for name in map(_Name, names if self._parts else ()) for part in self._parts
        )

    def _is_plain(self, name: str) -> bool:
        """A plain pattern is the beginning of a name, or some of its parts between dots."""
        parts = name.split(".")
        starts = range(len(parts))
        return bool(self._plain) and (
            any(name[:length] in self._plain for length in range(len(name) + 1))
            or any(".".join(parts[start : end + 1]) in self._plain for start in starts for end in starts[start:])
        )


def _wildcard(pattern: str) -> _Part:
    """As file names are matched: `*`, `?` and `[...]`, to the end of the name."""
    _check_length(pattern)
    parts: list[_Part] = []
    start = 0
    while start < len(pattern):
        character, text = pattern[start], _CLASS.match(pattern.replace("[!", "[^"), start)
        if character == "*":
            parts.append(_repeated(_any, 0, None))
        elif character == "?":
            parts.append(_any)
        elif character == "[" and text is not None:
            parts.append(_one_of(_compiled(pattern, text[0]).fullmatch))
            start = text.end() - 1
        else:
            parts.append(_literal(character))
        start += 1
    return _sequence([*parts, _at_end])


def _expression(pattern: str) -> _Part:
    _check_length(pattern)
    _compiled(pattern, pattern[3:])
    return _Parser(pattern).parsed()


def _check_length(pattern: str) -> None:
    if len(pattern) > MAX_LENGTH:
        raise CheckpointError(f"config.json: {shown(pattern)}: {len(pattern)} characters, at most {MAX_LENGTH}")


def _compiled(pattern: str, text: str) -> "re.Pattern[str]":
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"config.json: {shown(pattern)} is not a regular expression: {error}") from error


class _Parser:
    """Reads an expression that is known to be well-formed."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._text = pattern[3:]
        self._at = 0

    def parsed(self) -> _Part:
        part, depth = self._alternatives()
        if depth > MAX_DEPTH or self._at < len(self._text):
            raise self._refused(f"more than {MAX_DEPTH} repetitions within each other")
        return part

    def _alternatives(self) -> tuple[_Part, int]:
        found = [self._sequence()]
        while self._took("|"):
            found.append(self._sequence())
        return _alternatives([part for part, _ in found]), max(depth for _, depth in found)

    def _sequence(self) -> tuple[_Part, int]:
        parts: list[_Part] = []
        deepest = 0
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            part, depth = self._atom()
            while quantifier := _QUANTIFIER.match(self._text, self._at):
                self._at = quantifier.end()
                if self._text.startswith("+", self._at):
                    raise self._refused("a possessive quantifier")
                least, most = _bounds(quantifier)
                part, depth = _repeated(part, least, most), depth + 1
            parts.append(part)
            deepest = max(deepest, depth)
        return _sequence(parts), deepest

    def _atom(self) -> tuple[_Part, int]:
        character = self._text[self._at]
        if character == "(":
            return self._group()
        if character == "[":
            found = _CLASS.match(self._text, self._at)
            assert found is not None, "well-formed"
            self._at = found.end()
            return _one_of(_compiled(self._pattern, found[0]).fullmatch), 0
        self._at += 1
        if character == "\\":
            return self._escaped()
        simple: dict[str, _Part] = {".": _any, "^": _at_start, "$": _at_end}
        return simple.get(character) or _literal(character), 0

    def _escaped(self) -> tuple[_Part, int]:
        character = self._text[self._at]
        self._at += 1
        if character in _CLASSES:
            return _one_of(re.compile(f"\\{character}").fullmatch), 0
        if character.isalnum():
            raise self._refused(f"\\{character}")
        return _literal(character), 0

    def _group(self) -> tuple[_Part, int]:
        kind = next((kind for kind in ("(?:", "(?=", "(?!") if self._took(kind)), "")
        if not kind:
            self._at += 1
            if self._text.startswith("?", self._at):
                raise self._refused(f"({self._text[self._at : self._at + 3]}")
        part, depth = self._alternatives()
        self._at += 1
        return (part, depth) if kind in ("", "(?:") else (_ahead(part, kind == "(?="), depth + 1)

    def _took(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _refused(self, what: str) -> CheckpointError:
        return CheckpointError(f"config.json: {shown(self._pattern)}: {what} is not supported; read are {SUPPORTED}")


def _bounds(quantifier: "re.Match[str]") -> tuple[int, int | None]:
    kind, exact, least, most = quantifier.group(1, 2, 3, 4)
    if kind in ("*", "+", "?"):
        return int(kind == "+"), 1 if kind == "?" else None
    return (int(exact), int(exact)) if exact else (int(least or 0), int(most) if most else None)


def _any(name: _Name, places: int) -> int:
    return (places & (name.end - 1)) << 1


def _literal(character: str) -> _Part:
    return lambda name, places: (places & name.of.get(character, 0)) << 1


def _one_of(passes: Callable[[str], object]) -> _Part:
    def follow(name: _Name, places: int) -> int:
        return (places & sum(standing for character, standing in name.of.items() if passes(character))) << 1

    return follow


def _at_start(_: _Name, places: int) -> int:
    return places & 1


def _at_end(name: _Name, places: int) -> int:
    return places & name.end


def _sequence(parts: Sequence[_Part]) -> _Part:
    def follow(name: _Name, places: int) -> int:
        for part in parts:
            if not places:
                return 0
            places = part(name, places)
        return places

    return follow


def _alternatives(parts: Sequence[_Part]) -> _Part:
    if len(parts) == 1:
        return parts[0]

    def follow(name: _Name, places: int) -> int:
        reached = 0
        for part in parts:
            reached |= part(name, places)
        return reached

    return follow


def _repeated(part: _Part, least: int, most: int | None) -> _Part:
    """As often as reaches anything new: a part goes forward or stays, so that is no more than a name has places."""

    def follow(name: _Name, places: int) -> int:
        for _ in range(least):
            before, places = places, part(name, places)
            if places in (0, before):
                break
        reached, times = places, least
        while places and times != most:
            places = part(name, places) & ~reached
            reached |= places
            times += 1
        return reached

    return follow


def _ahead(part: _Part, is_wanted: bool) -> _Part:
    def follow(name: _Name, places: int) -> int:
        kept = [1 << index for index in range(len(name.text) + 1) if places >> index & 1]
        return sum(place for place in kept if bool(part(name, place)) == is_wanted)

    return follow
