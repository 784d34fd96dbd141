"""bfloat16 against the reference in float32 with the same rounded weights, and against the reference's own bfloat16."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from encoder.moonvit import MoonViT
from encoder.sizing import Grid
from encoder.source import resolve_model
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

PACKS: list[list[Grid]] = [
    [(1, 2, 2)] * 12,
    [(1, 16, 16), (1, 6, 30), (1, 2, 2)],
    [(2, 4, 6), (1, 4, 6), (4, 10, 12), (3, 8, 2), (4, 2, 2)],
    [(1, 36, 46), (1, 2, 160)],
]
SHAPES = {
    "small": {},
    "head of 72": {"hidden_size": 144, "num_attention_heads": 2, "intermediate_size": 200},
    "deeper": {"hidden_size": 288, "num_attention_heads": 4, "intermediate_size": 600, "num_hidden_layers": 6},
}


class Trio(NamedTuple):
    full: object
    theirs: object
    ours: MoonViT


@pytest.fixture(scope="module", params=SHAPES)
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trio:
    full = round_vision(build_oracle(seed=4, **SHAPES[request.param]))
    theirs = round_vision(build_oracle(seed=4, **SHAPES[request.param])).bfloat16()
    folder: Path = save(full, tmp_path_factory.mktemp("rounded"))
    return Trio(full, theirs, build_model(resolve_model(str(folder)), torch.bfloat16))


@pytest.mark.parametrize("grids", PACKS, ids=str)
def test_bfloat16_is_as_near_as_the_references_own(trio: Trio, grids: list[Grid]) -> None:
    patches = random_patches(grids)
    truth = oracle_embeddings(trio.full, patches, grids)
    theirs = oracle_embeddings(trio.theirs, patches.bfloat16(), grids)
    ours = embed(trio.ours, patches.bfloat16(), grids)
    for mine, exact in zip(ours, truth, strict=True):
        assert mine.dtype == torch.bfloat16
        assert relative_error(mine, exact) <= 2e-2
        assert min_cosine(mine, exact) >= 0.9999
    own_error = relative_error(torch.cat(theirs), torch.cat(truth))
    assert relative_error(torch.cat(ours), torch.cat(truth)) <= 1.2 * own_error
