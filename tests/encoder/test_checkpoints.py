"""Whole folders, as transformers writes them and as the original repository holds them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from encoder.errors import CheckpointError
from encoder.model import Encoder
from encoder.names import place
from encoder.source import resolve_model
from encoder.weights import INDEX_FILE, SINGLE_FILE, build_model, vision_files
from tests.encoder.checkpoints import original_settings, watched_opens, write_json, write_original
from tests.encoder.oracle import build_oracle, save

Tensors = dict[str, torch.Tensor]
Maker = Callable[[str, int], Path]
NAMINGS = ("default", "transformers", "original")
MAX_SHARD_SIZE = {1: "50GB", 20: "10KB"}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Makes a folder of a naming, in one file or about 20; all hold the same weights."""
    oracle = build_oracle(seed=21)

    def folder(naming: str, num_shards: int) -> Path:
        options = {"max_shard_size": MAX_SHARD_SIZE[num_shards], "save_original_format": naming != "transformers"}
        path = save(oracle, tmp_path_factory.mktemp(naming), **options)
        return write_original(path, tmp_path_factory.mktemp("renamed")) if naming == "original" else path

    return folder


@pytest.fixture(scope="module")
def expected(make: Maker) -> Tensors:
    return parameters(make("default", 1))


def parameters(folder: Path, dtype: torch.dtype = torch.float32) -> Tensors:
    return dict(build_model(resolve_model(str(folder)), dtype).named_parameters())


def stored_names(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    return names


MARKS = {
    "default": "vision_tower.encoder.patch_embed.proj.weight",
    "transformers": "model.vision_tower.layers.1.attn.k_proj.bias",
    "original": "vision_tower.patch_embed.proj.weight",
}


@pytest.mark.parametrize("num_shards", [1, 20])
@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming_whole_and_sharded(make: Maker, expected: Tensors, naming: str, num_shards: int) -> None:
    folder = make(naming, num_shards)
    num_files = len(list(folder.glob("*.safetensors")))
    assert num_files == 1 if num_shards == 1 else 15 <= num_files <= 25
    assert (folder / INDEX_FILE).exists() == (num_shards > 1)
    assert MARKS[naming] in stored_names(folder)
    loaded = parameters(folder)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())


@pytest.mark.parametrize("naming", NAMINGS)
def test_a_shard_without_vision_tensors_is_never_opened(make: Maker, naming: str) -> None:
    folder = make(naming, 20)
    shards = {path.name for path in folder.glob("*.safetensors")}
    needed = {path.name for path in vision_files(folder)}
    table = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    assert needed == {file for name, file in table.items() if place(name)}
    assert 3 < len(needed) <= len(shards) - 2
    with watched_opens(folder) as opened:
        Encoder.load(str(folder))
    assert opened & shards == needed
    for name in shards - needed:
        (folder / name).unlink()
    assert parameters(folder)


def quantized_linear(weight: torch.Tensor, kind: str) -> Tensors:
    """What stands in a checkpoint for a linear layer's weight, by how it is quantized."""
    rows, columns = weight.shape
    scale = torch.ones(rows, 1, dtype=torch.bfloat16)
    kinds = {
        "int8": {"weight": weight.to(torch.int8)},
        "fp8": {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": scale},
        "fp8 blocks": {"weight": weight.to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 1)},
        "packed int4": {"weight_packed": torch.zeros(rows, columns // 8, dtype=torch.int32), "weight_scale": scale},
        "packed uint8": {"weight": torch.zeros(rows, columns // 2, dtype=torch.uint8)},
    }
    return kinds[kind]


@pytest.mark.parametrize("kind", ["int8", "fp8", "fp8 blocks", "packed int4", "packed uint8"])
@pytest.mark.parametrize("naming", NAMINGS)
def test_quantized_tensors_are_refused_by_name(make: Maker, naming: str, kind: str) -> None:
    folder = make(naming, 1)
    tensors = load_file(folder / SINGLE_FILE)
    name = next(name for name in sorted(tensors) if name.endswith(("blocks.0.wqkv.weight", "0.attn.q_proj.weight")))
    stem = name.removesuffix("weight")
    stored = {stem + suffix: tensor for suffix, tensor in quantized_linear(tensors.pop(name), kind).items()}
    save_file({**tensors, **stored}, folder / SINGLE_FILE)
    with pytest.raises(CheckpointError) as caught:
        parameters(folder)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  quantized: ")]
    assert [line.split()[1] for line in lines] == sorted(stored)


def test_a_quantized_text_model_is_none_of_our_business(make: Maker, expected: Tensors) -> None:
    folder = make("original", 1)
    tensors = load_file(folder / SINGLE_FILE)
    text = {name: tensor.to(torch.int8) for name, tensor in tensors.items() if not place(name)}
    assert text
    save_file({**tensors, **text}, folder / SINGLE_FILE)
    loaded = parameters(folder)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())


def test_a_scheme_over_the_tower_is_refused_before_any_tensor_is_read(make: Maker) -> None:
    folder = make("default", 1)
    settings = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**settings, "quantization_config": {"quant_method": "fp8"}})
    with watched_opens(folder) as opened, pytest.raises(CheckpointError, match=r"quantization_config \(fp8\) covers"):
        Encoder.load(str(folder))
    assert SINGLE_FILE not in opened
    assert "config.json" in opened


def test_both_spellings_of_the_settings_are_one_model(make: Maker) -> None:
    settings = json.loads((make("default", 1) / "config.json").read_text())
    assert original_settings(settings).keys() != settings.keys()
    sources = [resolve_model(str(make(naming, 1))) for naming in NAMINGS]
    assert len({source.config.canonical() for source in sources}) == 1
    assert len({source.processor.canonical() for source in sources}) == 1
