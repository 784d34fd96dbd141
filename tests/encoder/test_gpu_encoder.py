"""The encoder on a GPU in half precision, from host pixels to embeddings in a pool: near float32, and waiting for
nothing on the way."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch

from encoder.config import EncoderConfig, ProcessorConfig
from encoder.device_encoder import DeviceEncoder
from encoder.device_options import DeviceOptions
from encoder.difference import difference
from encoder.model import Encoder
from encoder.moonvit import MoonViT
from encoder.patches import PatchRows
from encoder.preprocess import Pixels
from encoder.sizing import Grid, grid_thw, num_tokens
from encoder.source import ModelSource
from encoder.weights import build_model

pytestmark = pytest.mark.gpu

CONFIG = EncoderConfig(hidden_size=1152, num_layers=2, num_heads=16, mlp_size=4304, text_width=7168)
PROCESSOR = ProcessorConfig()
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "one": [(448, 448)],
    "small": [(224, 224)] * 16,
    "mixed": [(448, 448), (30, 500), (4, 60, 90), (640, 480), (300, 8000)],
    "large": [(1092, 1932), (896, 896)],
}
GUARD = 64


@cache
def model(dtype: torch.dtype) -> MoonViT:
    half = build_model(ModelSource("true width", CONFIG, PROCESSOR, None), torch.bfloat16)
    return half.to(dtype).cuda()


@pytest.fixture(scope="module", params=[False, True], ids=["eager", "graphs"])
def has_graphs(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def encoder(has_graphs: bool) -> Encoder:
    options = DeviceOptions(graph_bytes=256 << 20 if has_graphs else 0)
    found = Encoder(model(torch.bfloat16), PROCESSOR, options=options)
    found.use_graphs()
    return found


@pytest.fixture
def no_sync() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def pictures(name: str) -> list[Pixels]:
    draw = np.random.default_rng(3)
    return [draw.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in SHAPES[name]]


def grids_of(items: list[Pixels]) -> list[Grid]:
    return [grid_thw(i.shape[-2], i.shape[-3], PROCESSOR, i.shape[0] if i.ndim == 4 else 0) for i in items]


def outs_in_pool(grids: list[Grid], dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs in one piece of memory, with values between them that nobody may touch."""
    sizes = [num_tokens(grid, 2) * CONFIG.text_width for grid in grids]
    pool = torch.full((sum(sizes) + GUARD * (len(sizes) + 1),), 7.0, dtype=dtype, device="cuda")
    outs, start = [], GUARD
    for size in sizes:
        outs.append(pool[start : start + size].view(-1, CONFIG.text_width))
        start += size + GUARD
    return pool, outs


def are_guards_whole(pool: torch.Tensor, outs: list[torch.Tensor]) -> bool:
    for out in outs:
        out.fill_(7.0)
    return bool((pool == 7.0).all())


@pytest.mark.parametrize("name", SHAPES)
def test_as_near_to_float32_as_promised(encoder: Encoder, name: str) -> None:
    """The first time eagerly; from the second on by a graph, if the encoder has them and the batch is small."""
    items = pictures(name)
    pool, outs = outs_in_pool(grids_of(items))
    _, truth = outs_in_pool(grids_of(items), torch.float32)
    Encoder(model(torch.float32), PROCESSOR).encode(items, truth)
    for _ in range(3):
        for out in outs:
            out.fill_(torch.nan)
        assert encoder.encode(items, outs) == [True] * len(items)
        for mine, exact in zip(outs, truth, strict=True):
            found = difference(mine.float(), exact)
            assert found.relative_error <= 2e-2
            assert found.min_cosine >= 0.9999
    assert are_guards_whole(pool, outs)


def test_graphs_are_used_and_counted(encoder: Encoder, has_graphs: bool) -> None:
    found = encoder.acceleration
    assert found.attention
    assert not found.graph_failure
    assert found.num_graphs_evicted == 0
    assert (found.num_graphs > 0) == has_graphs
    assert found.graph_bytes <= 256 << 20


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("graph_bytes", [0, 256 << 20], ids=["eager", "graphs"])
def test_nothing_waits_for_the_device(name: str, graph_bytes: int, no_sync: None) -> None:
    options = DeviceOptions("triton", graph_bytes)
    ours, items = DeviceEncoder(model(torch.bfloat16), PROCESSOR, options), pictures(name)
    ours.use_graphs()
    _, outs = outs_in_pool(grids_of(items))
    for _ in range(3):
        ours.encode(items, grids_of(items), outs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    ours.encode(items, grids_of(items), outs)
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("grid", [(1, 6, 22), (1, 46, 94)], ids=["little work", "much work"])
def test_the_guard_finds_one_item_alone(encoder: Encoder, grid: Grid) -> None:
    """Whatever the kernel does with what lies behind an item in the pack."""
    rows = [torch.rand(grid[1] * grid[2], 588, device="cuda").bfloat16() for _ in range(3)]
    clean = [part.clone() for part in rows]
    rows[1][7] = torch.nan
    _, outs = outs_in_pool([grid] * 3)
    _, alone = outs_in_pool([grid])
    assert encoder.encode([PatchRows(clean[0], grid)], alone) == [True]
    for _ in range(3):
        assert encoder.encode([PatchRows(part, grid) for part in rows], outs) == [True, False, True]
        assert difference(outs[0], alone[0]).min_cosine >= 0.9998
    assert encoder.encode([PatchRows(part, grid) for part in clean], outs) == [True] * 3


def test_memory_at_the_default_budget(encoder: Encoder) -> None:
    """Beyond weights and outputs; layers take their turns, so two take what 27 do."""
    items = [np.zeros((896, 896, 3), np.uint8)] * 4
    _, outs = outs_in_pool(grids_of(items))
    encoder.encode(items, outs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    encoder.encode(items, outs)
    assert torch.cuda.max_memory_allocated() - before <= 2 << 30
