"""The forward pass for GPUs against the plain model, on a CPU under Triton's interpreter, in float32."""

from functools import cache

import pytest
import torch
from torch import nn

from encoder.attention import BACKENDS, load_attention, packed_attention
from encoder.config import EncoderConfig, ProcessorConfig
from encoder.device_forward import DeviceForward
from encoder.errors import EncoderError
from encoder.graphs import bucket_of
from encoder.kernels.flash import FlashTuning, flash_attention
from encoder.kernels.rotary import bias_gelu_, rotate_
from encoder.kernels.rows import layer_norm
from encoder.moonvit import MoonViT, rotate_pairs_
from encoder.sizing import Grid
from encoder.source import ModelSource
from encoder.spans import exact_shape, plan_spans
from encoder.weights import build_model
from tests.encoder.oracle import embed, random_patches, relative_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = {
    "head of 72": EncoderConfig(hidden_size=144, num_layers=2, num_heads=2, mlp_size=100, text_width=40),
    "head of 24": EncoderConfig(hidden_size=72, num_layers=2, num_heads=3, mlp_size=64, text_width=40, pos_height=16),
    "head of 32": EncoderConfig(hidden_size=64, num_layers=1, num_heads=2, mlp_size=64, text_width=40, pos_width=8),
}
GRIDS: list[Grid] = [(1, 4, 6), (3, 2, 2), (1, 2, 2)]


@cache
def model(shape: str) -> MoonViT:
    return build_model(ModelSource(shape, SHAPES[shape], ProcessorConfig(), None), torch.float32).to(DEVICE)


def patches_of(grids: list[Grid]) -> torch.Tensor:
    return random_patches(grids).to(DEVICE)


def draw(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(
    ("shape", "attention", "is_padded"),
    [*((shape, "triton", False) for shape in SHAPES), ("head of 72", "triton", True), ("head of 72", "sdpa", False)],
)
def test_equals_the_plain_model(shape: str, attention: str, is_padded: bool) -> None:
    plain, patches = model(shape), patches_of(GRIDS)
    forward = DeviceForward(plain, load_attention(attention))
    bucket = bucket_of(exact_shape(GRIDS, plain.config), plain.config.merge_size) if is_padded else None
    spans = plan_spans(GRIDS, plain.config, DEVICE, bucket)
    padding = (0, forward.patch_values - 588, 0, spans.num_patches - len(patches))
    truth = embed(plain, patches, GRIDS)
    outs = [torch.full_like(item, torch.nan) for item in truth]
    forward(nn.functional.pad(patches.flatten(1), padding), spans, outs)
    assert relative_error(torch.cat(outs), torch.cat(truth)) <= 1e-5


@pytest.mark.parametrize("keys", [16, 64])
@pytest.mark.parametrize(("heads", "head"), [(2, 72), (3, 24), (1, 64), (1, 80)])
def test_flash_attention_within_spans(heads: int, head: int, keys: int) -> None:
    """Spans that are shorter and longer than a block of keys and than a tile of queries, and a whole number of them."""
    grids: list[Grid] = [(1, 2, 2), (1, 8, 8), (1, 10, 14), (1, 6, 10)]
    spans = plan_spans(grids, SHAPES["head of 72"], DEVICE)
    q, k, v = draw(spans.num_patches, 3, heads, head).unbind(1)
    out = flash_attention(q, k, v, spans, FlashTuning(keys=keys))
    assert relative_error(out, packed_attention(q, k, v, spans.cu_seqlens)) <= 1e-5


@pytest.mark.parametrize("tuning", [None, FlashTuning(keys=16)], ids=["of use", "small"])
def test_flash_attention_stays_within_its_rows(tuning: FlashTuning | None) -> None:
    """Every remainder of rows, between rows of NaN that may be neither used nor written."""
    grids: list[Grid] = [(1, 2, 2), (1, 6, 26), (1, 4, 4), (1, 10, 14), (1, 2, 6)]
    spans = plan_spans(grids, SHAPES["head of 72"], DEVICE)
    rows, guard = spans.num_patches, 256
    inside = slice(guard, guard + rows)
    qkv = torch.full((rows + 2 * guard, 3, 2, 72), torch.nan, device=DEVICE)
    qkv[inside] = draw(rows, 3, 2, 72)
    out = torch.full((rows + 2 * guard, 2, 72), torch.nan, device=DEVICE)
    q, k, v = qkv[inside].unbind(1)
    flash_attention(q, k, v, spans, tuning, out[inside])
    assert relative_error(out[inside], packed_attention(q, k, v, spans.cu_seqlens)) <= 1e-5
    assert out[:guard].isnan().all()
    assert out[guard + rows :].isnan().all()


def test_what_lies_beside_a_span_does_not_reach_it() -> None:
    grids: list[Grid] = [(1, 6, 6), (1, 4, 4), (1, 6, 2)]
    spans = plan_spans(grids, SHAPES["head of 72"], DEVICE)
    qkv = draw(spans.num_patches, 3, 2, 72)
    before = flash_attention(*qkv.unbind(1), spans)
    qkv[36:52] = torch.nan
    after = flash_attention(*qkv.unbind(1), spans)
    assert after[36:52].isnan().all()
    assert torch.equal(torch.cat([before[:36], before[52:]]), torch.cat([after[:36], after[52:]]))


@pytest.mark.parametrize(("num_rows", "rows"), [(1, 1), (7, 4)])
@pytest.mark.parametrize("width", [72, 128])
def test_layer_norm_of_a_stream_that_lacks_its_biases(width: int, num_rows: int, rows: int) -> None:
    x, offset, weight, bias = draw(num_rows, width), draw(width, seed=4), draw(width, seed=5), draw(width, seed=6)
    out = layer_norm(x, offset, weight, bias, 1e-5, rows=rows)
    assert relative_error(out, nn.functional.layer_norm(x + offset, (width,), weight, bias, 1e-5)) <= 1e-6


@pytest.mark.parametrize("block", [32, 256])
@pytest.mark.parametrize(("heads", "head"), [(2, 72), (3, 24)])
def test_rotation_is_that_of_the_plain_model(heads: int, head: int, block: int) -> None:
    ours, angles = draw(5, 3, heads, head), draw(5, head // 2, seed=4)
    theirs = ours.clone()
    rotate_(ours, angles.cos(), angles.sin(), rows=4, block=block)
    rotate_pairs_(theirs[:, :2], torch.complex(angles.cos(), angles.sin()))
    assert relative_error(ours, theirs) <= 1e-6
    assert torch.equal(ours[:, 2], theirs[:, 2])


def test_gelu_behind_a_bias() -> None:
    x, bias = 4 * draw(37, 100), draw(100, seed=4)
    truth = nn.functional.gelu(x + bias, approximate="tanh")
    assert relative_error(bias_gelu_(x, bias), truth) <= 1e-6


def test_an_attention_that_is_not_there() -> None:
    with pytest.raises(EncoderError, match="sdpa"):
        load_attention("magic")
    absent = next(name for name, backend in BACKENDS.items() if not backend.is_installed())
    with pytest.raises(EncoderError, match="not installed"):
        load_attention(absent)
