"""Real pictures for the demo and the tests: those that the scikit-image package ships, found without importing it."""

from __future__ import annotations

import importlib.util
from itertools import cycle
from pathlib import Path

PHOTOGRAPHS = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "rocket.jpg",
    "motorcycle_left.png",
    "hubble_deep_field.jpg",
    "retina.jpg",
)


def picture_folder() -> Path:
    """The folder of scikit-image's pictures."""
    spec = importlib.util.find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the pictures come with scikit-image: pip install 'mmcache[demo]'")
    return Path(spec.submodule_search_locations[0]) / "data"


def photographs() -> list[Path]:
    """The photographs, in colour, from 0.1 to 2 megapixels."""
    return [picture_folder() / name for name in PHOTOGRAPHS]


def make_strip(path: Path, width: int = 7400, height: int = 84) -> Path:
    """Write a panorama of the photographs that is wider than an image may be (7168 pixels), so it gets resized."""
    from PIL import Image

    tiles = []
    for name in photographs():
        with Image.open(name) as picture:
            tiles.append(picture.convert("RGB").resize((picture.width * height // picture.height, height)))
    strip = Image.new("RGB", (width, height))
    left = 0
    for tile in cycle(tiles):
        if left >= width:
            break
        strip.paste(tile, (left, 0))
        left += tile.width
    strip.save(path)
    return path
