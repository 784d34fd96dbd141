"""What is in a fingerprint and what is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from encoder import config as encoder_config
from mmcache.config import Settings
from mmcache.keys import Fingerprint
from mmcache.server.facts import facts_of
from tests.encoder import oracle
from tests.encoder.checkpoints import write_original
from tests.mmcache.model_reports import change_one_weight, change_settings, report_of
from tests.mmcache.weights import CONFIG, write_checkpoint


def settings_of(folder: Path, **chosen: Any) -> Settings:
    return Settings(state=folder / "state", socket=folder / "socket", model=str(folder), **chosen)


def fingerprint_of(folder: Path, **chosen: Any) -> Fingerprint:
    """As a sidecar with these settings would have it."""
    settings = settings_of(folder, **chosen)
    report = report_of(folder, dtype=settings.dtype, deterministic=settings.deterministic)
    return facts_of(settings, settings.model, report).fingerprint


def change_processor(folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": {"in_patch_limit": 4096}}))


def nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        (change_one_weight, {}),
        (change_settings, {}),
        (change_processor, {}),
        (nothing, {"dtype": "bfloat16"}),
        (nothing, {"orientation": "ignore"}),
        (nothing, {"deterministic": True}),
    ],
)
def test_what_is_in(tmp_path: Path, change: Callable[[Path], None], chosen: dict[str, Any]) -> None:
    folder = write_checkpoint(tmp_path / "model", 1)
    before = fingerprint_of(folder)
    change(folder)
    assert fingerprint_of(folder, **chosen) != before


def test_the_numerics_version_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "model", 1)
    report = report_of(folder)
    assert report.numerics_version == encoder_config.NUMERICS_VERSION
    settings = settings_of(folder)
    newer = report.model_copy(update={"numerics_version": report.numerics_version + 1})
    assert facts_of(settings, "m", newer).fingerprint != facts_of(settings, "m", report).fingerprint


def test_what_is_out(tmp_path: Path) -> None:
    """Names, sharding, and every setting that decides no embedding."""
    folder = write_checkpoint(tmp_path / "model", 1)
    before = fingerprint_of(folder)
    assert fingerprint_of(write_checkpoint(tmp_path / "other", 1, num_shards=7)) == before
    left_out = {
        "ranks": 5,
        "pool_bytes": 1 << 30,
        "ingest_bytes": 1 << 26,
        "store": "none",
        "max_pixels": 1000,
        "max_batch_patches": 64,
        "control_words": 64,
        "verify_sample": 9,
        "log_level": "debug",
    }
    for name, value in left_out.items():
        assert fingerprint_of(folder, **{name: value}) == before, name
    report, settings = report_of(folder), settings_of(folder)
    measured = report.model_copy(update={"cost": [9.0] * 5, "cost_identity": "", "identity": ""})
    assert facts_of(settings, "another name", measured).fingerprint == before
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").write_text("{}")
    assert fingerprint_of(folder) == before


def test_every_setting_is_in_or_out() -> None:
    """A new setting has to be put on one side, here and in docs/fingerprint.md."""
    inside = {"model", "dtype", "orientation", "deterministic"}
    outside = {
        "device", "ranks", "decoders", "pool_bytes", "ingest_bytes", "state", "store", "store_bytes", "socket",
        "control_words", "max_item_bytes", "max_pixels", "decode_timeout_s", "encode_timeout_s", "verify_sample",
        "max_batch_patches", "drain_timeout_s",
        "store_timeout_ms", "write_behind_bytes", "log_level", "staging_bytes", "staging_bytes_total", "lease_limit_s",
        "lease_limit_action", "max_patches_per_second", "device_bytes", "stream_priority", "batch_wait_ms",
        "max_queued_items", "attention", "graph_bytes", "http", "log_format",
    }  # fmt: skip
    assert Settings.model_fields.keys() == inside | outside
    table = (Path(__file__).parents[2] / "docs" / "fingerprint.md").read_text()
    assert [name for name in sorted(inside | outside) if f"`{name}`" not in table] == []


def test_the_spelling_of_a_checkpoint_is_out(tmp_path: Path) -> None:
    """The three namings of the same weights, whole and in shards."""
    model = oracle.build_oracle()
    default = oracle.save(model, tmp_path / "default")
    (tmp_path / "original").mkdir()
    folders = [
        default,
        write_original(default, tmp_path / "original"),
        oracle.save(model, tmp_path / "new", save_original_format=False),
        oracle.save(model, tmp_path / "shards", max_shard_size="40KB"),
    ]
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 10
    assert len({fingerprint_of(folder) for folder in folders}) == 1


def test_a_preset_is_by_its_weights(tmp_path: Path) -> None:
    assert report_of(Path("moonvit-tiny")).identity == ""
    assert report_of(Path("moonvit-tiny")).weights_digest == report_of(Path("moonvit-tiny")).weights_digest


def test_digests_are_of_what_is_loaded(tmp_path: Path) -> None:
    """Weights that differ in a checkpoint and not in the encoder's dtype are the same weights."""
    from safetensors.torch import load_file, save_file

    folder = write_checkpoint(tmp_path / "model", 1)
    tensors = load_file(folder / "model.safetensors")
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    twin = write_checkpoint(tmp_path / "twin", 1, CONFIG)
    save_file(rounded, twin / "model.safetensors")
    assert any(not torch.equal(tensors[name], rounded[name].float()) for name in tensors)
    assert fingerprint_of(folder, dtype="bfloat16") == fingerprint_of(twin, dtype="bfloat16")
    assert fingerprint_of(folder) != fingerprint_of(twin)
