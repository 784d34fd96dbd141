"""How near embeddings are to the reference's, and how far an item's depends on its company.

Prints the numbers of docs/fidelity.md.

    python -m benchmarks.fidelity [--true-shape] [--device cuda]

Needs `mmcache[test]`. The reference is transformers' Kimi-K2.5 vision model with its projector, every parameter drawn
at random; its truth is float32 with weights rounded as the compared dtype rounds them. On CUDA TF32 is off.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from encoder.config import EncoderConfig, ProcessorConfig
from encoder.moonvit import MoonViT
from encoder.sizing import Grid, num_patches
from encoder.source import ModelSource, resolve_model
from encoder.weights import build_model
from tests.encoder.oracle import (
    build_oracle,
    embed,
    min_cosine,
    oracle_embeddings,
    random_patches,
    relative_error,
    round_vision,
    save,
)

TRUE_WIDTH: Final = {
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "intermediate_size": 4304,
    "pos_emb_height": 64,
    "pos_emb_width": 64,
}
SHAPES: Final[dict[str, dict[str, int]]] = {
    "72 wide, 2 layers": {},
    "288 wide, 6 layers": {
        "hidden_size": 288,
        "num_attention_heads": 4,
        "intermediate_size": 600,
        "num_hidden_layers": 6,
    },
    "true width, 2 layers": {**TRUE_WIDTH, "num_hidden_layers": 2},
}
TRUE_SHAPE: Final = {"true shape, 27 layers": {**TRUE_WIDTH, "num_hidden_layers": 27}}
MIXED: Final[list[Grid]] = [(1, 16, 16), (1, 2, 2), (2, 4, 6), (1, 6, 30), (4, 10, 12), (3, 8, 2), (1, 20, 22)]
LARGE: Final[list[Grid]] = [(1, 32, 32)]
ITEMS: Final[list[Grid]] = [(1, 2, 2), (1, 2, 4), (1, 6, 2), (1, 6, 6), (2, 8, 10), (4, 4, 4), (1, 16, 16), (1, 22, 34)]
NUM_PACKS: Final = 24
WIDE: Final = EncoderConfig(hidden_size=1152, num_layers=2, num_heads=16, mlp_size=4304, text_width=7168)


@dataclass(slots=True)
class Distance:
    """The largest difference over many items, and how many of them are not the same bits."""

    relative: float = 0.0
    num_items: int = 0
    num_different: int = 0

    def add(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        self.relative = max(self.relative, relative_error(ours, theirs))
        self.num_items += 1
        self.num_different += not torch.equal(ours, theirs)

    def __str__(self) -> str:
        return f"{self.relative:.1e}, {self.num_different} of {self.num_items} items differ"


def against_the_reference(name: str, shape: dict[str, int], grids: Sequence[Grid], device: str) -> None:
    oracle = round_vision(build_oracle(seed=9, **shape)).to(device)
    patches = random_patches(grids).to(device)
    truth = oracle_embeddings(oracle, patches, grids)
    with tempfile.TemporaryDirectory() as folder:
        source = resolve_model(str(save(oracle, Path(folder))))
        full = embed(build_model(source, torch.float32).to(device), patches, grids)
        half = embed(build_model(source, torch.bfloat16).to(device), patches.bfloat16(), grids)
    theirs = oracle_embeddings(oracle.bfloat16(), patches.bfloat16(), grids)
    print(f"{name}, {sum(map(num_patches, grids))} patches in {len(grids)} items")
    print(f"  float32   worst relative error of an item {worst(full, truth):.1e}")
    cosine = min(min_cosine(a, b) for a, b in zip(half, truth, strict=True))
    print(f"  bfloat16  worst relative error of an item {worst(half, truth):.2e}, least cosine of a token {cosine:.6f}")
    ours, own = (relative_error(torch.cat(rows), torch.cat(truth)) for rows in (half, theirs))
    print(f"  bfloat16  whole pack {ours:.2e}, the reference's own {own:.2e}, ratio {ours / own:.3f}")


def worst(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    return max(relative_error(a, b) for a, b in zip(ours, theirs, strict=True))


def company(name: str, config: EncoderConfig, dtype: torch.dtype, device: str) -> None:
    """Each item in random packs against itself alone, and alone under each number of threads against one thread."""
    model = build_model(ModelSource(name, config, ProcessorConfig(), None), dtype).to(device)
    rows = {grid: random_patches([grid], seed=index).to(device, dtype) for index, grid in enumerate(ITEMS)}
    threads = [1, 2] if device == "cpu" else [torch.get_num_threads()]
    single: dict[Grid, torch.Tensor] = {}
    for count in threads:
        torch.set_num_threads(count)
        alone = {grid: embed(model, rows[grid], [grid])[0] for grid in ITEMS}
        print(f"{name}, {dtype}, {count} threads: in company {packed(model, rows, alone)}")
        single = single or alone
        across = Distance()
        for grid in ITEMS:
            across.add(alone[grid], single[grid])
        print(f"  against {threads[0]} threads: {across}")


def packed(model: MoonViT, rows: dict[Grid, torch.Tensor], alone: dict[Grid, torch.Tensor]) -> Distance:
    draw, distance = np.random.default_rng(7), Distance()
    for _ in range(NUM_PACKS):
        grids = [ITEMS[index] for index in draw.integers(0, len(ITEMS), draw.integers(2, 7))]
        outs = embed(model, torch.cat([rows[grid] for grid in grids]), grids)
        for grid, out in zip(grids, outs, strict=True):
            distance.add(out, alone[grid])
    return distance


def setup(device: str) -> str:
    where = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return f"torch {torch.__version__}, {where}, {torch.get_num_threads()} threads"


def parse() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--true-shape", action="store_true", help="the whole tower too: 6 GB of memory and minutes")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    print(setup(options.device))
    for name, shape in SHAPES.items():
        against_the_reference(name, shape, MIXED, options.device)
    if options.true_shape:
        for name, shape in TRUE_SHAPE.items():
            for grids in (LARGE, MIXED):
                against_the_reference(name, shape, grids, options.device)
    tiny = resolve_model("moonvit-tiny").config
    for name, config in {"moonvit-tiny": tiny, "true width, 2 layers": WIDE}.items():
        for dtype in (torch.float32, torch.bfloat16):
            company(name, config, dtype, options.device)


if __name__ == "__main__":
    main()
