"""Packs from pixels to embeddings by a device's kernels, against the plain encoder; interpreted on a CPU."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from encoder import attention_choice
from encoder.attention import BACKENDS, AttentionBackend
from encoder.attention_choice import AttentionChoice, choose_attention, is_little_work
from encoder.config import EncoderConfig, ProcessorConfig
from encoder.device_encoder import DeviceEncoder
from encoder.device_options import ATTENTION_NAMES, Acceleration, DeviceOptions
from encoder.errors import EncoderError
from encoder.finite import all_finite
from encoder.kernels.finite import BLOCK, are_finite, can_be_read
from encoder.model import Encoder
from encoder.moonvit import MoonViT
from encoder.patches import PatchRows
from encoder.preprocess import Pixels
from encoder.sizing import Grid, grid_thw, num_tokens
from encoder.source import ModelSource
from encoder.spans import SpansShape, plan_spans
from encoder.weights import build_model
from tests.encoder.oracle import relative_error

CONFIG = EncoderConfig(hidden_size=72, num_layers=1, num_heads=1, mlp_size=64, text_width=24, pos_height=8, pos_width=8)
PROCESSOR = ProcessorConfig(max_patches=24, max_patches_per_frame=16)
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
ROWS_GRID: Grid = (1, 2, 4)


@pytest.fixture(scope="module")
def model() -> MoonViT:
    return build_model(ModelSource("narrow", CONFIG, PROCESSOR, None), torch.float32).to(DEVICE)


def pictures() -> list[Pixels]:
    """One whose size stays, read only; one that is resized; a chunk of two frames."""
    draw = np.random.default_rng(5)
    kept, resized, chunk = (draw.integers(0, 256, (*s, 3), dtype=np.uint8) for s in ((20, 50), (90, 130), (2, 28, 40)))
    kept.flags.writeable = False
    return [kept, resized, chunk]


def grids_of(items: Sequence[Pixels]) -> list[Grid]:
    return [grid_thw(i.shape[-2], i.shape[-3], PROCESSOR, i.shape[0] if i.ndim == 4 else 0) for i in items]


def test_a_pack_of_pixels_and_rows_equals_the_plain_encoder(model: MoonViT) -> None:
    rows = torch.randn(8, 588, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    kept, resized, chunk = pictures()
    items: list[Pixels | PatchRows] = [kept, PatchRows(rows, ROWS_GRID), resized, chunk]
    grids = [grids_of([kept])[0], ROWS_GRID, *grids_of([resized, chunk])]
    truth, outs = (
        [torch.full((num_tokens(grid, 2), CONFIG.text_width), torch.nan, device=DEVICE) for grid in grids]
        for _ in range(2)
    )
    Encoder(model, PROCESSOR).encode(items, truth)
    ours = DeviceEncoder(model, PROCESSOR, DeviceOptions("triton", graph_bytes=0))
    ours.encode(items, grids, outs)
    assert relative_error(torch.cat(outs), torch.cat(truth)) <= 1e-5
    ours.use_graphs()
    assert ours.acceleration == Acceleration("triton")


def test_float32_and_a_cpu_keep_to_the_plain_model(model: MoonViT) -> None:
    assert Encoder(model, PROCESSOR).acceleration == Acceleration()
    half = build_model(ModelSource("narrow", CONFIG, PROCESSOR, None), torch.bfloat16)
    encoder = Encoder(half, PROCESSOR)
    encoder.use_graphs()
    assert encoder.acceleration == Acceleration()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_guard_of_a_device_sees_every_value(dtype: torch.dtype) -> None:
    """First and last of an item, behind a program's block, in either half of a word; and large values pass."""
    sizes = [6, 2, 2 * BLOCK + 2, 4, 10]
    memory = torch.full((sum(sizes),), torch.finfo(dtype).max, dtype=dtype, device=DEVICE)
    outs = list(memory.split(sizes))
    assert can_be_read(outs)
    assert are_finite(outs) == [True] * 5
    outs[0][5], outs[2][-1], outs[4][0] = torch.nan, torch.inf, -torch.inf
    assert are_finite(outs) == all_finite(outs) == [False, True, False, True, False]


def test_what_is_not_whole_words_is_not_read_as_such() -> None:
    memory = torch.zeros(8, dtype=torch.bfloat16)
    assert can_be_read([memory[2:6]])
    assert not can_be_read([memory[:2], memory[1:3]])
    assert not can_be_read([memory[:3]])


def test_the_names_are_those_of_the_kernels() -> None:
    assert tuple(BACKENDS) == ATTENTION_NAMES


def test_a_kernel_that_is_named_is_the_one(model: MoonViT) -> None:
    assert choose_attention("sdpa", CONFIG, DEVICE, torch.float32) == AttentionChoice("sdpa", "sdpa")
    with pytest.raises(EncoderError, match="must be one of"):
        choose_attention("magic", CONFIG, DEVICE, torch.float32)
    absent = next(name for name, backend in BACKENDS.items() if not backend.is_installed())
    with pytest.raises(EncoderError, match=f"{absent}.*not installed"):
        choose_attention(absent, CONFIG, DEVICE, torch.float32)


def test_a_kernel_that_is_wrong_or_fails_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One forgets the last rows of each item, one raises: the plain one is left, and named alone they are refused."""
    right = BACKENDS["sdpa"]

    def forgetful(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: object) -> torch.Tensor:
        out = right.load()(q, k, v, spans)  # type: ignore[arg-type]
        return torch.cat([out[:-4], torch.zeros_like(out[-4:])])

    def failing(*parts: object) -> torch.Tensor:
        raise RuntimeError("no kernel for this device\nand a long story")

    made = {
        "forgetful": AttentionBackend("forgetful", "torch", lambda: forgetful),
        "failing": AttentionBackend("failing", "torch", lambda: failing),
        "sdpa": right,
    }
    monkeypatch.setattr(attention_choice, "BACKENDS", made)
    monkeypatch.setattr(attention_choice, "load_attention", lambda name: made[name].load())
    assert choose_attention("auto", CONFIG, DEVICE, torch.float32) == AttentionChoice("sdpa", "sdpa")
    with pytest.raises(EncoderError, match="forgetful: its results are wrong"):
        choose_attention("forgetful", CONFIG, DEVICE, torch.float32)
    with pytest.raises(EncoderError, match=r"failing: no kernel for this device$"):
        choose_attention("failing", CONFIG, DEVICE, torch.float32)


def test_little_work_is_told_by_bounds() -> None:
    """So that a batch and the graph of its bucket, and all batches of one bucket, take the same kernel."""
    choice = AttentionChoice("triton", "sdpa")
    little, much = (SpansShape(patches, patches // 4, 9, 99, 1024) for patches in (2048, 2112))
    assert is_little_work(little)
    assert not is_little_work(much)
    assert choice.fits_graphs(little)
    assert not choice.fits_graphs(much)
    assert str(choice) == "triton, sdpa"
    spans = plan_spans([(1, 4, 4), (1, 2, 2)], CONFIG, DEVICE)
    q, k, v = torch.randn(spans.num_patches, 3, 1, 72, device=DEVICE).unbind(1)
    found, truth = AttentionChoice("triton", "sdpa").load()(q, k, v, spans), AttentionChoice("sdpa", "sdpa").load()
    assert relative_error(found, truth(q, k, v, spans)) <= 1e-5
