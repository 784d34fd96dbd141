"""Patterns of layers' names against `re` and `fnmatch`, and those that would never end there."""

import random
import re
from contextlib import suppress
from fnmatch import fnmatchcase

import pytest

from encoder.errors import CheckpointError
from encoder.patterns import MAX_EXPRESSIONS, Matcher
from encoder.quantization import vision_layers

NAMES = [name for layer in vision_layers(3) for name in layer]
EXPRESSIONS = [
    r".*vision_tower.*", r".*self_attn.*", r".*mlp[.]fc[01]$",
    r"^(model\.)?vision_tower\.(encoder|layers).*\d+\.(mlp|attn)",
    r"vision_tower\.encoder\.blocks\.[0-2]{1,2}\.wo$", r"(?!.*fc0).*blocks", r"^(?!.*mlp).*$", r".*?w(o|qkv)", r".{40}",
    r"(a|v|i|s)+on_?t", r"\w+\W\w+\.blocks", r".{0,3}v", r"(.?){5,}b", r"[^.]*\.[^.]*$", r"[]a-z.]+0?", r"m{2}_",
    r"", r"|x",
    r"(?=.*wo)vision", r"(?:model.){0,1}mm", r".{,5}t", r"x*", r"\D+\d", r"vision_tower\S*\s?$", r"(model\.|)mm",
]  # fmt: skip
WILDCARDS = ["vision_tower*", "*mm_projector*", "*.[0-1].*wo", "*[!0-9]", "?odel.*", "*fc?", "[m]*", "*[]a]*", "*["]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_match_as_re_does(expression: str) -> None:
    matcher = Matcher([f"re:{expression}"])
    assert [matcher.matches([name]) for name in NAMES] == [bool(re.match(expression, name)) for name in NAMES]


@pytest.mark.parametrize("pattern", WILDCARDS)
def test_wildcards_match_as_fnmatch_does(pattern: str) -> None:
    matcher = Matcher([pattern])
    assert [matcher.matches([name]) for name in NAMES] == [fnmatchcase(name, pattern) for name in NAMES]


def drawn(choose: random.Random, depth: int = 0) -> str:
    kind = choose.random()
    if kind < 0.5 or depth > 3:
        return choose.choice(["a", "b", ".", "[ab]", "[^a]", r"\w", "c", "^", "$"])
    if kind < 0.65:
        return drawn(choose, depth + 1) + drawn(choose, depth + 1)
    if kind < 0.75:
        return f"({drawn(choose, depth + 1)}|{drawn(choose, depth + 1)})"
    if kind < 0.95:
        return f"({drawn(choose, depth + 1)}){choose.choice(['*', '+', '?', '{2}', '{1,2}', '{0,}', '*?', '{,2}'])}"
    return f"(?!{drawn(choose, depth + 1)})"


def test_random_expressions_match_as_re_does() -> None:
    choose = random.Random(1)
    num_compared = 0
    for _ in range(3000):
        expression = drawn(choose) + drawn(choose)
        name = "".join(choose.choices("abc", k=choose.randint(0, 7)))
        with suppress(CheckpointError):  # too many repetitions within each other
            found = Matcher([f"re:{expression}"]).matches([name])
            assert found == bool(re.match(expression, name)), (expression, name)
            num_compared += 1
    assert num_compared > 2500


@pytest.mark.parametrize(
    "expression",
    ["([a-z_.0-9]+)+!", ".*" * 20 + "!", "(((.*)*)*)!", "((a|.)*(.|b)*)*!", "(?!(.*)*!).*x!", "(.?){999}" * 60 + "!"],
)
def test_no_expression_takes_for_ever(expression: str) -> None:
    """Given to `re`, each would outlive the test run."""
    matcher = Matcher([f"re:{expression}"])
    assert not any(matcher.matches(layer) for layer in vision_layers(27))


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("(?i)a", "not supported"),
        ("(?P<a>b)", "not supported"),
        (r"(a)\1", "not supported"),
        ("(?<=a)b", "not supported"),
        ("a++", "possessive"),
        ("(?>a)", "not supported"),
        (r"\Ba", "not supported"),
        ("((((a)*)*)*)*", "more than 3 repetitions"),
        ("a" * 1001, "characters"),
        ("(", "not a regular expression"),
        ("a{1,99999999999999999999}", "not a regular expression"),
    ],
)
def test_what_is_refused_is_named(expression: str, named: str) -> None:
    with pytest.raises(CheckpointError, match=named) as caught:
        Matcher([f"re:{expression}"])
    assert "re:" in str(caught.value)


def test_many_patterns() -> None:
    plain = [f"language_model.layers.{number}" for number in range(100_000)]
    assert Matcher([*plain, "mm_projector"]).matches(["mm_projector.proj.0"])
    assert not Matcher(plain).matches(NAMES)
    with pytest.raises(CheckpointError, match="expressions that name layers"):
        Matcher([f"re:{number}" for number in range(MAX_EXPRESSIONS + 1)])
