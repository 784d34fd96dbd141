"""The guard: an embedding that is not finite fails its item, and is neither seen nor kept anywhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import mmcache
from encoder.config import EncoderConfig
from encoder.model import Encoder
from encoder.sizing import grid_thw, num_tokens
from mmcache.errors import ItemError, NonFiniteEmbedding
from mmcache.keys import store_key
from mmcache.tiers.lmdb import LmdbTier
from tests.mmcache.support import SidecarProcess, eventually, image
from tests.mmcache.tier_contract import LONG_S

IMAGES = [image(seed, 28 * (1 + seed % 3), 56) for seed in range(12)]
LAST = "mm_projector.proj.2"


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def save(folder: Path, tensors: dict[str, torch.Tensor], config: EncoderConfig) -> Path:
    """A checkpoint folder in the original naming."""
    folder.mkdir()
    vision = {
        "vt_hidden_size": config.hidden_size, "vt_num_hidden_layers": config.num_layers,
        "vt_num_attention_heads": config.num_heads, "vt_intermediate_size": config.mlp_size,
        "init_pos_emb_height": config.pos_height, "init_pos_emb_width": config.pos_width,
        "init_pos_emb_time": config.pos_time, "mm_hidden_size": config.hidden_size,
        "text_hidden_size": config.text_width,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "vision_config": vision}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def encode(encoder: Encoder, images: Sequence[np.ndarray[Any, Any]]) -> tuple[list[bool], list[torch.Tensor]]:
    grids = [grid_thw(item.shape[1], item.shape[0], encoder.processor) for item in images]
    outs = [torch.empty(num_tokens(grid, 2), encoder.config.text_width, dtype=encoder.dtype) for grid in grids]
    return encoder.encode(images, outs), outs


def overflowing(folder: Path) -> Path:
    """A checkpoint whose first output overflows for about half of the images."""
    plain = Encoder.load("moonvit-tiny", deterministic=True)
    tensors = {name: tensor.clone() for name, tensor in plain.tensors()}
    largest = sorted(float(out[:, 0].abs().max()) for out in encode(plain, IMAGES)[1])
    scale = torch.finfo(torch.float32).max / largest[len(largest) // 2]
    for name in (f"{LAST}.weight", f"{LAST}.bias"):
        tensors[name][0] = (tensors[name][0].double() * scale).float()  # the scale alone is beyond float32
    return save(folder, tensors, plain.config)


def stored(path: Path, keys: Sequence[bytes]) -> list[bool]:
    async def find() -> list[bool]:
        tier = await LmdbTier.open(path, 64 << 20)
        entries = await tier.find(keys)
        assert await tier.close(LONG_S)
        return [entry is not None for entry in entries]

    return asyncio.run(find())


def serving(tmp_path: Path, model: Path) -> SidecarProcess:
    store = {"store": f"file://{tmp_path}/store.lmdb", "store_bytes": "64MiB"}
    return SidecarProcess(tmp_path, model=str(model), deterministic="true", **store)


def test_some_items_overflow_and_harm_no_other(tmp_path: Path) -> None:
    model = overflowing(tmp_path / "model")
    finite, truth = encode(Encoder.load(str(model), deterministic=True), IMAGES)
    num_good, num_bad = finite.count(True), finite.count(False)
    assert min(num_good, num_bad) >= 3
    with serving(tmp_path, model) as sidecar, sidecar.connect() as client:
        for good_origin in ("encoded", "pool"):
            results: list[mmcache.Lease | ItemError] = list(client.encode(IMAGES, errors="return"))
            for index, (result, is_good, expected) in enumerate(zip(results, finite, truth, strict=True)):
                if isinstance(result, ItemError):
                    assert not is_good
                    assert isinstance(result, NonFiniteEmbedding)
                    assert result.index == index
                    assert "NaN or Inf" in result.reason
                else:
                    assert is_good
                    assert result.origin == good_origin
                    np.testing.assert_array_equal(result.numpy(), expected.numpy())
                    result.release()
        eventually(lambda: sidecar.stats()["store"]["written"] == num_good, "what is good is stored")
        stats = sidecar.stats()
        assert stats["errors"] == {"NonFiniteEmbedding": 2 * num_bad}
        assert (stats["items"]["encoded"], stats["pool"]["entries"]) == (num_good, num_good)
        assert stats["store"]["tiers"]["lmdb"]["entries"] == num_good
        assert (stats["leases"]["active"], stats["ingest"]["bytes_used"]) == (0, 0)
        keys = [store_key(client.fingerprint, client.key(item)) for item in IMAGES]
    assert stored(tmp_path / "store.lmdb", keys) == finite


def test_everyone_who_waits_for_it_is_told(tmp_path: Path) -> None:
    """With an infinite bias nothing is finite: each position fails, repeats too, and nothing stays."""
    plain = Encoder.load("moonvit-tiny")
    tensors = {name: tensor.clone() for name, tensor in plain.tensors()}
    tensors[f"{LAST}.bias"][7] = torch.inf
    model = save(tmp_path / "model", tensors, plain.config)
    with serving(tmp_path, model) as sidecar, sidecar.connect() as client:
        items = [IMAGES[0], IMAGES[1], IMAGES[0]]
        with pytest.raises(mmcache.EncodeError) as raised:
            client.encode(items)
        assert [type(result) for result in raised.value.results] == [NonFiniteEmbedding] * 3
        stats = sidecar.stats()
        assert stats["errors"] == {"NonFiniteEmbedding": 3}
        assert (stats["items"]["encoded"], stats["pool"]["entries"], stats["pool"]["bytes_used"]) == (0, 0, 0)
        keys = [store_key(client.fingerprint, client.key(item)) for item in items]
    assert stored(tmp_path / "store.lmdb", keys) == [False] * 3
