"""How long a calibration takes, and how well it predicts batches that it has not measured.

    python -m benchmarks.calibration [--model moonvit-tiny] [--device cpu] [--dtype float32] [--threads N] [--scale 1]

Held out: batches of images of the mixed trace, drawn with a seed, under the patch budget. `--scale` shrinks the sides
of all images, for a device that is slow. Each batch is timed once, as in service: noise of the machine is part of the
error. Then the same with a `Predictor` that learns from batch to batch.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Any, Final

import numpy as np
import torch

from benchmarks.make_traces import Size, read
from encoder.calibration import calibrate, conditions
from encoder.model import Encoder
from encoder.preprocess import Pixels
from encoder.sizing import grid_thw, num_patches, num_tokens
from mmcache.server.costs import Predictor

MAX_BATCH_PATCHES: Final = 16_384


def batches(encoder: Encoder, count: int, scale: float) -> Iterator[list[Size]]:
    draw, sizes = random.Random(5), [size for size in read("mixed") if not size.frames]
    for _ in range(count):
        batch: list[Size] = []
        for size in draw.choices(sizes, k=draw.choice((1, 2, 4, 8))):
            width, height = (max(1, round(side * scale)) for side in size[:2])
            # An image of its size after resizing: what resizing takes depends on the source, and is no part of this.
            _, rows, columns = grid_thw(width, height, encoder.processor)
            sides = Size(*(count * encoder.processor.patch_size for count in (columns, rows)))
            if not batch or sum(patches_of(encoder, [*batch, sides])) <= MAX_BATCH_PATCHES:
                batch.append(sides)
        yield batch


def patches_of(encoder: Encoder, batch: Sequence[Size]) -> list[int]:
    return [num_patches(grid_thw(size.width, size.height, encoder.processor)) for size in batch]


def seconds(encoder: Encoder, batch: Sequence[Size]) -> float:
    merge, width = encoder.config.merge_size, encoder.config.text_width
    images: list[Pixels] = [np.zeros((size.height, size.width, 3), np.uint8) for size in batch]
    tokens = [num_tokens(grid_thw(size.width, size.height, encoder.processor), merge) for size in batch]
    outs = [torch.empty(count, width, dtype=encoder.dtype, device=encoder.device) for count in tokens]
    began = time.perf_counter()
    encoder.encode(images, outs)
    return time.perf_counter() - began


def parse() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="moonvit-tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--batches", type=int, default=60)
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    encoder = Encoder.load(
        options.model,
        device=options.device,
        dtype=getattr(torch, options.dtype),
        deterministic=options.deterministic,
    )
    encoder.warm_up()
    encoder.use_graphs()  # as a rank does
    print(conditions(encoder).partition("{")[0])
    models = []
    for _ in range(3):
        began = time.perf_counter()
        models.append(calibrate(encoder))
        print(f"calibrated in {time.perf_counter() - began:.2f} s: {models[-1]}")
    model = sorted(models, key=lambda model: model.item_seconds(1024))[1]
    predictor, errors, learned = Predictor(model), [], []
    for batch in batches(encoder, options.batches, options.scale):
        patches, taken = patches_of(encoder, batch), seconds(encoder, batch)
        errors.append(model.batch_seconds(patches) / taken - 1)
        learned.append(predictor.batch_seconds(patches) / taken - 1)
        predictor.observe(patches, taken)
    half = len(errors) // 2
    for what, found in {"calibrated": errors, "learning": learned, "learning, second half": learned[half:]}.items():
        sizes = [abs(error) for error in found]
        print(
            f"{what}: mean absolute error {100 * fmean(sizes):.1f} %, median {100 * median(sizes):.1f} %, "
            f"bias {100 * fmean(found):+.1f} %, {len(found)} batches"
        )


if __name__ == "__main__":
    main()
