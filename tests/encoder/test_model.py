import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from encoder.errors import CheckpointError, ImageError
from encoder.finite import all_finite
from encoder.model import Encoder
from encoder.preprocess import Pixels, preprocess
from encoder.sizing import grid_thw, num_tokens
from encoder.source import resolve_model
from encoder.weights import build_model
from tests.encoder.oracle import build_oracle, oracle_embeddings, relative_error, save

SIZES = [(30, 90), (1, 1), (28, 28), (224, 200)]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder.load("moonvit-tiny")


def noise(width: int, height: int) -> Pixels:
    return np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def outputs(encoder: Encoder, images: list[Pixels]) -> list[torch.Tensor]:
    grids = [grid_thw(image.shape[1], image.shape[0], encoder.processor) for image in images]
    width = encoder.config.text_width
    return [torch.full((num_tokens(grid, 2), width), torch.nan, dtype=encoder.dtype) for grid in grids]


def encode(encoder: Encoder, images: list[Pixels]) -> list[torch.Tensor]:
    outs = outputs(encoder, images)
    assert encoder.encode(images, outs) == [True] * len(images)
    return outs


def test_from_pixels_to_the_reference(tmp_path: Path) -> None:
    oracle = build_oracle(seed=2)
    encoder = Encoder.load(str(save(oracle, tmp_path)))
    images = [noise(*size) for size in SIZES]
    rows, grids = zip(*(preprocess(image, encoder.processor) for image in images), strict=True)
    normalised = torch.from_numpy(np.concatenate(rows)).double() / 255
    theirs = oracle_embeddings(oracle, ((normalised - 0.5) / 0.5).float(), grids)
    for mine, reference in zip(encode(encoder, images), theirs, strict=True):
        assert relative_error(mine, reference) <= 1e-5


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_an_image_depends_neither_on_its_company_nor_on_threads(
    dtype: torch.dtype, bound: float, set_threads: Callable[[int], None]
) -> None:
    """More ranks on one host are fewer threads for each."""
    encoder = Encoder.load("moonvit-tiny", dtype=dtype)
    images = [noise(*size) for size in SIZES]
    set_threads(1)
    alone = [encode(encoder, [image])[0] for image in images]
    for count in (1, 2, 3):
        set_threads(count)
        for order in (images, images[::-1], images[1:]):
            wanted = [alone[index] for image in order for index, known in enumerate(images) if known is image]
            for mine, theirs in zip(encode(encoder, order), wanted, strict=True):
                assert relative_error(mine, theirs) <= bound


def test_the_same_image_again_gives_the_same_bytes(encoder: Encoder) -> None:
    images = [noise(*size) for size in SIZES]
    for first, second in zip(encode(encoder, images), encode(Encoder.load("moonvit-tiny"), images), strict=True):
        assert torch.equal(first, second)


def test_embeddings_of_a_preset_are_of_order_one(encoder: Encoder) -> None:
    (rows,) = encode(encoder, [noise(280, 280)])
    assert 0.1 < rows.std() < 10


def test_channels_are_normalised_each_by_its_own(tmp_path: Path) -> None:
    folder = save(build_oracle(), tmp_path)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.25, 1.0]}')
    plain, shifted = noise(28, 28), Encoder.load(str(folder))
    rows, grid = preprocess(plain, shifted.processor)
    mean, std = (np.array(values).reshape(3, 1, 1) for values in ([0.1, 0.2, 0.3], [0.5, 0.25, 1.0]))
    patches = torch.from_numpy((rows / 255 - mean) / std).float()
    (theirs,) = oracle_embeddings(build_oracle(), patches, [grid])
    assert relative_error(encode(shifted, [plain])[0], theirs) <= 1e-5


def test_no_images_is_no_work(encoder: Encoder) -> None:
    assert encoder.encode([], []) == []


def test_bfloat16(encoder: Encoder) -> None:
    image = noise(112, 84)
    half = Encoder.load("moonvit-tiny", dtype=torch.bfloat16)
    (low,) = encode(half, [image])
    assert low.dtype == half.dtype == torch.bfloat16
    assert relative_error(low, encode(encoder, [image])[0]) < 0.05


def test_outputs_that_do_not_fit_are_refused_before_writing(encoder: Encoder) -> None:
    images = [noise(56, 56), noise(28, 28)]
    good = outputs(encoder, images)
    width = encoder.config.text_width
    wrong = [
        torch.empty(2, width),
        torch.empty(1, width, dtype=torch.float64),
        torch.empty(1, 2 * width)[:, ::2],
        torch.empty(1, width, device="meta"),
    ]
    for out in wrong:
        with pytest.raises(ImageError, match="28x28"):
            encoder.encode(images, [good[0], out])
    with pytest.raises(ImageError, match="2 items"):
        encoder.encode(images, good[:1])
    with pytest.raises(ImageError, match="uint8"):
        encoder.encode([images[0].astype(np.float32)], good[:1])
    assert good[0].isnan().all()


def test_values_that_are_not_finite_are_reported() -> None:
    model = build_model(resolve_model("moonvit-tiny"), torch.float32)
    encoder = Encoder(model, resolve_model("moonvit-tiny").processor)
    model.mm_projector.proj[2].bias[5] = torch.inf
    images = [noise(28, 28), noise(56, 28)]
    assert encoder.encode(images, outputs(encoder, images)) == [False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_finiteness_is_told_per_item(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    rows = [torch.full((3, 4), value, dtype=dtype) for value in (0.0, 1.0, largest, -largest, 2.0)]
    rows[0][2, 3] = torch.nan
    rows[1][0, 0] = -torch.inf
    rows[4][1, 1] = torch.inf
    assert all_finite(rows) == [False, False, True, True, False]


def test_tensors_are_sorted_and_in_the_encoders_dtype(encoder: Encoder) -> None:
    named = list(encoder.tensors())
    names = [name for name, _ in named]
    assert names == sorted(names)
    assert len(names) == len(set(names)) == 12 * encoder.config.num_layers + 11
    assert all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for _, t in named)
    assert {"vision_tower.encoder.blocks.1.wqkv.weight", "mm_projector.proj.2.bias"} <= set(names)


def test_a_model_that_does_not_exist() -> None:
    with pytest.raises(CheckpointError, match="moonvit-tiny"):
        Encoder.load("moonvit-huge")


def test_the_torch_free_modules_are_free_of_torch() -> None:
    names = ["errors", "config", "config_files", "sizing", "least_squares", "sharding", "source"]
    code = (
        f"import sys\nimport {', '.join(f'encoder.{name}' for name in names)}\n"
        "print(sorted({'torch', 'numpy', 'PIL', 'safetensors'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
