from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from encoder.config import EncoderConfig
from encoder.errors import ImageError
from encoder.moonvit import MoonViT
from encoder.packing import plan_pack
from encoder.sizing import Grid, num_patches
from encoder.source import resolve_model
from encoder.weights import build_model
from tests.encoder.oracle import (
    TEXT_WIDTH,
    build_oracle,
    embed,
    oracle_embeddings,
    random_patches,
    relative_error,
    save,
    vision_parameters,
)

PACKS: list[list[Grid]] = [
    [(1, 2, 2)],
    [(1, 16, 16)],
    [(1, 6, 30), (1, 2, 4), (1, 40, 2)],
    [(2, 4, 6), (1, 4, 6), (4, 2, 2), (3, 8, 2), (4, 10, 12)],
    [(1, 4, 4)] * 5,
    [(1, 2, 2), (1, 36, 46)],
]
EXTREMES: list[list[Grid]] = [
    [(1, 2, 512)],
    [(1, 512, 2)],
    [(1, 512, 32), (1, 2, 2)],
    [(4, 2, 512), (4, 64, 64)],
    [(1, 494, 36)],
    [(1, 36, 494)],
]
"""The longest sides, the most patches under the limit, and with padding the most of all: 17,784."""


@pytest.fixture(scope="module")
def oracle() -> object:
    return build_oracle()


@pytest.fixture(scope="module")
def model(oracle: object, tmp_path_factory: pytest.TempPathFactory) -> MoonViT:
    return ours(oracle, tmp_path_factory.mktemp("model"))


def ours(oracle: object, folder: Path, dtype: torch.dtype = torch.float32) -> MoonViT:
    return build_model(resolve_model(str(save(oracle, folder))), dtype)


@pytest.mark.parametrize("grids", PACKS, ids=str)
def test_equals_the_reference(model: MoonViT, oracle: object, grids: list[Grid]) -> None:
    patches = random_patches(grids)
    for mine, theirs in zip(embed(model, patches, grids), oracle_embeddings(oracle, patches, grids), strict=True):
        assert relative_error(mine, theirs) <= 1e-5


@pytest.fixture(scope="module")
def slim(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, MoonViT]:
    """The true sides of the position table with little else, so that the largest items are quick."""
    oracle = build_oracle(
        seed=5,
        hidden_size=24,
        num_attention_heads=1,
        num_hidden_layers=1,
        intermediate_size=32,
        pos_emb_height=64,
        pos_emb_width=64,
    )
    return oracle, ours(oracle, tmp_path_factory.mktemp("slim"))


@pytest.mark.parametrize("grids", EXTREMES, ids=str)
def test_extreme_grids_equal_the_reference(slim: tuple[object, MoonViT], grids: list[Grid]) -> None:
    oracle, model = slim
    assert max(map(num_patches, grids)) <= 17_784
    patches = random_patches(grids)
    for mine, theirs in zip(embed(model, patches, grids), oracle_embeddings(oracle, patches, grids), strict=True):
        assert relative_error(mine, theirs) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grids", [pack for pack in PACKS if len(pack) > 1], ids=str)
def test_a_pack_does_not_leak(oracle: object, tmp_path: Path, grids: list[Grid], dtype: torch.dtype) -> None:
    """Whatever becomes of one item's pixels, the others keep every bit: NaN would pass through anything that leaks."""
    model = ours(oracle, tmp_path, dtype)
    patches = random_patches(grids).to(dtype)
    before = embed(model, patches, grids)
    for changed in range(len(grids)):
        for pixels in (torch.nan, 0.0):
            rows = list(patches.split([num_patches(grid) for grid in grids]))
            rows[changed] = torch.full_like(rows[changed], pixels)
            after = embed(model, torch.cat(rows), grids)
            assert not torch.equal(after[changed], before[changed])
            kept = [item for item in range(len(grids)) if item != changed]
            assert all(torch.equal(after[item], before[item]) for item in kept)


@pytest.mark.parametrize("grids", PACKS, ids=str)
def test_an_item_does_not_depend_on_its_pack(model: MoonViT, grids: list[Grid]) -> None:
    patches = random_patches(grids)
    alone_rows = patches.split([num_patches(grid) for grid in grids])
    for grid, rows, packed in zip(grids, alone_rows, embed(model, patches, grids), strict=True):
        (alone,) = embed(model, rows, [grid])
        assert relative_error(packed, alone) <= 1e-5


def test_every_parameter_matters(oracle: object, tmp_path: Path) -> None:
    """Guards the comparison above: had we forgotten a parameter, the reference would differ."""
    grids: list[Grid] = [(2, 4, 6)]
    patches = random_patches(grids)
    model = ours(oracle, tmp_path)
    for name, parameter in vision_parameters(oracle):
        assert change(parameter, lambda: oracle_embeddings(oracle, patches, grids)[0]) > 1e-4, name
    for name, parameter in model.named_parameters():
        assert change(parameter, lambda: embed(model, patches, grids)[0]) > 1e-4, name


def change(parameter: torch.nn.Parameter, result: Callable[[], torch.Tensor]) -> float:
    """How much a result moves when a parameter is disturbed, relative to itself."""
    kept, before = parameter.data, result()
    parameter.data = kept + 0.1 * torch.randn(kept.shape, generator=torch.Generator().manual_seed(3))
    after = result()
    parameter.data = kept
    return relative_error(after, before)


def test_head_dim_of_the_true_shape(tmp_path: Path) -> None:
    oracle = build_oracle(seed=7, hidden_size=144, num_attention_heads=2, num_hidden_layers=1)
    grids: list[Grid] = [(1, 10, 8), (3, 4, 4)]
    patches = random_patches(grids)
    outs = embed(ours(oracle, tmp_path), patches, grids)
    for mine, theirs in zip(outs, oracle_embeddings(oracle, patches, grids), strict=True):
        assert relative_error(mine, theirs) <= 1e-5


def test_a_table_that_is_not_square_is_resampled_like_an_image() -> None:
    config = EncoderConfig(
        hidden_size=8, num_layers=1, num_heads=2, mlp_size=8, text_width=8, pos_height=10, pos_width=6
    )
    with torch.device("cpu"):
        table = torch.randn(10, 6, 8, generator=torch.Generator().manual_seed(0))
    plan = plan_pack([(1, 4, 14)], config, torch.device("cpu"))
    mine = (table.flatten(0, 1)[plan.tap_index] * plan.tap_weight[..., None]).sum(1)
    picture = table.permute(2, 0, 1)[None]
    theirs = torch.nn.functional.interpolate(picture, size=(4, 14), mode="bicubic", align_corners=False)
    assert relative_error(mine, theirs[0].flatten(1).T) <= 1e-5


@pytest.mark.parametrize("grid", [(0, 2, 2), (5, 2, 2), (1, 3, 2), (1, 2, 0), (1, -2, 2)])
def test_a_grid_that_the_model_cannot_take_is_refused(model: MoonViT, grid: Grid) -> None:
    with pytest.raises(ImageError, match="grid"):
        plan_pack([(1, 2, 2), grid], model.config, torch.device("cpu"))


def test_outputs_are_written_in_place_and_nothing_beside_them(model: MoonViT) -> None:
    grids: list[Grid] = [(1, 2, 4), (1, 4, 4)]
    pool = torch.full((10, TEXT_WIDTH), 7.0)
    model(random_patches(grids).flatten(1), grids, [pool[1:3], pool[5:9]])
    untouched = pool[[0, 3, 4, 9]]
    assert torch.equal(untouched, torch.full_like(untouched, 7.0))
    assert not (pool[[1, 2, 5, 6, 7, 8]] == 7.0).any()
