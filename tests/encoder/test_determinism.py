"""`deterministic`: the same bits in any company, on any number of threads, wherever weights and outputs lie."""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from encoder.config import EncoderConfig, ProcessorConfig
from encoder.determinism import ALIGNMENT_BYTES, CUBLAS_WORKSPACE, OneByOne, align_parameters, is_aligned
from encoder.difference import ROWS_AT_ONCE, Difference, difference
from encoder.errors import EncoderError
from encoder.model import Encoder
from encoder.moonvit import MoonViT
from encoder.preprocess import Pixels
from encoder.sizing import grid_thw, num_tokens
from encoder.source import ModelSource, resolve_model
from encoder.weights import build_model

TINY = resolve_model("moonvit-tiny").config
NARROW = EncoderConfig(hidden_size=72, num_layers=2, num_heads=3, mlp_size=100, text_width=60)
"""A width at which packs change bits even on one thread."""
SIZES = [(28, 28), (1, 1), (56, 28), (84, 84), (224, 200), (140, 196), (30, 90), (300, 476)]
DTYPES = [torch.float32, torch.bfloat16]


def build(config: EncoderConfig, dtype: torch.dtype = torch.float32) -> MoonViT:
    return build_model(ModelSource("test", config, ProcessorConfig(), None), dtype)


def noise(width: int, height: int) -> Pixels:
    return np.random.default_rng([width, height]).integers(0, 256, (height, width, 3), dtype=np.uint8)


IMAGES = [noise(*size) for size in SIZES]


def outputs(encoder: Encoder, images: Sequence[Pixels]) -> list[torch.Tensor]:
    grids = [grid_thw(image.shape[1], image.shape[0], encoder.processor) for image in images]
    width = encoder.config.text_width
    return [torch.full((num_tokens(grid, 2), width), torch.nan, dtype=encoder.dtype) for grid in grids]


def encode(encoder: Encoder, chosen: Sequence[int]) -> list[torch.Tensor]:
    images = [IMAGES[index] for index in chosen]
    outs = outputs(encoder, images)
    assert encoder.encode(images, outs) == [True] * len(images)
    return outs


def misaligned(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """The same values, beginning that many bytes behind an aligned address."""
    nbytes = tensor.numel() * tensor.element_size()
    room = torch.empty(nbytes + 2 * ALIGNMENT_BYTES, dtype=torch.uint8)
    start = -room.data_ptr() % ALIGNMENT_BYTES + num_bytes
    moved = room[start : start + nbytes].view(tensor.dtype).view(tensor.shape)
    return moved.copy_(tensor)


@pytest.fixture(autouse=True)
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", [TINY, NARROW], ids=["tiny", "narrow"])
def test_the_same_bits_in_any_company_on_any_threads(
    config: EncoderConfig, dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    """A rank of many has fewer threads, and gets other packs; each process loads its own weights."""
    draw = random.Random(1)
    truth: list[torch.Tensor] = []
    for at_load in (1, 2, 3, 5):
        set_threads(at_load)
        encoder = Encoder(build(config, dtype), ProcessorConfig(), deterministic=True)
        truth = truth or [encode(encoder, [index])[0] for index in range(len(IMAGES))]
        for at_encode in (1, 2, 4):
            set_threads(at_encode)
            for _ in range(4):
                chosen = draw.choices(range(len(IMAGES)), k=draw.randint(1, 8))
                for index, out in zip(chosen, encode(encoder, chosen), strict=True):
                    assert torch.equal(out, truth[index]), (SIZES[index], at_load, at_encode)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_it_excludes_is_small_where_it_happens(dtype: torch.dtype, set_threads: Callable[[int], None]) -> None:
    """Packs change bits of their items on some processors and at some widths; on the others there is nothing to see."""
    set_threads(1)
    encoder = Encoder(build(NARROW, dtype), ProcessorConfig())
    alone = [encode(encoder, [index])[0] for index in range(len(IMAGES))]
    packed = encode(encoder, range(len(IMAGES)))
    changes = [difference(out, truth) for out, truth in zip(packed, alone, strict=True)]
    assert max(change.relative_error for change in changes) <= (1e-5 if dtype == torch.float32 else 2e-2)
    if all(change.is_same_bits for change in changes):
        pytest.skip("this processor computes packs of these pictures to the same bits as each alone")


def test_deterministic_is_near_to_not(set_threads: Callable[[int], None]) -> None:
    set_threads(2)
    plain, fixed = (Encoder(build(TINY), ProcessorConfig(), deterministic=flag) for flag in (False, True))
    for out, truth in zip(encode(fixed, range(4)), encode(plain, range(4)), strict=True):
        assert difference(out, truth).relative_error <= 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_weights_and_outputs_lie_is_no_matter(dtype: torch.dtype) -> None:
    truth = encode(Encoder(build(TINY, dtype), ProcessorConfig(), deterministic=True), range(len(IMAGES)))
    model = build(TINY, dtype)
    for parameter in model.parameters():
        parameter.data = misaligned(parameter.data, 4)
    encoder = Encoder(model, ProcessorConfig(), deterministic=True)
    assert all(is_aligned(tensor) for _, tensor in encoder.tensors())
    outs = [misaligned(out, 4) for out in outputs(encoder, IMAGES)]
    assert encoder.encode(IMAGES, outs) == [True] * len(IMAGES)
    assert all(torch.equal(out, expected) for out, expected in zip(outs, truth, strict=True))


def test_aligning_changes_no_value_and_moves_only_what_must() -> None:
    model = build(TINY)
    before = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
    bias = model.vision_tower.patch_embed.proj.bias
    bias.data = misaligned(bias.data, 4)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    align_parameters(model)
    moved = {name for name, parameter in model.named_parameters() if parameter.data_ptr() != places[name]}
    assert moved == {"vision_tower.patch_embed.proj.bias"}
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_arithmetic_is_on_one_thread_and_the_caller_keeps_its_own(set_threads: Callable[[int], None]) -> None:
    set_threads(3)
    one_by_one = OneByOne(torch.device("cpu"))
    assert torch.get_num_threads() == 3
    set_threads(2)
    seen: list[tuple[int, int]] = []
    meet = threading.Barrier(3, timeout=30)

    def look() -> None:
        meet.wait()  # three at once
        seen.append((torch.get_num_threads(), threading.get_ident()))

    one_by_one.run([look] * 3)
    assert {count for count, _ in seen} == {1}
    assert len({ident for _, ident in seen}) == 3
    assert threading.get_ident() not in {ident for _, ident in seen}
    assert torch.get_num_threads() == 2


def test_an_error_comes_when_nothing_runs_any_more() -> None:
    one_by_one, written = OneByOne(torch.device("cpu")), []

    def fail(reason: str) -> None:
        raise ValueError(reason)

    work = [partial(fail, "first"), partial(written.append, 1), partial(fail, "second"), partial(written.append, 2)]
    with pytest.raises(ValueError, match="first"):
        one_by_one.run(work)
    assert sorted(written) == [1, 2]
    one_by_one.run([])


def test_threads_end_with_their_encoder(set_threads: Callable[[int], None]) -> None:
    set_threads(4)
    before = set(threading.enumerate())
    encoder = Encoder(build(NARROW), ProcessorConfig(), deterministic=True)
    encode(encoder, [0, 1])
    mine = set(threading.enumerate()) - before
    assert len(mine) == 4
    del encoder
    for thread in mine:
        thread.join(30)
    assert not any(thread.is_alive() for thread in mine)


def test_cublas_needs_a_fixed_workspace() -> None:
    """In a process of its own: torch is told for the whole process."""
    code = (
        "import torch\nfrom encoder.determinism import OneByOne\nfrom encoder.errors import EncoderError\n"
        "try:\n    OneByOne(torch.device('cuda'))\n"
        "except EncoderError as error:\n    print(error)\n"
        "else:\n    print(torch.are_deterministic_algorithms_enabled())\n"
    )

    def told(environ: dict[str, str]) -> str:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
        return done.stdout

    bare = {name: value for name, value in os.environ.items() if name != CUBLAS_WORKSPACE}
    assert CUBLAS_WORKSPACE in told(bare)
    assert told(bare | {CUBLAS_WORKSPACE: ":4096:8"}) == "True\n"
    assert issubclass(EncoderError, Exception)


def test_differences_are_told() -> None:
    truth = torch.randn(ROWS_AT_ONCE + 50, 64, generator=torch.Generator().manual_seed(0))
    assert difference(truth.clone(), truth) == Difference(True, 0.0, 1.0)
    near = difference(truth * (1 + 1e-4), truth)
    assert not near.is_same_bits
    assert near.relative_error == pytest.approx(1e-4, rel=0.01)
    assert near.min_cosine == pytest.approx(1.0, abs=1e-6)
    turned = truth.clone()
    turned[ROWS_AT_ONCE + 7] *= -1
    assert difference(turned, truth).min_cosine == pytest.approx(-1.0)
    assert difference(torch.zeros(2, 4), -torch.zeros(2, 4)) == Difference(False, 0.0, 1.0)
    assert difference(truth, torch.zeros_like(truth)).relative_error == float("inf")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_never_near(value: float) -> None:
    truth = torch.ones(4, 8)
    bad = truth.clone()
    bad[2, 3] = value
    for pair in ((bad, truth), (truth, bad)):
        assert not difference(*pair).relative_error <= 1e-5
    assert difference(bad, bad.clone()).is_same_bits


def test_a_checkpoint_loads_deterministic(tmp_path: Path) -> None:
    encoder = Encoder.load("moonvit-tiny", deterministic=True)
    again = Encoder(build(TINY), ProcessorConfig(), deterministic=True)
    assert torch.equal(encode(encoder, [3])[0], encode(again, [3])[0])
