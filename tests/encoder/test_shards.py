"""Shards that say one thing and an index that says another."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from encoder.errors import CheckpointError
from encoder.source import resolve_model
from encoder.weights import INDEX_FILE, SINGLE_FILE, build_model
from tests.mmcache.weights import write_checkpoint

SHARDS = [f"model-{number}.safetensors" for number in range(3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", 1, num_shards=3)


def faults(folder: Path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        build_model(resolve_model(str(folder)), torch.float32)
    head, *lines = str(caught.value).splitlines()
    assert head == f"{folder}: vision tensors do not fit the model"
    return [line.strip() for line in lines]


def copy_tensor(folder: Path, source: str, target: str) -> str:
    """Put the first tensor of one shard into another too, with other values. Returns its name."""
    name, tensor = min(load_file(folder / source).items())
    save_file({**load_file(folder / target), name: tensor + 1}, folder / target)
    return name


@pytest.mark.parametrize(("source", "target"), [(0, 2), (2, 0)])
def test_the_same_tensor_in_two_shards(folder: Path, source: int, target: int) -> None:
    name = copy_tensor(folder, SHARDS[source], SHARDS[target])
    assert f"repeated: {name} is in {SHARDS[0]} and in {SHARDS[2]}" in faults(folder)


def test_a_tensor_in_another_file_than_the_index_says(folder: Path) -> None:
    table = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    moved = next(name for name, file in table.items() if file == SHARDS[0])
    unnamed = next(name for name, file in table.items() if file == SHARDS[2])
    table[moved] = SHARDS[1]
    del table[unnamed]
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": table}))
    assert faults(folder) == [
        f"misplaced: {moved} is in {SHARDS[0]}, the index says {SHARDS[1]}",
        f"misplaced: {unnamed} is in {SHARDS[2]}, the index says nothing of it",
    ]


def test_a_single_file_goes_before_an_index(folder: Path) -> None:
    tensors = {name: tensor for shard in SHARDS for name, tensor in load_file(folder / shard).items()}
    save_file(tensors, folder / SINGLE_FILE)
    (folder / INDEX_FILE).write_text("{")
    loaded = dict(build_model(resolve_model(str(folder)), torch.float32).named_parameters())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_many_faults_are_counted(tmp_path: Path) -> None:
    """The error has room for a message, and the search for faults takes no longer than the list of tensors."""
    folder = write_checkpoint(tmp_path / "model", 1)
    extra = {f"vision_tower.extra.{number}": torch.zeros(1) for number in range(20_000)}
    long = {"mm_projector." + "x" * 1_000_000: torch.zeros(1)}
    save_file({**load_file(folder / SINGLE_FILE), **extra, **long}, folder / SINGLE_FILE)
    lines = faults(folder)
    assert len(lines) == 51
    assert lines[-1] == "and 19951 more"
    assert sum(map(len, lines)) < 4000
    settings = json.loads((folder / "config.json").read_text())
    settings["vision_config"]["vt_num_hidden_layers"] = 1024
    (folder / "config.json").write_text(json.dumps(settings))
    assert faults(folder)[-1].startswith("and ")
