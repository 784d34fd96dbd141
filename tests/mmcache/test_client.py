"""Items in, leases out: the client against a real sidecar process."""

from __future__ import annotations

import gc
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmcache
from examples.pictures import photographs, picture_folder
from tests.mmcache.support import SidecarProcess, image


def jpeg(seed: int, height: int = 60, width: int = 90) -> bytes:
    data = io.BytesIO()
    Image.fromarray(image(seed, height, width)).save(data, "JPEG")
    return data.getvalue()


def test_every_kind_of_item(client: mmcache.Client, tmp_path: Path) -> None:
    path = tmp_path / "picture.jpg"
    path.write_bytes(jpeg(1))
    pixels = image(2)
    items = [jpeg(1), str(path), path, Image.fromarray(pixels), pixels, torch.from_numpy(pixels), bytearray(jpeg(1))]
    leases = client.encode(items)
    assert leases[0].key == leases[1].key == leases[2].key == leases[6].key
    assert leases[4].key == leases[5].key
    assert len({lease.key for lease in leases}) == 3, "encoded bytes, PIL image and array have keys of their own"
    np.testing.assert_array_equal(leases[3].numpy(), leases[4].numpy())
    for lease in leases:
        lease.release()


def test_shape_and_views(client: mmcache.Client) -> None:
    with client.encode([image(3, 56, 84)])[0] as lease:
        assert lease.grid_thw == (1, 4, 6)
        assert lease.tensor.shape == (6, client.dim) == (lease.num_tokens, lease.dim)
        assert lease.tensor.dtype == torch.float32
        assert lease.numpy().flags.writeable is False
        np.testing.assert_array_equal(lease.tensor.numpy(), lease.numpy())
        assert np.isfinite(lease.numpy()).all()
        assert lease.numpy().std() > 0
        assert str(lease.key) == lease.key.hex()
        assert {lease.key: 1}[lease.key] == 1


def test_views_are_not_copies(client: mmcache.Client) -> None:
    with client.encode([image(4)])[0] as lease:
        assert lease.tensor.data_ptr() == lease.tensor.data_ptr() == lease.numpy().ctypes.data


def test_origins(client: mmcache.Client) -> None:
    item = image(5)
    with client.encode([item])[0] as first, client.encode([item])[0] as second:
        assert (first.origin, second.origin) == ("encoded", "pool")
        np.testing.assert_array_equal(first.numpy(), second.numpy())


def test_real_pictures(client: mmcache.Client) -> None:
    paths = [path for path in photographs() if path.name != "retina.jpg"]
    paths += [picture_folder() / name for name in ("camera.png", "page.png", "text.png", "logo.png", "horse.png")]
    leases = client.encode(paths)
    with Image.open(paths[0]) as picture:
        tokens = -(-picture.width // 28) * -(-picture.height // 28)
    assert leases[0].num_tokens == tokens
    for lease in leases:
        assert np.isfinite(lease.numpy()).all()
        lease.release()


def test_order_and_repeats(client: mmcache.Client) -> None:
    pictures = [image(seed, 28 * (1 + seed % 3), 56) for seed in range(10, 20)]
    order = [3, 1, 3, 9, 0, 3, 7]
    leases = client.encode([pictures[i] for i in order])
    assert [lease.key for lease in leases] == [client.key(pictures[i]) for i in order]
    assert [lease.num_tokens for lease in leases] == [2 * (1 + (i + 10) % 3) for i in order]
    leases[0].release()
    assert leases[2].numpy().shape[0] == leases[2].num_tokens, "each position has a lease of its own"
    for lease in leases:
        lease.release()


def test_empty_list(client: mmcache.Client) -> None:
    assert client.encode([]) == []


def test_two_hundred_items(client: mmcache.Client) -> None:
    leases = client.encode([image(seed, 28, 28) for seed in range(1000, 1200)])
    assert len({lease.key for lease in leases}) == 200
    assert all(lease.num_tokens == 1 for lease in leases)
    for lease in leases:
        lease.release()


def test_the_same_image_three_hundred_times(client: mmcache.Client) -> None:
    before = client.stats()["items"]["encoded"]
    leases = client.encode([image(30)] * 300)
    assert client.stats()["leases"]["active"] >= 300
    assert client.stats()["items"]["encoded"] == before + 1
    for lease in leases:
        lease.release()


def test_one_by_one_pixel(client: mmcache.Client) -> None:
    data = io.BytesIO()
    Image.new("RGB", (1, 1), (7, 8, 9)).save(data, "PNG")
    with client.encode([data.getvalue()])[0] as lease:
        assert lease.grid_thw == (1, 2, 2)
        assert lease.num_tokens == 1


def bad_items(folder: Path) -> list[tuple[Any, type[mmcache.ItemError], str]]:
    text = folder / "notes.txt"
    text.write_text("not a picture at all\n" * 20)
    truncated = folder / "truncated.jpg"
    truncated.write_bytes(jpeg(40, 200, 300)[:-4000])
    empty = folder / "empty.jpg"
    empty.touch()
    odd = Image.new("P", (4, 4))
    odd.info["transparency"] = "clear"
    rgb16 = Image.fromarray(np.zeros((8, 8), np.uint16))
    return [
        (text, mmcache.UndecodableImage, "not a picture"),
        (truncated, mmcache.UndecodableImage, "truncated"),
        (empty, mmcache.UndecodableImage, "0 bytes"),
        (b"", mmcache.UndecodableImage, "0 bytes"),
        (folder / "missing.jpg", mmcache.UnreadableItem, "No such file"),
        (folder, mmcache.UnreadableItem, "folder"),
        ("https://example.org/a.jpg", mmcache.UnreadableItem, "URLs are not fetched"),
        ("nul\0byte", mmcache.UnreadableItem, "null byte"),
        (3.5, mmcache.UnsupportedItem, "float is not an item"),
        (None, mmcache.UnsupportedItem, "NoneType is not an item"),
        (np.zeros((3, 8, 8), np.uint8), mmcache.UnsupportedItem, "3×H×W"),
        (np.zeros((8, 8, 3), np.float32), mmcache.UnsupportedItem, "uint8"),
        (torch.zeros(8, 8, 3), mmcache.UnsupportedItem, "uint8"),
        (np.zeros((0, 8, 3), np.uint8), mmcache.UnsupportedItem, "H×W×3"),
        (rgb16, mmcache.UnsupportedMode, "I;16"),
        (odd, mmcache.UnsupportedItem, "transparency"),
    ]


def test_bad_items_fail_alone(client: mmcache.Client, tmp_path: Path) -> None:
    cases = bad_items(tmp_path)
    items = [image(50), *(item for item, _, _ in cases), image(51)]
    results: list[Any] = client.encode(items, errors="return")
    for index, (result, (_, kind, words)) in enumerate(zip(results[1:-1], cases, strict=True), start=1):
        assert type(result) is kind, f"{cases[index - 1][0]!r}: {result!r}"
        assert words in result.reason
        assert result.index == index
        assert f"item {index}" in str(result)
    for lease in (results[0], results[-1]):
        assert lease.num_tokens == 6
        lease.release()


def test_encode_error_holds_the_rest(client: mmcache.Client, tmp_path: Path) -> None:
    items = [image(52), tmp_path / "missing.jpg", image(53)]
    with pytest.raises(mmcache.EncodeError, match=r"1 of 3 items failed.*missing\.jpg") as caught:
        client.encode(items)
    with caught.value as error:
        leases = [error.results[0], error.results[2]]
        assert all(isinstance(lease, mmcache.Lease) and not lease.is_released for lease in leases)
        assert isinstance(error.results[1], mmcache.UnreadableItem)
        assert isinstance(error, mmcache.MMCacheError)
    assert all(isinstance(lease, mmcache.Lease) and lease.is_released for lease in leases)


def test_dropped_encode_error_releases(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as client:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(mmcache.EncodeError):
                client.encode([image(1), 3.5])
            gc.collect()
        assert client.stats()["leases"]["active"] == 0


def test_namespaces_do_not_share(sidecar: SidecarProcess) -> None:
    with sidecar.connect(namespace="a") as a, sidecar.connect(namespace="b") as b:
        assert a.key(image(1)) != b.key(image(1))
        with a.encode([image(1)])[0] as first, b.encode([image(1)])[0] as second:
            assert (first.origin, second.origin) == ("encoded", "encoded")
            np.testing.assert_array_equal(first.numpy(), second.numpy())


def test_wrong_calls(client: mmcache.Client, tmp_path: Path) -> None:
    for item in ("picture.jpg", b"jpeg", image(1), torch.from_numpy(image(1))):
        with pytest.raises(TypeError, match=r"give \[item\]"):
            client.encode(item)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='"raise" or "return"'):
        client.encode([], errors="ignore")  # type: ignore[arg-type]
    with pytest.raises(mmcache.SidecarUnavailable, match="no such socket"):
        mmcache.connect(tmp_path / "nothing.sock")
    for timeout in (0, -1, float("inf"), float("nan"), 1e12):
        with pytest.raises(ValueError, match="timeout"):
            mmcache.connect(tmp_path / "nothing.sock", timeout=timeout)
