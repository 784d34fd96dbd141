"""What `encoder_gpu` found, as short tables: a line a variant, a column a shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

SHAPES: Final = ("1x1024", "4x1024", "16x256", "4x4096", "1x10764", "small mix", "video", "64 real")
MAX_ERRORS: Final = 30


def tables(results: dict[str, Any]) -> str:
    """All tables of a run."""
    parts = [
        ("whole: device ms (error)", "whole", lambda value: f"{value['ms']:.2f} {value.get('cosine', 1):.5f}"),
        ("whole: useful TFLOP/s", "whole", lambda value: f"{value['tflops']:.0f}"),
        ("whole: host ms, peak MiB", "whole", lambda value: f"{value['host_ms']:.2f} {value['peak_mib']:.0f}"),
        ("encode from host pixels: ms", "encode", lambda value: f"{value['ms']:.2f}"),
        ("others: ms", "reference", lambda value: f"{value:.2f}"),
        ("others: ms", "compiled", lambda value: f"{value:.2f}"),
        ("attention alone: ms", "attention", lambda value: f"{value['ms']:.4f}"),
    ]
    shown = [table(title, results[part]["found"], cell) for title, part, cell in parts if part in results]
    start = {name: value for name, value in results.get("encode", {}).get("found", {}).items() if ", " not in name}
    shown.append(f"\n{start}")
    errors = [line for part in dict.fromkeys(part for _, part, _ in parts) for line in failures(part, results)]
    return "\n".join([*shown, *errors[:MAX_ERRORS]])


def failures(part: str, results: dict[str, Any]) -> list[str]:
    """A line for each variant that failed."""
    found = results.get(part, {}).get("found", {})
    failed = {name: value["error"] for name, value in found.items() if is_failure(value)}
    return [f"! {part}: {name}: {str(error)[:150]}" for name, error in failed.items()]


def is_failure(value: Any) -> bool:
    return isinstance(value, dict) and "error" in value


def table(title: str, found: dict[str, Any], cell: Callable[[Any], str]) -> str:
    """Names are `shape, variant`."""
    cells: dict[str, dict[str, str]] = {}
    for name, value in found.items():
        shape, _, variant = name.partition(", ")
        if is_failure(value):
            continue
        try:
            cells.setdefault(variant, {})[shape] = cell(value)
        except (KeyError, TypeError, ValueError):
            continue
    used = [shape for shape in SHAPES if any(shape in row for row in cells.values())]
    lines = [f"\n{title:28}" + "".join(f"{shape:>15}" for shape in used)]
    lines += [f"{variant:28}" + "".join(f"{row.get(s, '-'):>15}" for s in used) for variant, row in cells.items()]
    return "\n".join(lines)
