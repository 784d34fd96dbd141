"""Makes the golden data of transformers' own processors, and measures how far mmcache's pixels are from theirs.

    python -m benchmarks.make_golden [--folder tests/data]

Those processors need torchvision, which the tests do without: run this in an environment of its own, at the root of
the repository.

    pip install torch==2.13.0 transformers==5.24.0 pillow==12.3.0 scikit-image
    pip install --no-deps torchvision==0.28.0

Where that torchvision has no compiled operators (beside the CPU build of torch), they are declared here without an
implementation; the processors call none of them. Written are `processor_golden.npz` (the reference's pixels of
photographs, its sizes and its normalised levels) and `processor_files.json` (the settings files that it saves).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from encoder.config import ProcessorConfig
from encoder.preprocess import Pixels, preprocess
from examples.pictures import photographs, picture_folder

POOLINGS = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
OPERATORS = ("nms", "qnms", "qroi_align", *POOLINGS, *(f"_{name}_backward" for name in POOLINGS))
GOLDEN_PICTURES = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "ihc.png", "color.png")
"""Without loss, so that their pixels are the same whatever decodes them."""
GOLDEN_MAX_PATCHES = 64
MEASURED_MAX_PATCHES = (64, 256, 1024)
NUM_SIZES = 1000
SPECIAL_SIZES = [(1, 1), (1, 30_000), (30_000, 1), (10, 30_000), (30_000, 10), (488, 7025), (7025, 488), (7168, 7168),
                 (7169, 28), (28, 7169), (13, 15), (28, 28), (29, 28), (1792, 1792), (1793, 1792)]  # fmt: skip


def declare_operators() -> Any:
    """Declare torchvision's operators; what is returned keeps them declared."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor x) -> Tensor")
    return library


def reference_rows(processor: Any, image: Pixels) -> tuple[Pixels, np.ndarray]:
    """Return the reference's patch rows as levels of 0..255, and its grid."""
    result = processor(images=[Image.fromarray(image)], return_tensors="pt")
    exact = result["pixel_values"].double() * 127.5 + 127.5
    levels = exact.round()
    assert (exact - levels).abs().max() < 1e-3, "the reference's values are normalised levels"
    return levels.to(torch.uint8).numpy(), result["image_grid_thw"][0].numpy()


def distance(processor: Any, image: Pixels, config: ProcessorConfig) -> tuple[float, int, bool]:
    """Return the share of values that differ, the largest difference in levels, and whether anything was resized."""
    theirs, grid = reference_rows(processor, image)
    ours, our_grid = preprocess(image, config)
    assert tuple(grid) == our_grid, f"{grid} is not {our_grid}"
    apart = np.abs(ours.astype(int) - theirs)
    resized = our_grid[1] * 14 < image.shape[0] or our_grid[2] * 14 < image.shape[1]
    return float((apart > 0).mean()), int(apart.max()), resized


def pixels(path: Path) -> Pixels:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def mosaic(images: Sequence[Pixels], width: int = 2600, height: int = 2100) -> Pixels:
    """One picture beyond the default limit, tiled with the photographs."""
    canvas = Image.new("RGB", (width, height))
    side = 520
    for place in range((width // side + 1) * (height // side + 1)):
        tile = Image.fromarray(images[place % len(images)][:side, :side])
        canvas.paste(tile, (place % (width // side) * side, place // (width // side) * side))
    return np.asarray(canvas)


def measure(reference: Any) -> None:
    print(f"{'picture':24}{'patches':>9}{'differ':>10}{'levels':>8}")
    images = {path.name: pixels(path) for path in photographs()}
    cases = [(name, image, limit) for limit in MEASURED_MAX_PATCHES for name, image in images.items()]
    for name, image, limit in [*cases, ("mosaic 2600x2100", mosaic(list(images.values())), 16384)]:
        config = ProcessorConfig(max_patches=limit)
        share, levels, resized = distance(reference(max_patches=limit), image, config)
        print(f"{name:24}{limit:9}{share:10.3%}{levels:8}" + ("" if resized else "   (not resized)"))


def sizes_of(resize_rule: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return sizes `[n, 2]` as width and height, and their results `[n, 4]`: resized and padded width and height."""
    draw = np.random.default_rng(3)
    exponents = draw.uniform(0, np.log(30_000), (NUM_SIZES, 2))
    sizes = np.concatenate([SPECIAL_SIZES, np.exp(exponents).astype(np.int64)])
    results = []
    for width, height in sizes.tolist():
        (new_height, new_width), (pad_height, pad_width) = resize_rule(height, width, 14, 2, 16384, 512)
        results.append((new_width, new_height, pad_width, pad_height))
    return sizes.astype(np.int32), np.array(results, np.int32)


def normalised_levels(processor: Any) -> np.ndarray:
    """Return the reference's float32 of each level, `[256]`."""
    ramp = np.zeros((28, 28, 3), np.uint8)
    ramp.reshape(-1, 3)[:256] = np.arange(256, dtype=np.uint8)[:, None]
    values = processor(images=[Image.fromarray(ramp)], return_tensors="pt")["pixel_values"]
    picture = values[:, 0].reshape(2, 2, 14, 14).permute(0, 2, 1, 3).reshape(-1)
    return picture[:256].numpy()


def saved_files(image_processor: Any, video_processor: Any, processor_class: Any) -> dict[str, Any]:
    """Return the settings files that the reference saves, each processor alone and both in one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<|media_pad|>": 1, "<|kimi_k25_video_placeholder|>": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")), unk_token="<unk>"
    )
    whole = processor_class(image_processor=image_processor, tokenizer=tokenizer, video_processor=video_processor)
    names = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
    with tempfile.TemporaryDirectory() as folder:
        for part in (image_processor, video_processor, whole):
            part.save_pretrained(folder)
        return {name: json.loads((Path(folder) / name).read_text()) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("tests/data"))
    folder = parser.parse_args().folder
    operators = declare_operators()
    from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor, navit_resize
    from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor
    from transformers.models.kimi_k25.video_processing_kimi_k25 import Kimi_K25VideoProcessor

    golden = {"levels": normalised_levels(Kimi_K25ImageProcessor())}
    golden["sizes"], golden["results"] = sizes_of(navit_resize)
    limited = Kimi_K25ImageProcessor(max_patches=GOLDEN_MAX_PATCHES)
    for name in GOLDEN_PICTURES:
        golden[f"{name}:rows"], golden[f"{name}:grid"] = reference_rows(limited, pixels(picture_folder() / name))
    files = saved_files(Kimi_K25ImageProcessor(), Kimi_K25VideoProcessor(), Kimi_K25Processor)
    folder.mkdir(exist_ok=True)
    np.savez_compressed(folder / "processor_golden.npz", **golden)
    (folder / "processor_files.json").write_text(json.dumps(files, indent=1, sort_keys=True) + "\n")
    measure(Kimi_K25ImageProcessor)
    del operators


if __name__ == "__main__":
    main()
