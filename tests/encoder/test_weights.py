import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from encoder.config import PRESETS
from encoder.errors import CheckpointError
from encoder.moonvit import MoonViT
from encoder.names import Place, place
from encoder.source import resolve_model
from encoder.weights import INDEX_FILE, SINGLE_FILE, build_model, vision_files
from tests.encoder.checkpoints import write_json, write_original
from tests.encoder.oracle import build_oracle, save, vision_parameters

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def oracle() -> object:
    return build_oracle(seed=11)


@pytest.fixture(scope="module")
def default_folder(oracle: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(oracle, tmp_path_factory.mktemp("default"))


@pytest.fixture(scope="module")
def expected(default_folder: Path) -> Tensors:
    """Parameters by their original names: the default spelling is nearly that, and `test_moonvit` proves the values."""
    return parameters(default_folder)


@pytest.fixture
def original_folder(default_folder: Path, tmp_path: Path) -> Path:
    """A folder as the original repository spells it: settings, nested processor settings and tensors."""
    write_json(tmp_path / "preprocessor_config.json", {"media_proc_cfg": {"in_patch_limit": 900}})
    return write_original(default_folder, tmp_path)


def parameters(folder: Path, dtype: torch.dtype = torch.float32) -> Tensors:
    return {name: tensor.detach() for name, tensor in build_model(resolve_model(str(folder)), dtype).named_parameters()}


def assert_same(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change tensors of a single-file checkpoint; None removes one."""
    tensors = {**load_file(folder / SINGLE_FILE), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / SINGLE_FILE)


def test_original_names_are_the_models_own(original_folder: Path, expected: Tensors) -> None:
    stored = {name: tensor for name, tensor in load_file(original_folder / SINGLE_FILE).items() if place(name)}
    assert_same(expected, stored)
    assert_same(parameters(original_folder), expected)


def test_settings_of_the_original_repository(original_folder: Path, default_folder: Path) -> None:
    source = resolve_model(str(original_folder))
    assert source.config == resolve_model(str(default_folder)).config
    assert source.processor.max_patches == 900


def test_projector_layers_by_number(original_folder: Path, expected: Tensors) -> None:
    tensors = load_file(original_folder / SINGLE_FILE)
    renamed = {
        name.replace("mm_projector.proj.0.", "mm_projector.linear_1.").replace(
            "mm_projector.proj.2.", "mm_projector.linear_2."
        ): tensor
        for name, tensor in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    save_file(renamed, original_folder / SINGLE_FILE)
    assert_same(parameters(original_folder), expected)


def test_separate_and_permuted_projections(oracle: object, expected: Tensors, tmp_path: Path) -> None:
    folder = save(oracle, tmp_path, save_original_format=False)
    assert any("q_proj" in name for name in load_file(folder / SINGLE_FILE) if place(name))
    assert_same(parameters(folder), expected)


@pytest.mark.parametrize("original", [True, False], ids=["default", "transformers"])
def test_only_shards_with_vision_tensors_are_opened(
    oracle: object, expected: Tensors, tmp_path: Path, original: bool
) -> None:
    folder = save(oracle, tmp_path, max_shard_size="40KB", save_original_format=original)
    shards = set(folder.glob("*.safetensors"))
    needed = set(vision_files(folder))
    assert 3 < len(needed) < len(shards)
    for shard in shards - needed:
        shard.write_bytes(b"not a checkpoint")
    assert_same(parameters(folder), expected)


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_an_unreadable_shard_is_named(oracle: object, tmp_path: Path, damage: str) -> None:
    folder = save(oracle, tmp_path, max_shard_size="40KB")
    shard = vision_files(folder)[1]
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    else:
        shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        parameters(folder)


def test_every_fault_is_listed(original_folder: Path) -> None:
    rewrite(
        original_folder,
        **{
            "mm_projector.proj.2.bias": None,
            "vision_tower.extra.weight": torch.zeros(2),
            "vision_tower.encoder.final_layernorm.weight": torch.zeros(5),
            "vision_tower.encoder.blocks.0.wo.bias": torch.zeros(72, dtype=torch.float64),
            "vision_tower.encoder.blocks.1.wo.bias": torch.zeros(72, dtype=torch.int8),
            "model.mm_projector.pre_norm.bias": torch.zeros(72),
        },
    )
    with pytest.raises(CheckpointError) as caught:
        parameters(original_folder)
    assert str(caught.value).splitlines()[1:] == [
        "  extra: vision_tower.extra.weight",
        "  missing: mm_projector.proj.2.bias",
        "  quantized: vision_tower.encoder.blocks.1.wo.bias is I8, readable are F32, BF16, F16",
        "  repeated: mm_projector.pre_norm.bias",
        "  wrong dtype: vision_tower.encoder.blocks.0.wo.bias is F64, readable are F32, BF16, F16",
        "  wrong shape: vision_tower.encoder.final_layernorm.weight is (5,), the model has (72,)",
    ]


def test_a_missing_part_is_named(oracle: object, tmp_path: Path) -> None:
    folder = save(oracle, tmp_path, save_original_format=False)
    rewrite(folder, **{"model.vision_tower.layers.0.attn.k_proj.weight": None})
    with pytest.raises(CheckpointError, match=r"missing: vision_tower\.encoder\.blocks\.0\.wqkv\.weight \(k\)"):
        parameters(folder)


def test_a_layer_too_many_is_refused(default_folder: Path, original_folder: Path) -> None:
    settings = json.loads((original_folder / "config.json").read_text())
    settings["vision_config"]["vt_num_hidden_layers"] = 1
    write_json(original_folder / "config.json", settings)
    with pytest.raises(CheckpointError, match=r"extra: vision_tower\.encoder\.blocks\.1\."):
        parameters(original_folder)


def test_stored_half_precision_is_widened(original_folder: Path, expected: Tensors) -> None:
    halves = {name: tensor.bfloat16() for name, tensor in load_file(original_folder / SINGLE_FILE).items()}
    save_file(halves, original_folder / SINGLE_FILE)
    assert_same(parameters(original_folder), {name: tensor.bfloat16().float() for name, tensor in expected.items()})
    loaded = parameters(original_folder, torch.bfloat16)
    assert_same(loaded, {name: tensor.bfloat16() for name, tensor in expected.items()})


def test_a_later_change_of_the_file_is_not_seen(original_folder: Path, expected: Tensors) -> None:
    loaded = parameters(original_folder)
    path = original_folder / SINGLE_FILE
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert_same(loaded, expected)


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        vision_files(tmp_path)
    write_json(tmp_path / INDEX_FILE, {"weight_map": {"language_model.norm.weight": "a.safetensors"}})
    with pytest.raises(CheckpointError, match="no vision tensor"):
        vision_files(tmp_path)
    write_json(tmp_path / INDEX_FILE, {"weight_map": {"mm_projector.proj.0.bias": "../a.safetensors"}})
    with pytest.raises(CheckpointError, match="beside the index"):
        vision_files(tmp_path)
    (tmp_path / INDEX_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=INDEX_FILE):
        vision_files(tmp_path)


@pytest.mark.parametrize(
    ("name", "expected_place"),
    [
        ("language_model.model.layers.0.mlp.fc1.weight", None),
        ("model.language_model.norm.weight", None),
        ("vision_tower.encoder.blocks.3.norm1.bias", Place("vision_tower.encoder.blocks.3.norm1.bias")),
        ("model.vision_tower.layers.3.norm1.bias", Place("vision_tower.encoder.blocks.3.norm0.bias")),
        ("model.vision_tower.layers.12.attn.v_proj.bias", Place("vision_tower.encoder.blocks.12.wqkv.bias", "v")),
        ("mm_projector.out_proj.weight", Place("mm_projector.proj.2.weight")),
    ],
)
def test_where_names_go(name: str, expected_place: Place | None) -> None:
    assert place(name) == expected_place


def test_every_vision_tensor_of_transformers_is_placed(oracle: object, expected: Tensors) -> None:
    places = {place(name) for name, _ in vision_parameters(oracle)}
    assert {target.parameter for target in places if target} == expected.keys()


def test_presets_are_the_same_every_time() -> None:
    first, second = (build_model(resolve_model("moonvit-tiny"), torch.float32) for _ in range(2))
    assert_same(dict(first.named_parameters()), dict(second.named_parameters()))
    half = build_model(resolve_model("moonvit-tiny"), torch.bfloat16)
    assert_same(dict(half.named_parameters()), {name: p.bfloat16() for name, p in first.named_parameters()})


def test_presets_leave_no_parameter_at_its_default() -> None:
    model = build_model(resolve_model("moonvit-tiny"), torch.float32)
    for name, parameter in model.named_parameters():
        assert len(np.unique(parameter.numpy())) > parameter.numel() / 2, name


def test_size_of_the_true_shape() -> None:
    with torch.device("meta"):
        model = MoonViT(PRESETS["kimi-k2.5"])
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(471e6, rel=0.005)
    assert sum(p.numel() for p in model.vision_tower.encoder.blocks.parameters()) == pytest.approx(411e6, rel=0.005)
