"""The model on CUDA against the reference: float32 without TF32, bfloat16 against rounded float32. Needs torch only."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.fidelity import ITEMS, LARGE, MIXED, TRUE_WIDTH
from encoder.config import EncoderConfig, ProcessorConfig
from encoder.model import Encoder
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

pytestmark = pytest.mark.gpu

SHAPES: dict[str, dict[str, int]] = {
    "small": {},
    "head of 72": {"hidden_size": 144, "num_attention_heads": 2, "intermediate_size": 200},
    "true width": {**TRUE_WIDTH, "num_hidden_layers": 2},
    "true shape": {**TRUE_WIDTH, "num_hidden_layers": 27},
}
LONG: list[Grid] = [(1, 494, 36), (1, 2, 512), (1, 512, 2), (1, 2, 2)]


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("grids", [MIXED, LARGE, LONG], ids=["mixed", "1024", "17784"])
@pytest.mark.parametrize("shape", SHAPES)
def test_as_near_to_the_reference_as_promised(shape: str, grids: list[Grid], tmp_path: Path) -> None:
    oracle = round_vision(build_oracle(seed=9, **SHAPES[shape])).cuda()
    patches = random_patches(grids).cuda()
    truth = oracle_embeddings(oracle, patches, grids)
    source = resolve_model(str(save(oracle, tmp_path)))
    full = embed(build_model(source, torch.float32).cuda(), patches, grids)
    half = embed(build_model(source, torch.bfloat16).cuda(), patches.bfloat16(), grids)
    theirs = oracle_embeddings(oracle.bfloat16(), patches.bfloat16(), grids)
    for exact, mine, rounded in zip(truth, full, half, strict=True):
        assert relative_error(mine, exact) <= 1e-5
        assert relative_error(rounded, exact) <= 2e-2
        assert min_cosine(rounded, exact) >= 0.9999
    own_error = relative_error(torch.cat(theirs), torch.cat(truth))
    assert relative_error(torch.cat(half), torch.cat(truth)) <= 1.2 * own_error


def true_width(dtype: torch.dtype) -> MoonViT:
    config = EncoderConfig(hidden_size=1152, num_layers=2, num_heads=16, mlp_size=4304, text_width=7168)
    return build_model(ModelSource("true width", config, ProcessorConfig(), None), dtype).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_neighbour_changes_nothing_in_the_same_pack_shape(dtype: torch.dtype) -> None:
    model = true_width(dtype)
    patches = random_patches(MIXED).cuda().to(dtype)
    before = embed(model, patches, MIXED)
    changed = patches.clone()
    changed[: num_patches(MIXED[0])] = torch.nan
    after = embed(model, changed, MIXED)
    assert after[0].isnan().any()
    for mine, theirs in zip(after[1:], before[1:], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_company_stays_within_the_bound(dtype: torch.dtype, bound: float) -> None:
    model = true_width(dtype)
    rows = {grid: random_patches([grid], seed=index).cuda().to(dtype) for index, grid in enumerate(ITEMS)}
    packed = embed(model, torch.cat([rows[grid] for grid in ITEMS]), ITEMS)
    for grid, mine in zip(ITEMS, packed, strict=True):
        (alone,) = embed(model, rows[grid], [grid])
        assert relative_error(mine, alone) <= bound


def test_pixels_to_embeddings_as_on_the_cpu() -> None:
    draw = np.random.default_rng(3)
    images = [draw.integers(0, 256, (h, w, 3), np.uint8) for h, w in [(60, 90), (1, 1), (300, 40), (448, 449)]]
    embeddings = []
    for device in ("cpu", "cuda"):
        encoder = Encoder.load("moonvit-tiny", device=device)
        sizes = [[encoder_tokens(encoder, image), encoder.config.text_width] for image in images]
        outs = [torch.full(size, torch.nan, device=device) for size in sizes]
        assert encoder.encode(images, outs) == [True] * len(images)
        embeddings.append([out.cpu() for out in outs])
    for mine, theirs in zip(*embeddings, strict=True):
        assert relative_error(mine, theirs) <= 1e-5


def encoder_tokens(encoder: Encoder, image: np.ndarray) -> int:
    from encoder.sizing import grid_thw, num_tokens

    return num_tokens(grid_thw(image.shape[1], image.shape[0], encoder.processor), encoder.config.merge_size)
