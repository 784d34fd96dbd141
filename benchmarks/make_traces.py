"""Makes the traces of item sizes in `benchmarks/traces`: width, height, frames (0 for a picture), by order of arrival.

    python -m benchmarks.make_traces [--check]

Seeded, so that it always writes the same files. No trace was recorded from anybody's traffic: sizes are drawn from what
devices and formats produce, with weights that are estimates, stated at each with the reason.
"""

from __future__ import annotations

import argparse
import csv
import io
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

FOLDER: Final = Path(__file__).parent / "traces"
NUM_ITEMS: Final = 512


class Size(NamedTuple):
    """Of an item, in pixels. `frames`: of a video chunk; 0 for a picture."""

    width: int
    height: int
    frames: int = 0


Draw: TypeAlias = Callable[[random.Random], Size]

PAGES_INCHES: Final = {(8.27, 11.69): 5, (8.5, 11.0): 4, (5.83, 8.27): 1}
"""A4 and Letter are nearly all of office paper; some is A5."""
PAGE_DPI: Final = {72: 1, 96: 2, 144: 3, 150: 3, 200: 3, 300: 2}
"""PDF is rendered at 72, 96 or 144 (2 x 72) by libraries' defaults; scanners and fax use 150 to 300."""

SCREENS: Final = {
    (1920, 1080): 24, (1366, 768): 8, (1536, 864): 8, (1440, 900): 5, (1280, 720): 5, (2560, 1440): 8, (3840, 2160): 4,
    (2880, 1800): 5, (1170, 2532): 10, (1290, 2796): 6, (1080, 2400): 10, (1080, 1920): 4, (2048, 2732): 2,
}  # fmt: skip
"""Desktops by how common their resolutions are, laptops of two pixels a point, phones upright, one tablet."""

CAMERAS: Final = {
    (4032, 3024): 24, (4000, 3000): 10, (4080, 3072): 6, (5712, 4284): 4, (6000, 4000): 6, (3264, 2448): 4,
    (2048, 1536): 10, (1600, 1200): 10, (1280, 960): 8, (1024, 768): 8, (1200, 800): 6, (640, 480): 4,
}  # fmt: skip
"""Half as phones (12 megapixels, most of all) and cameras take them, half as messengers and web sites shrink them."""

THUMBNAIL_SIDES: Final = {128: 1, 150: 2, 160: 1, 200: 2, 224: 3, 256: 3, 320: 2, 336: 1, 400: 1, 448: 1}
"""What catalogues and crawled data sets store."""
RATIOS: Final = {1.0: 5, 4 / 3: 3, 3 / 2: 2, 16 / 9: 1}

VIDEOS: Final = {(640, 360): 4, (854, 480): 3, (1280, 720): 3, (1920, 1080): 1, (360, 640): 2, (720, 1280): 2}
"""Streaming's ladder, some of it upright."""


def chosen(draw: random.Random, weights: dict[tuple[int, int], int]) -> tuple[int, int]:
    return draw.choices(list(weights), list(weights.values()))[0]


def document(draw: random.Random) -> Size:
    """A page, one in eight on its side; half of them scans, whose sides differ by up to 2 % as they are cropped."""
    (width, height), *_ = draw.choices(list(PAGES_INCHES), list(PAGES_INCHES.values()))
    dpi, *_ = draw.choices(list(PAGE_DPI), list(PAGE_DPI.values()))
    crop = 0.02 if dpi >= 150 and draw.random() < 0.7 else 0.0
    sides = [round(side * dpi * (1 - draw.uniform(0, crop))) for side in (width, height)]
    return Size(*(sides if draw.random() > 0.125 else reversed(sides)))


def screenshot(draw: random.Random) -> Size:
    """Seven in ten of a whole screen; the others of a window or a region: any part of it from a fifth up."""
    width, height = chosen(draw, SCREENS)
    if draw.random() < 0.7:
        return Size(width, height)
    return Size(*(max(64, round(side * draw.uniform(0.2, 1.0))) for side in (width, height)))


def photograph(draw: random.Random) -> Size:
    """One in three upright, one in five cropped by hand."""
    sides = chosen(draw, CAMERAS)
    if draw.random() < 0.2:
        sides = (round(sides[0] * draw.uniform(0.4, 1.0)), round(sides[1] * draw.uniform(0.4, 1.0)))
    return Size(*(sides if draw.random() > 1 / 3 else reversed(sides)))


def thumbnail(draw: random.Random) -> Size:
    """The longer side is fixed, the other follows from the picture's shape; half of those not square are upright."""
    longer, *_ = draw.choices(list(THUMBNAIL_SIDES), list(THUMBNAIL_SIDES.values()))
    ratio, *_ = draw.choices(list(RATIOS), list(RATIOS.values()))
    sides = (longer, round(longer / ratio))
    return Size(*(sides if draw.random() < 0.5 else reversed(sides)))


def chunk(draw: random.Random) -> Size:
    """A chunk of video: four frames, fewer in one of ten, where a video ends."""
    width, height = chosen(draw, VIDEOS)
    return Size(width, height, 4 if draw.random() < 0.9 else draw.randint(1, 3))


def mixed(draw: random.Random) -> Size:
    """What a service for everybody sees: all of the above, a tenth of it video."""
    kinds: Sequence[Draw] = (document, screenshot, photograph, thumbnail, chunk)
    kind, *_ = draw.choices(kinds, (2, 2, 3, 2, 1))
    return kind(draw)


TRACES: Final[dict[str, Draw]] = {
    "documents": document, "screenshots": screenshot, "photographs": photograph, "thumbnails": thumbnail,
    "mixed": mixed,
}  # fmt: skip


def trace(name: str) -> list[Size]:
    """Draw the sizes of a trace; always the same."""
    draw = random.Random(f"mmcache {name}")
    return [TRACES[name](draw) for _ in range(NUM_ITEMS)]


def text_of(sizes: Sequence[Size]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(Size._fields)
    writer.writerows(sizes)
    return file.getvalue()


def read(name: str) -> list[Size]:
    """Read a trace as it is committed."""
    with (FOLDER / f"{name}.csv").open(newline="") as file:
        return [Size(*map(int, row.values())) for row in csv.DictReader(file)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not what is drawn")
    check = parser.parse_args().check
    for name in TRACES:
        path, text = FOLDER / f"{name}.csv", text_of(trace(name))
        if check and path.read_text() != text:
            sys.exit(f"{path.name} is not what is drawn")
        if not check:
            path.write_text(text)
        print(f"{path.name}: {NUM_ITEMS} items")


if __name__ == "__main__":
    main()
