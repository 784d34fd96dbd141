"""What `plan` says is what `encode` gives, item by item, and it asks nobody."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, features

import mmcache
from tests.mmcache.picture_files import OPAQUE, SEE_THROUGH, exif, photograph, saved, see_through
from tests.mmcache.support import SidecarProcess, clean_environ, image

SMALL_CLIENT = """
import sys
import numpy as np
for name in sys.argv[3:]:
    sys.modules[name] = None
import mmcache
client = mmcache.connect(sys.argv[1])
plans = client.plan([np.zeros((70, 90, 3), np.uint8), np.zeros((2, 56, 56, 3), np.uint8), sys.argv[2]])
for plan in plans:
    print(tuple(plan) if isinstance(plan, mmcache.Plan) else f"{type(plan).__name__}: {plan}")
    if isinstance(plan, Exception):
        print(plan.index, plan.source)
loaded = [name for name in sys.modules if sys.modules[name] is not None and name.partition(".")[0] == "encoder"]
print("torch" in sys.modules, sorted(loaded))
"""


def assert_plan_is_right(client: mmcache.Client, items: list[Any]) -> None:
    """Of every item: the plan of what encodes, the error of what does not."""
    results = client.encode(items, errors="return")
    for index, (plan, result) in enumerate(zip(client.plan(items), results, strict=True)):
        if isinstance(result, mmcache.Lease):
            assert plan == mmcache.Plan(result.grid_thw, result.num_tokens, result.nbytes), index
            result.release()
        else:
            assert isinstance(plan, mmcache.ItemError), index
            assert (type(plan), str(plan), plan.index) == (type(result), str(result), index)


def test_arrays_tensors_and_video_chunks(client: mmcache.Client) -> None:
    video = np.stack([image(seed, 112, 84) for seed in range(4)])
    gray = image(5)[..., 0]
    items = [image(1), gray, image(2)[::-1, ::2], torch.from_numpy(image(3)), *(video[:n] for n in (1, 2, 3, 4))]
    assert_plan_is_right(client, items)
    assert [plan.grid_thw[0] for plan in client.plan(items[-4:]) if isinstance(plan, mmcache.Plan)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("height", "width"),
    [(1, 1), (1, 28), (27, 29), (28, 28), (29, 27), (1, 3000), (3000, 1), (13, 5000), (9000, 20), (1000, 1300)],
)
def test_extreme_sizes(client: mmcache.Client, height: int, width: int) -> None:
    pixels = np.zeros((height, width, 3), np.uint8)
    frames = np.zeros((2, height, width, 3), np.uint8)
    assert_plan_is_right(client, [pixels, frames, saved(Image.fromarray(pixels), "PNG"), Image.fromarray(pixels)])


def test_pil_images_of_every_mode(client: mmcache.Client, tmp_path: Path) -> None:
    turned = tmp_path / "turned.jpg"
    turned.write_bytes(saved(photograph(), "JPEG", exif=exif(6)))
    with Image.open(turned) as lazy:
        items = [see_through(), photograph().convert("L"), photograph().convert("1"), photograph().quantize(9), lazy]
        assert_plan_is_right(client, items)
        (plan,) = client.plan([lazy])
        assert isinstance(plan, mmcache.Plan)
        assert plan.grid_thw == (1, 6, 8), "as it stands, not as its EXIF orientation says"


def test_files_of_every_format(client: mmcache.Client) -> None:
    writers = {name: writer for name, writer in (OPAQUE | SEE_THROUGH).items()
               if features.check("avif") or "AVIF" not in name}  # fmt: skip
    assert len(writers) > 35
    assert_plan_is_right(client, [writer() for writer in writers.values()])


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "TIFF", "MPO"])
def test_turned_files_are_planned_as_they_are_turned(client: mmcache.Client, tmp_path: Path, format_: str) -> None:
    paths = []
    for orientation in range(1, 9):
        paths.append(tmp_path / f"{orientation}.{format_}")
        paths[-1].write_bytes(saved(photograph(), format_, exif=exif(orientation)))
    assert_plan_is_right(client, paths)
    grids = [plan.grid_thw for plan in client.plan(paths) if isinstance(plan, mmcache.Plan)]
    assert grids == [(1, 6, 8)] * 4 + [(1, 8, 6)] * 4


def test_the_settings_are_the_sidecars(tmp_path: Path) -> None:
    files = [saved(photograph(), format_, exif=exif(6)) for format_ in ("JPEG", "PNG", "TIFF")]
    with (
        SidecarProcess(tmp_path, orientation="ignore", max_pixels="10000", max_item_bytes="20000") as sidecar,
        sidecar.connect() as client,
    ):
        assert_plan_is_right(client, [files[0], files[1][:0], image(1, 70, 70), image(2, 101, 100), bytes(20_001)])
        assert [plan.grid_thw for plan in client.plan(files[:1]) if isinstance(plan, mmcache.Plan)] == [(1, 6, 8)]
        big = saved(Image.new("RGB", (101, 100)), "PNG")
        chunk = np.zeros((2, 60, 90, 3), np.uint8)
        assert_plan_is_right(client, [big, Image.new("L", (101, 100)), chunk[:, :40, :80], chunk[:, :59, :50]])


def test_bad_items_have_their_error_in_place(client: mmcache.Client, tmp_path: Path) -> None:
    items = [
        image(1), b"", b"not a picture", tmp_path / "missing.jpg", tmp_path, object(), np.zeros((4, 4), np.float32),
        np.zeros((3, 8, 8), np.uint8), np.zeros((5, 28, 28, 3), np.uint8), Image.new("I;16", (8, 8)),
        saved(photograph(), "PNG")[:30], np.zeros((0, 8, 3), np.uint8), image(2),
    ]  # fmt: skip
    assert_plan_is_right(client, items)
    plans = client.plan(items)
    assert [index for index, plan in enumerate(plans) if isinstance(plan, mmcache.Plan)] == [0, 12]
    assert all(plan.index == index for index, plan in enumerate(plans) if isinstance(plan, mmcache.ItemError))
    assert client.plan([]) == []


def test_a_staged_reference_is_refused(client: mmcache.Client) -> None:
    (error,) = client.plan([mmcache.StagedRef(1, "0" * 32, (4, 4, 3), 48)])
    assert isinstance(error, mmcache.UnsupportedItem)
    assert "plan the array" in str(error)


def test_it_asks_nobody(client: mmcache.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a plan needs no round trip")

    channel = client._pump.channel
    monkeypatch.setattr(channel, "send_some", refuse)
    monkeypatch.setattr(channel, "next_frame", refuse)
    plan, key = client.plan([saved(photograph(), "JPEG")])[0], client.key(image(1))
    assert isinstance(plan, mmcache.Plan)
    assert len(key) == 16


def planned_elsewhere(sidecar: SidecarProcess, path: Path, *missing: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SMALL_CLIENT, str(sidecar.socket), str(path), *missing],
        capture_output=True, text=True, env=clean_environ(PYTHONPATH="."), timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_neither_torch_nor_the_encoder_is_imported(shared_sidecar: SidecarProcess, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(saved(photograph(), "PNG"))
    *plans, loaded = planned_elsewhere(shared_sidecar, path)
    assert [plan.split("), ")[0] for plan in plans] == ["((1, 6, 8", "((2, 4, 4", "((1, 6, 8"]
    light = ["encoder", "encoder.config", "encoder.errors", "encoder.sizing"]
    assert loaded == f"False {light}"


def test_without_pillow_arrays_are_planned_and_files_say_what_is_missing(
    shared_sidecar: SidecarProcess, tmp_path: Path
) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(saved(photograph(), "PNG"))
    array, chunk, error, place, _ = planned_elsewhere(shared_sidecar, path, "PIL")
    assert array.startswith("((1, 6, 8)")
    assert chunk.startswith("((2, 4, 4)")
    assert error.startswith("UnsupportedItem: ")
    assert "Pillow" in error
    assert place == f"2 {path}"
