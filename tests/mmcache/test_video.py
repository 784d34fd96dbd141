"""Video chunks through a real sidecar, against the encoder in this process."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmcache
from encoder.config import ProcessorConfig
from encoder.model import Encoder
from encoder.sizing import num_patches
from mmcache.errors import ImageTooLarge, UnsupportedItem
from mmcache.server.decoders import Pixels
from mmcache.server.facts import ModelFacts
from mmcache.server.ingest import IngestSlice
from mmcache.server.messages import pixels_shape
from mmcache.server.sources import sizes
from tests.mmcache.support import SidecarProcess, image

Array = np.ndarray[Any, Any]


def chunk(seed: int, num_frames: int, height: int = 56, width: int = 84) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (num_frames, height, width, 3), np.uint8)


@pytest.fixture(scope="module")
def encoder() -> Iterator[Encoder]:
    """As a lone rank has it, its number of threads too."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield Encoder.load("moonvit-tiny")
    torch.set_num_threads(before)


def encoded(encoder: Encoder, item: Array, num_rows: int) -> Array:
    out = torch.full((num_rows, encoder.config.text_width), torch.nan)
    assert encoder.encode([item], [out]) == [True]
    return out.numpy()


MIXED = [
    (image(1), (1, 4, 6)),
    (chunk(2, 4), (4, 4, 6)),
    (chunk(3, 1), (1, 4, 6)),
    (chunk(4, 3, 30, 29), (3, 4, 4)),
    (image(5, 100, 40), (1, 8, 4)),
    (chunk(6, 2, 1, 1), (2, 2, 2)),
    (image(7)[..., 0], (1, 4, 6)),
]


def test_images_and_chunks_in_one_request(sidecar: SidecarProcess, encoder: Encoder) -> None:
    items, grids = zip(*MIXED, strict=True)
    with sidecar.connect() as client:
        for origin in ("encoded", "pool"):
            leases = client.encode(items)
            assert [lease.origin for lease in leases] == [origin] * len(items)
            assert [lease.grid_thw for lease in leases] == list(grids)
            for item, (_, height, width), lease in zip(items, grids, leases, strict=True):
                assert lease.num_tokens == height * width // 4, "time is pooled away"
                rgb = np.stack([item] * 3, axis=-1) if item.ndim == 2 else item
                np.testing.assert_array_equal(lease.numpy(), encoded(encoder, rgb, lease.num_tokens))
                lease.release()
        assert client.stats()["items"]["encoded"] == len(items)


def test_a_chunk_comes_back_from_the_store(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/embeddings.lmdb"
    frames = chunk(11, 3)
    with (
        SidecarProcess(tmp_path, store=store) as sidecar,
        sidecar.connect() as client,
        client.encode([frames])[0] as lease,
    ):
        first, grid = lease.numpy().copy(), lease.grid_thw
    with (
        SidecarProcess(tmp_path, store=store) as sidecar,
        sidecar.connect() as client,
        client.encode([frames])[0] as lease,
    ):
        assert (lease.origin, lease.grid_thw) == ("store", grid) == ("store", (3, 4, 6))
        np.testing.assert_array_equal(lease.numpy(), first)


def test_frames_have_a_limit_of_their_own(sidecar: SidecarProcess, encoder: Encoder) -> None:
    """As in the reference: 4,096 patches a frame, where an image may have 16,384."""
    frame = image(12, 1000, 1100)
    with sidecar.connect() as client:
        leases = client.encode([frame, frame[None], np.stack([frame, frame[::-1]])])
        assert [lease.grid_thw for lease in leases] == [(1, 72, 80), (1, 62, 68), (2, 62, 68)]
        for item, lease in zip((frame, frame[None], np.stack([frame, frame[::-1]])), leases, strict=True):
            np.testing.assert_array_equal(lease.numpy(), encoded(encoder, item, lease.num_tokens))
            lease.release()


def test_a_chunk_of_one_frame_is_another_item_than_its_frame(client: mmcache.Client) -> None:
    frames = chunk(13, 1)
    leases = client.encode([frames, frames[0]])
    assert leases[0].key != leases[1].key
    assert leases[0].grid_thw == leases[1].grid_thw == (1, 4, 6)
    np.testing.assert_array_equal(leases[0].numpy(), leases[1].numpy())
    for lease in leases:
        lease.release()


def test_tensors_are_chunks_too_whatever_their_layout(client: mmcache.Client) -> None:
    frames = chunk(14, 4)
    moved = torch.from_numpy(frames.transpose(0, 3, 1, 2).copy()).movedim(1, -1)
    leases = client.encode([frames, torch.from_numpy(frames), moved, frames[::-1].copy()[::-1]])
    assert {lease.key for lease in leases} == {client.key(frames)}
    for lease in leases:
        lease.release()


def test_a_video_in_chunks(client: mmcache.Client) -> None:
    """As the message that refuses a long chunk says; the last chunk may be shorter."""
    video = chunk(15, 10)
    leases = client.encode([video[i : i + 4] for i in range(0, len(video), 4)])
    assert [lease.grid_thw for lease in leases] == [(4, 4, 6), (4, 4, 6), (2, 4, 6)]
    assert len({lease.key for lease in leases}) == 3
    for lease in leases:
        lease.release()


def test_too_many_frames_cost_that_item_alone(client: mmcache.Client) -> None:
    results: list[Any] = client.encode([image(16), chunk(17, 5), chunk(18, 4), chunk(19, 900, 2, 2)], errors="return")
    for index, num_frames in ((1, 5), (3, 900)):
        error = results[index]
        assert isinstance(error, UnsupportedItem)
        assert error.index == index
        assert error.source.startswith(f"array {num_frames}×")
        assert f"{num_frames} frames, this model takes 1 to 4" in error.reason
        assert "video[i : i + 4]" in error.reason
    assert [results[index].grid_thw for index in (0, 2)] == [(1, 4, 6), (4, 4, 6)]
    results[0].release()
    results[2].release()


def test_the_pixel_limit_is_for_all_frames_together(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, max_pixels=str(3 * 56 * 84)) as sidecar, sidecar.connect() as client:
        results: list[Any] = client.encode([chunk(20, 4), chunk(21, 3)], errors="return")
        assert isinstance(results[0], ImageTooLarge)
        assert "4 frames of 84×56 are 18816 pixels, the limit is 14112 for all together" in str(results[0])
        results[1].release()


def test_the_cost_of_a_chunk_counts_its_frames() -> None:
    facts = ModelFacts("", mmcache.keys.Fingerprint(bytes(16)), "float32", 8, 1, ProcessorConfig())
    for num_frames, grid in ((0, (1, 36, 46)), (1, (1, 36, 46)), (4, (4, 36, 46))):
        pixels = Pixels(IngestSlice(0, math.prod(pixels_shape(num_frames, 480, 640))), 480, 640, num_frames)
        assert sizes(pixels, facts) == (grid, num_patches(grid), 18 * 23)
    with pytest.raises(UnsupportedItem, match="7 frames"):
        sizes(Pixels(IngestSlice(0, 1), 480, 640, 7), facts)
