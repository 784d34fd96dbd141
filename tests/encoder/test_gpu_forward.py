"""The forward pass for GPUs on one: every attention that works there, eagerly and through graphs. Needs torch only."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from torch import nn

from encoder.attention import BACKENDS, load_attention, packed_attention
from encoder.attention_choice import AttentionChoice
from encoder.config import EncoderConfig, ProcessorConfig
from encoder.device_forward import DeviceForward
from encoder.difference import difference
from encoder.errors import EncoderError
from encoder.graphs import GraphCache, GraphLimits
from encoder.kernels.flash import FlashTuning, flash_attention
from encoder.moonvit import MoonViT
from encoder.sizing import Grid, num_patches, num_tokens
from encoder.source import ModelSource
from encoder.spans import plan_spans
from encoder.weights import build_model

pytestmark = pytest.mark.gpu

MIXED: list[Grid] = [(1, 16, 16), (1, 2, 2), (2, 4, 6), (1, 6, 30), (4, 10, 12), (3, 8, 2), (1, 20, 22)]
PACKS: list[list[Grid]] = [MIXED, [(1, 32, 32)], [(1, 2, 2)], [(1, 4, 4)] * 33]
CONFIG = EncoderConfig(hidden_size=1152, num_layers=2, num_heads=16, mlp_size=4304, text_width=7168)


SPOILT = {"fa3", "flash-attn-3", "flash-attn-4"}


@cache
def model(dtype: torch.dtype) -> MoonViT:
    half = build_model(ModelSource("true width", CONFIG, ProcessorConfig(), None), torch.bfloat16)
    return half.to(dtype).cuda()


@cache
def refusal(name: str) -> str:
    """Why a kernel does not work here, or nothing."""
    qkv = torch.randn(256, 3, 16, 72, device="cuda", dtype=torch.bfloat16)
    try:
        q, k, v = qkv.unbind(1)
        load_attention(name)(q, k, v, plan_spans([(1, 16, 16)], CONFIG, qkv.device))
    except (EncoderError, ImportError, NotImplementedError) as error:
        return str(error)
    return ""


@pytest.fixture(params=[*BACKENDS, "auto"])
def choice(request: pytest.FixtureRequest) -> AttentionChoice:
    names = ("triton", "fa3") if request.param == "auto" else (request.param, request.param)
    for name in names:
        if why := refusal(name):
            pytest.skip(why)
    return AttentionChoice(*names)


@pytest.fixture
def forward(choice: AttentionChoice) -> DeviceForward:
    return DeviceForward(model(torch.bfloat16), choice.load())


@pytest.fixture
def graphs(forward: DeviceForward, choice: AttentionChoice) -> GraphCache:
    found = GraphCache(forward, choice, GraphLimits(max_patches=2048, max_items=64, max_graphs=2))
    if found.bucket(MIXED) is None:
        pytest.skip("cannot be captured, or its launches depend on the lengths of the items")
    return found


@pytest.fixture
def no_sync() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def rows_of(grids: list[Grid], seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(sum(map(num_patches, grids)), 588, generator=generator) * 2 - 1).bfloat16().cuda()


def truth_of(grids: list[Grid]) -> list[torch.Tensor]:
    outs = [torch.empty(num_tokens(grid, 2), 7168, device="cuda") for grid in grids]
    model(torch.float32)(rows_of(grids).float(), grids, outs)
    return outs


def assert_near(out: torch.Tensor, grids: list[Grid]) -> None:
    truth = truth_of(grids)
    for mine, other in zip(out.float().split([len(item) for item in truth]), truth, strict=True):
        found = difference(mine, other)
        assert found.relative_error <= 2e-2
        assert found.min_cosine >= 0.9999


def outs_of(grids: list[Grid]) -> list[torch.Tensor]:
    return [torch.empty(num_tokens(grid, 2), 7168, device="cuda", dtype=torch.bfloat16) for grid in grids]


def run(forward: DeviceForward, rows: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
    outs = outs_of(grids)
    forward(nn.functional.pad(rows, (0, 4)), plan_spans(grids, CONFIG, rows.device), outs)
    return torch.cat(outs)


def replay(graphs: GraphCache, forward: DeviceForward, rows: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
    outs, batch = outs_of(grids), graphs.begin(grids)
    assert batch is not None, graphs.failure
    batch.rows[:, :588] = rows
    hidden, spans = graphs.run(batch, grids)
    forward.project(hidden, spans.cu_tokens, outs)
    return torch.cat(outs)


@pytest.mark.parametrize("tuning", [None, FlashTuning(keys=64)], ids=["128 keys", "64 keys"])
def test_triton_attention_of_every_remainder(tuning: FlashTuning | None) -> None:
    """Spans of every multiple of four patches up to 272, and a long one, whose last blocks are partial."""
    for grids in ([(1, 2, 2 * columns) for columns in range(1, 69)], [(1, 78, 138)]):
        spans = plan_spans(grids, CONFIG, torch.device("cuda"))
        q, k, v = torch.randn(spans.num_patches, 3, 16, 72, device="cuda", dtype=torch.bfloat16).unbind(1)
        truth = packed_attention(q.float(), k.float(), v.float(), spans.cu_seqlens)
        found = difference(flash_attention(q, k, v, spans, tuning).flatten(1).float(), truth.flatten(1))
        assert found.relative_error <= 1e-2


@pytest.mark.parametrize("grids", PACKS, ids=["mixed", "1024", "4", "33 of 16"])
def test_eager_is_near_float32_and_waits_for_nothing(forward: DeviceForward, grids: list[Grid], no_sync: None) -> None:
    rows = rows_of(grids)
    run(forward, rows, grids)
    torch.cuda.set_sync_debug_mode("error")
    out = run(forward, rows, grids)
    torch.cuda.set_sync_debug_mode("default")
    assert_near(out, grids)


@pytest.mark.parametrize("grids", PACKS, ids=["mixed", "1024", "4", "33 of 16"])
def test_graphs_are_near_float32_and_wait_for_nothing(
    graphs: GraphCache, forward: DeviceForward, grids: list[Grid], no_sync: None
) -> None:
    rows = rows_of(grids)
    graphs.warm([grids])
    assert not graphs.failure
    replay(graphs, forward, rows, grids)
    torch.cuda.set_sync_debug_mode("error")
    out = replay(graphs, forward, rows, grids)
    torch.cuda.set_sync_debug_mode("default")
    assert_near(out, grids)


def test_graphs_of_a_bucket_keep_nothing_of_the_batch_before(graphs: GraphCache, forward: DeviceForward) -> None:
    """NaN of one batch are gone in the next, and in one batch they stay with their item."""
    other: list[Grid] = [(1, 16, 16), (1, 2, 4), (2, 4, 6), (1, 6, 28), (4, 10, 12), (3, 8, 2), (1, 20, 22)]
    assert graphs.bucket(other) == graphs.bucket(MIXED)
    graphs.warm([MIXED])
    clean = replay(graphs, forward, rows_of(MIXED), MIXED)
    poisoned = torch.full_like(rows_of(other), torch.nan)
    assert replay(graphs, forward, poisoned, other).isnan().all()
    assert torch.equal(replay(graphs, forward, rows_of(MIXED), MIXED), clean)
    assert len(graphs) == 1


def test_a_graph_is_made_at_second_sight_and_the_least_recently_used_goes_first(
    graphs: GraphCache, forward: DeviceForward
) -> None:
    packs: list[list[Grid]] = [[(1, 2, 2)], [(1, 16, 16)], [(1, 32, 32)]]
    assert [graphs.begin(pack) for pack in packs] == [None] * 3
    assert all(graphs.begin(pack) is not None for pack in packs)
    assert (len(graphs), graphs.num_evicted) == (2, 1)
    assert 0 < graphs.num_bytes <= graphs.limits.max_bytes
    assert graphs.bucket([(1, 64, 64)]) is None
    assert_near(replay(graphs, forward, rows_of(packs[0]), packs[0]), packs[0])


def test_graphs_stay_within_their_memory(forward: DeviceForward, choice: AttentionChoice) -> None:
    """What takes more is given up, with all that shared its memory, and is not tried again; smaller ones are."""
    graphs = GraphCache(forward, choice, GraphLimits(max_patches=2048, max_bytes=32 << 20))
    if graphs.bucket(MIXED) is None:
        pytest.skip("cannot be captured")
    graphs.warm([[(1, 44, 44)]])
    assert len(graphs) == 0
    assert graphs.bucket([(1, 44, 44)]) is None
    graphs.warm([[(1, 2, 2)]])
    assert len(graphs) == 1
    assert graphs.num_bytes <= 32 << 20


def test_captures_of_two_threads_take_turns(forward: DeviceForward, choice: AttentionChoice) -> None:
    """Beside a thread that runs the pass eagerly all the while, as a model is loaded beside the one in use."""
    caches = [GraphCache(forward, choice, GraphLimits(max_patches=2048)) for _ in range(2)]
    if caches[0].bucket(MIXED) is None:
        pytest.skip("cannot be captured")
    rows, done = rows_of(MIXED), threading.Event()
    torch.cuda.synchronize()

    def encode() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not done.is_set():
                run(forward, rows, MIXED)
                torch.cuda.current_stream().synchronize()

    def warm(cache: GraphCache) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            cache.warm([[(1, side, side)] for side in (32, 24, 16, 8)])

    with ThreadPoolExecutor(3) as threads:
        busy = threads.submit(encode)
        for captured in [threads.submit(warm, cache) for cache in caches]:
            captured.result()
        done.set()
        busy.result()
    torch.cuda.synchronize()
    assert [(len(cache), cache.failure) for cache in caches] == [(4, "")] * 2
    pack: list[Grid] = [(1, 32, 32)]
    assert_near(replay(caches[0], forward, rows_of(pack), pack), pack)


def test_an_item_with_nan_spoils_no_other(forward: DeviceForward, choice: AttentionChoice) -> None:
    """But for kernels that multiply what lies behind an item by zero: there the encoder tells them apart."""
    if choice.small in SPOILT:
        pytest.skip("by this kernel it spoils the one before it")
    rows = rows_of(MIXED)
    before = run(forward, rows, MIXED)
    rows[256:260] = torch.nan
    after = run(forward, rows, MIXED)
    assert after[64:65].isnan().any()
    assert torch.equal(torch.cat([before[:64], before[65:]]), torch.cat([after[:64], after[65:]]))
