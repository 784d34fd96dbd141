from itertools import pairwise

import pytest
import torch

from encoder.config import EncoderConfig
from encoder.errors import ImageError
from encoder.graphs import bucket_of
from encoder.sizing import Grid
from encoder.spans import TILE_ROWS, Spans, SpansShape, exact_shape, plan_spans

CONFIG = EncoderConfig(hidden_size=24, num_layers=1, num_heads=1, mlp_size=32, text_width=16)
PACKS: list[list[Grid]] = [
    [(1, 2, 2)],
    [(1, 32, 32)],
    [(4, 2, 2), (1, 16, 18), (2, 6, 4)],
    [(1, 2, 2)] * 65,
    [(1, 494, 36), (1, 2, 2)],
]


def plan(grids: list[Grid], shape: SpansShape | None = None) -> Spans:
    return plan_spans(grids, CONFIG, torch.device("cpu"), shape)


@pytest.mark.parametrize("grids", PACKS, ids=lambda grids: f"{len(grids)} of {grids[0]}")
@pytest.mark.parametrize("is_padded", [False, True])
def test_spans_cover_every_row_and_tiles_every_query_once(grids: list[Grid], is_padded: bool) -> None:
    own = exact_shape(grids, CONFIG)
    shape = bucket_of(own, CONFIG.merge_size) if is_padded else own
    spans = plan(grids, shape)
    assert spans.table.shape == (5, shape.num_slots + 1)
    assert spans.table[0].tolist() == list(spans.cu_seqlens)
    assert spans.cu_seqlens[-1] == spans.num_patches == shape.num_patches
    assert max(b - a for a, b in pairwise(spans.cu_seqlens)) <= spans.max_seqlen
    assert spans.tiles.shape == (shape.num_tiles, 2)
    queries = []
    for span, first in spans.tiles.tolist():
        if span >= 0:
            assert spans.cu_seqlens[span] <= first < spans.cu_seqlens[span + 1]
            queries += range(first, min(first + TILE_ROWS, spans.cu_seqlens[span + 1]))
    assert sorted(queries) == list(range(spans.num_patches))


@pytest.mark.parametrize("grids", PACKS, ids=lambda grids: f"{len(grids)} of {grids[0]}")
def test_items_are_the_same_with_padding_behind_them(grids: list[Grid]) -> None:
    plain, padded = plan(grids), plan(grids, bucket_of(exact_shape(grids, CONFIG), CONFIG.merge_size))
    num = len(grids)
    assert padded.cu_tokens == plain.cu_tokens
    assert torch.equal(padded.table[:2, : num + 1], plain.table[:2])
    assert torch.equal(padded.table[2:, :num], plain.table[2:, :num])
    assert padded.table[1, num:].unique().tolist() == [4 * plain.cu_tokens[-1]]


def test_the_longest_span_begins_first() -> None:
    spans = plan([(1, 2, 2), (1, 20, 20), (1, 10, 10)])
    assert spans.tiles[:, 0].tolist() == [1, 1, 1, 1, 2, 0]


def test_a_bucket_wastes_at_most_a_sixteenth_beyond_its_least_step() -> None:
    for patches in range(4, 20_000, 4):
        bucket = bucket_of(SpansShape(patches, patches // 4, 3, patches // TILE_ROWS + 3, patches), 2)
        assert patches <= bucket.num_patches <= max(patches + 63, patches * 17 // 16)
        assert bucket.max_seqlen >= patches
        assert bucket.num_slots == 4 + 8


def test_a_grid_that_the_model_cannot_take() -> None:
    with pytest.raises(ImageError, match="3"):
        plan([(1, 2, 2), (1, 3, 2)])
