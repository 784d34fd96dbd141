"""What an item's bits depend on, with and without `deterministic`, and what it costs.

Prints the numbers of docs/verification.md.

    python -m benchmarks.determinism [--true-width] [--true-shape] [--device cuda]

Each item is encoded alone on one thread; then in random packs, on other numbers of threads and with weights elsewhere
in memory. The cost is the ratio of the shortest times with and without `deterministic` on the same images, taken in
turns. On CUDA, CUBLAS_WORKSPACE_CONFIG=:4096:8 has to be set.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from encoder.config import EncoderConfig, ProcessorConfig
from encoder.determinism import ALIGNMENT_BYTES
from encoder.difference import difference
from encoder.model import Encoder
from encoder.moonvit import MoonViT
from encoder.preprocess import Pixels
from encoder.sizing import grid_thw, num_patches, num_tokens
from encoder.source import ModelSource, resolve_model
from encoder.weights import build_model

MODELS: Final = {
    "moonvit-tiny": resolve_model("moonvit-tiny").config,
    "72 wide, 2 layers": EncoderConfig(hidden_size=72, num_layers=2, num_heads=3, mlp_size=100, text_width=60),
}
TRUE_WIDTH: Final = EncoderConfig(hidden_size=1152, num_layers=2, num_heads=16, mlp_size=4304, text_width=7168)
SIZES: Final = [(28, 28), (1, 1), (56, 28), (84, 84), (224, 200), (140, 196), (30, 90), (300, 476)]
THREADS: Final = (1, 2, 3, 4)
NUM_PACKS: Final = 24
LOADS: Final = {
    "1 of 1,024 patches": [(448, 448)],
    "8 of 256": [(224, 224)] * 8,
    "32 of 64": [(112, 112)] * 32,
    "64 of 4": [(28, 28)] * 64,
}
NUM_ROUNDS: Final = 9


@dataclass(slots=True)
class Spread:
    """How far embeddings were from those that they should equal."""

    relative: float = 0.0
    cosine: float = 1.0
    num_items: int = 0
    num_different: int = 0

    def add(self, ours: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
        for mine, other in zip(ours, truth, strict=True):
            found = difference(mine, other)
            self.relative = max(self.relative, found.relative_error)
            self.cosine = min(self.cosine, found.min_cosine)
            self.num_items += 1
            self.num_different += not found.is_same_bits

    def __str__(self) -> str:
        differ = f"{self.num_different} of {self.num_items} items differ"
        return f"{differ}, by {self.relative:.1e} at most, least cosine of a token {self.cosine:.6f}"


def noise(width: int, height: int) -> Pixels:
    return np.random.default_rng([width, height]).integers(0, 256, (height, width, 3), dtype=np.uint8)


IMAGES: Final = [noise(*size) for size in SIZES]


def build(config: EncoderConfig, dtype: torch.dtype, device: str) -> MoonViT:
    return build_model(ModelSource("benchmark", config, ProcessorConfig(), None), dtype).to(device)


def outputs(encoder: Encoder, images: Sequence[Pixels]) -> list[torch.Tensor]:
    grids = [grid_thw(image.shape[1], image.shape[0], encoder.processor) for image in images]
    shapes = [(num_tokens(grid, encoder.config.merge_size), encoder.config.text_width) for grid in grids]
    return [torch.empty(shape, dtype=encoder.dtype, device=encoder.device) for shape in shapes]


def encode(encoder: Encoder, images: Sequence[Pixels]) -> list[torch.Tensor]:
    outs = outputs(encoder, images)
    assert all(encoder.encode(images, outs)), "every embedding is finite"
    return outs


def elsewhere(model: MoonViT) -> MoonViT:
    """The same parameters, each four bytes behind an aligned address, as a file might have them."""
    for parameter in model.parameters():
        values = parameter.data
        nbytes = values.numel() * values.element_size()
        room = torch.empty(nbytes + 2 * ALIGNMENT_BYTES, dtype=torch.uint8, device=values.device)
        start = -room.data_ptr() % ALIGNMENT_BYTES + 4
        parameter.data = room[start : start + nbytes].view(values.dtype).view(values.shape).copy_(values)
    return model


def spread(config: EncoderConfig, dtype: torch.dtype, device: str, *, deterministic: bool) -> dict[str, Spread]:
    """What packs, threads and places of weights change, each against the items alone on one thread."""
    found = {name: Spread() for name in ("packs", "threads", "weights elsewhere")}
    draw = np.random.default_rng(7)
    truth: list[torch.Tensor] = []
    for count in THREADS:
        torch.set_num_threads(count)
        encoder = Encoder(build(config, dtype, device), ProcessorConfig(), deterministic=deterministic)
        alone = [encode(encoder, [image])[0] for image in IMAGES]
        truth = truth or alone
        found["threads"].add(alone, truth)
        for _ in range(NUM_PACKS):
            chosen = draw.integers(0, len(IMAGES), draw.integers(2, 9))
            packed = encode(encoder, [IMAGES[index] for index in chosen])
            found["packs"].add(packed, [alone[index] for index in chosen])
    torch.set_num_threads(1)
    moved = Encoder(elsewhere(build(config, dtype, device)), ProcessorConfig(), deterministic=deterministic)
    found["weights elsewhere"].add([encode(moved, [image])[0] for image in IMAGES], truth)
    return found


def seconds(encoder: Encoder, images: Sequence[Pixels], outs: Sequence[torch.Tensor]) -> float:
    started = time.perf_counter()
    encoder.encode(images, outs)
    return time.perf_counter() - started


def cost(config: EncoderConfig, dtype: torch.dtype, device: str, num_threads: int) -> None:
    """Shortest of times taken in turns, and their ratio."""
    torch.set_num_threads(num_threads)
    encoders = [Encoder(build(config, dtype, device), ProcessorConfig(), deterministic=flag) for flag in (False, True)]
    for name, sizes in LOADS.items():
        images = [noise(*size) for size in sizes]
        outs = outputs(encoders[0], images)
        times = [[seconds(encoder, images, outs) for encoder in encoders] for _ in range(NUM_ROUNDS + 1)][1:]
        plain, fixed = (min(column) for column in zip(*times, strict=True))
        patches = sum(num_patches(grid_thw(*size, ProcessorConfig())) for size in sizes)
        print(
            f"  {num_threads} threads, {name:<18} {patches:>5} patches: {plain * 1e3:8.2f} ms, deterministic "
            f"{fixed * 1e3:8.2f} ms, ratio {fixed / plain:.2f}"
        )


def parse() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--true-width", action="store_true", help="the tower's true width with 2 layers, too")
    parser.add_argument("--true-shape", action="store_true", help="the whole tower, too: meant for CUDA")
    return parser.parse_args()


def main() -> None:
    options = parse()
    num_threads = torch.get_num_threads()
    where = torch.cuda.get_device_name() if options.device == "cuda" else torch.backends.cpu.get_cpu_capability()
    print(f"torch {torch.__version__}, {where}, {platform.machine()}, shortest of {NUM_ROUNDS} times")
    models = MODELS | ({"true width, 2 layers": TRUE_WIDTH} if options.true_width else {})
    models |= {"true shape": resolve_model("kimi-k2.5").config} if options.true_shape else {}
    for name, config in models.items():
        for dtype in (torch.float32, torch.bfloat16):
            print(f"{name}, {dtype}")
            for flag in (False, True):
                for what, found in spread(config, dtype, options.device, deterministic=flag).items():
                    print(f"  {'deterministic' if flag else 'without'}: {what}: {found}")
            for count in sorted({1, num_threads} if options.device == "cpu" else {num_threads}):
                cost(config, dtype, options.device, count)


if __name__ == "__main__":
    main()
