"""Video chunks: sizes, pixels and embeddings against transformers' own video processor and model."""

import ast
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from encoder.config import ProcessorConfig
from encoder.errors import CheckpointError, ImageError
from encoder.model import Encoder
from encoder.preprocess import Pixels, preprocess
from encoder.sizing import Grid, grid_thw, num_patches, num_tokens, resized_size
from encoder.source import resolve_model
from encoder.weights import build_model
from tests.encoder.integer_resize import integer_resize
from tests.encoder.oracle import build_oracle, oracle_embeddings, relative_error, save

PROCESSOR = ProcessorConfig()
SIDES = st.integers(1, 10_000)
FRAMES = st.integers(1, 4)


def chunk(num_frames: int, height: int, width: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (num_frames, height, width, 3), np.uint8)


def outputs(encoder: Encoder, items: list[Pixels]) -> list[torch.Tensor]:
    grids = [preprocess(item, encoder.processor)[1] for item in items]
    return [torch.full((num_tokens(grid, 2), encoder.config.text_width), torch.nan) for grid in grids]


def encode(encoder: Encoder, items: list[Pixels]) -> list[torch.Tensor]:
    outs = outputs(encoder, items)
    assert encoder.encode(items, outs) == [True] * len(items)
    return outs


@pytest.fixture(scope="module")
def reference_resize() -> Callable[..., tuple[tuple[int, int], tuple[int, int]]]:
    """The rule of the reference's video processor, whose module cannot be imported without torchvision."""
    path = Path(transformers.__file__).parent / "models/kimi_k25/video_processing_kimi_k25.py"
    tree = ast.parse(path.read_text())
    (rule,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "navit_resize")
    namespace: dict[str, Any] = {"math": math}
    exec(compile(ast.Module([rule], []), str(path), "exec"), namespace)
    return namespace["navit_resize"]


@given(SIDES, SIDES, FRAMES)
def test_frames_have_the_references_sizes(
    reference_resize: Callable[..., tuple[tuple[int, int], tuple[int, int]]], width: int, height: int, num_frames: int
) -> None:
    (new_height, new_width), (padded_height, padded_width) = reference_resize(height, width, 14, 2, 4096, 512)
    assert resized_size(width, height, PROCESSOR, num_frames) == (new_width, new_height)
    grid = num_frames, padded_height // 14, padded_width // 14
    assert grid_thw(width, height, PROCESSOR, num_frames) == grid


def test_limits_are_those_that_the_reference_saves() -> None:
    files = json.loads((Path(__file__).parent.parent / "data" / "processor_files.json").read_text())
    video = files["processor_config.json"]["video_processor"]
    assert video["max_patches"] == PROCESSOR.max_patches_per_frame == 4096
    assert video["temporal_patch_size"] == PROCESSOR.frames_per_chunk == 4
    assert video["size"] == {"max_height": 512, "max_width": 512}


def test_a_chunk_of_one_frame_has_the_limit_of_frames() -> None:
    assert grid_thw(1400, 1400, PROCESSOR) == (1, 100, 100)
    assert grid_thw(1400, 1400, PROCESSOR, 1) == (1, 64, 64)
    assert grid_thw(1400, 1400, PROCESSOR, 4) == (4, 64, 64)
    assert grid_thw(640, 480, PROCESSOR) == grid_thw(640, 480, PROCESSOR, 1) == (1, 36, 46)


@pytest.mark.parametrize("num_frames", [-1, 5, 1000])
def test_chunks_of_other_lengths_are_refused(num_frames: int) -> None:
    with pytest.raises(ImageError, match=rf"{num_frames} frames.*1 to 4.*video\[i : i \+ 4\]"):
        grid_thw(28, 28, PROCESSOR, num_frames)


@pytest.mark.parametrize(("height", "width"), [(28, 28), (45, 100), (30, 9000), (1200, 1000)])
def test_rows_are_the_frames_one_after_the_other(height: int, width: int) -> None:
    frames = chunk(3, height, width)
    rows, grid = preprocess(frames, PROCESSOR)
    assert grid == grid_thw(width, height, PROCESSOR, 3)
    assert rows.shape == (num_patches(grid), 3, 14, 14)
    as_image = ProcessorConfig(max_patches=PROCESSOR.max_patches_per_frame)
    for frame, its_rows in zip(frames, np.split(rows, 3), strict=True):
        image_rows, image_grid = preprocess(frame, as_image)
        assert image_grid == (1, *grid[1:])
        assert np.array_equal(its_rows, image_rows)


def test_large_frames_are_resized_bit_for_bit() -> None:
    frames = chunk(2, 1000, 1100)
    rows, (_, high, wide) = preprocess(frames, PROCESSOR)
    size = resized_size(1100, 1000, PROCESSOR, 2)
    assert size != (1100, 1000)
    pictures = rows.reshape(2, high, wide, 3, 14, 14).transpose(0, 1, 4, 2, 5, 3).reshape(2, high * 14, wide * 14, 3)
    for frame, picture in zip(frames, pictures, strict=True):
        assert np.array_equal(picture[: size[1], : size[0]], integer_resize(frame, *size))
        assert not picture[size[1] :].any()
        assert not picture[:, size[0] :].any()


@pytest.mark.parametrize(
    "view",
    [
        lambda frames: frames[::-1],
        lambda frames: frames[:, ::-1, ::2],
        lambda frames: frames[..., ::-1],
        np.asfortranarray,
        lambda frames: np.broadcast_to(frames[:1], frames.shape),
    ],
    ids=["backwards", "sliced", "BGR", "Fortran order", "broadcast"],
)
def test_frames_of_any_layout(view: Callable[[Pixels], Pixels]) -> None:
    frames = view(chunk(3, 40, 60))
    assert np.array_equal(preprocess(frames, PROCESSOR)[0], preprocess(frames.copy(), PROCESSOR)[0])


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((0, 28, 28, 3), np.uint8),
        np.zeros((5, 28, 28, 3), np.uint8),
        np.zeros((2, 0, 28, 3), np.uint8),
        np.zeros((2, 3, 28, 28), np.uint8),
        np.zeros((1, 2, 28, 28, 3), np.uint8),
    ],
    ids=lambda pixels: str(pixels.shape),
)
def test_what_is_not_a_chunk_is_refused(pixels: Pixels) -> None:
    with pytest.raises(ImageError):
        preprocess(pixels, PROCESSOR)


MIXED = [
    chunk(1, 60, 90, seed=1),
    chunk(2, 60, 90, seed=2),
    chunk(1, 60, 90, seed=3)[0],
    chunk(3, 28, 28, seed=4),
    chunk(4, 130, 70, seed=5),
    chunk(1, 1, 1, seed=6)[0],
    chunk(4, 29, 57, seed=7),
]


@pytest.fixture(scope="module")
def oracle() -> object:
    return build_oracle(seed=11)


@pytest.fixture(scope="module")
def encoder(oracle: object, tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return Encoder.load(str(save(oracle, tmp_path_factory.mktemp("video"))))


def reference(oracle: object, items: list[Pixels]) -> list[torch.Tensor]:
    """The reference's embeddings of items that are not resized, its patches made frame by frame as it does."""
    rows: list[torch.Tensor] = []
    grids: list[Grid] = []
    for item in items:
        frames = torch.from_numpy(item if item.ndim == 4 else item[None]).permute(0, 3, 1, 2)
        padding = (0, -frames.shape[3] % 28, 0, -frames.shape[2] % 28)
        frames = torch.nn.functional.pad(frames, padding)
        time, _, height, width = frames.shape
        tiles = frames.view(time, 3, height // 14, 14, width // 14, 14).permute(0, 2, 4, 1, 3, 5)
        rows.append(tiles.reshape(-1, 3, 14, 14))
        grids.append((time, height // 14, width // 14))
    levels = torch.cat(rows).double() / 255
    return oracle_embeddings(oracle, ((levels - 0.5) / 0.5).float(), grids)


def test_images_and_chunks_in_one_pack_equal_the_reference(oracle: object, encoder: Encoder) -> None:
    for items in (MIXED, MIXED[::-1]):
        theirs = reference(oracle, items)
        for mine, wanted in zip(encode(encoder, items), theirs, strict=True):
            assert mine.shape == wanted.shape
            assert relative_error(mine, wanted) <= 1e-5


@pytest.mark.parametrize("num_frames", [1, 2, 3, 4])
def test_chunks_of_every_length_equal_the_reference(oracle: object, encoder: Encoder, num_frames: int) -> None:
    items = [chunk(num_frames, 84, 140, seed=20), chunk(num_frames, 28, 200, seed=21)]
    for mine, theirs in zip(encode(encoder, items), reference(oracle, items), strict=True):
        assert relative_error(mine, theirs) <= 1e-5


def test_a_chunk_does_not_depend_on_its_company(encoder: Encoder) -> None:
    for item, packed in zip(MIXED, encode(encoder, MIXED), strict=True):
        assert relative_error(packed, encode(encoder, [item])[0]) <= 1e-5


def test_every_frame_and_their_order_matter(encoder: Encoder) -> None:
    frames = chunk(4, 56, 56)
    (whole,) = encode(encoder, [frames])
    for index in range(4):
        changed = frames.copy()
        changed[index] ^= 255
        assert relative_error(encode(encoder, [changed])[0], whole) > 1e-3
    assert relative_error(encode(encoder, [frames[::-1]])[0], whole) > 1e-4


def test_a_chunk_of_one_frame_is_that_frame_as_an_image(encoder: Encoder) -> None:
    frame = chunk(1, 90, 60)
    (as_chunk,), (as_image,) = encode(encoder, [frame]), encode(encoder, [frame[0]])
    assert torch.equal(as_chunk, as_image)


def test_a_chunk_has_the_tokens_of_one_frame(encoder: Encoder) -> None:
    frames = chunk(4, 56, 84)
    with pytest.raises(ImageError, match=r"chunk of 4 frames of 84x56.*\(6, 40\)"):
        encoder.encode([frames], [torch.empty(24, 40)])


def test_a_processor_and_a_model_that_differ_on_frames() -> None:
    model = build_model(resolve_model("moonvit-tiny"), torch.float32)
    with pytest.raises(CheckpointError, match=r"frames_per_chunk is 5 in the processor.*4 frames"):
        Encoder(model, ProcessorConfig(frames_per_chunk=5))
    encoder = Encoder(model, ProcessorConfig(frames_per_chunk=3))
    with pytest.raises(ImageError, match="4 frames, this model takes 1 to 3"):
        encoder.encode([chunk(4, 28, 28)], [torch.empty(1, 256)])
