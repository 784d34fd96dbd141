"""What is not pixels is refused with the way to make it pixels, and costs nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmcache
from mmcache.errors import ImageTooLarge, ItemError, UnsupportedItem
from mmcache.media import describe
from mmcache.server.pixels import OpenedMedia
from tests.mmcache.array_items import LIMIT, Array, decoded
from tests.mmcache.support import image

RAMP = np.arange(5 * 6 * 3, dtype=np.uint8).reshape(5, 6, 3)
FRAMES = np.stack([RAMP, RAMP[::-1]])
WRONG_SHAPES = [
    (RAMP.transpose(2, 0, 1), r"3×H×W: np\.moveaxis\(x, 0, -1\)", lambda x: np.moveaxis(x, 0, -1)),
    (RAMP[..., :1], r"gray: x\[\.\.\., 0\]", lambda x: x[..., 0]),
    (RAMP[None, ..., 0], r"gray: x\[0\]", lambda x: x[0]),
    (RAMP[..., [0, 1, 2, 0]], r"RGBA: Image\.fromarray\(x\)", Image.fromarray),
    (FRAMES[..., 0], r"gray frames: x\[\.\.\., None\]\[\.\.\., \[0, 0, 0\]\]", lambda x: x[..., None][..., [0, 0, 0]]),
    (FRAMES.transpose(0, 3, 1, 2), r"T×3×H×W: np\.moveaxis\(x, 1, -1\)", lambda x: np.moveaxis(x, 1, -1)),
    (FRAMES.transpose(3, 0, 1, 2), r"3×T×H×W: np\.moveaxis\(x, 0, -1\)", lambda x: np.moveaxis(x, 0, -1)),
    (FRAMES[..., :1], r"gray: x\[\.\.\., \[0, 0, 0\]\]", lambda x: x[..., [0, 0, 0]]),
    (FRAMES[..., [0, 1, 2, 0]], r"RGBA: x\[\.\.\., :3\]", lambda x: x[..., :3]),
    (RAMP.ravel(), "for an encoded file give its bytes", None),
    (FRAMES[None], "each picture or chunk is an item of its own", lambda x: x[0]),
    (np.zeros((5, 6, 2), np.uint8), "gray frames", None),
    (np.zeros((2, 5, 6, 2), np.uint8), "item of its own", None),
    (np.zeros((), np.uint8), "without axes", None),
    (np.zeros((0, 6, 3), np.uint8), "no pixels", None),
    (np.zeros((5, 0), np.uint8), "no pixels", None),
    (np.zeros((0, 5, 6, 3), np.uint8), "no pixels", None),
]


@pytest.mark.parametrize(("array", "hint", "fix"), WRONG_SHAPES, ids=lambda value: getattr(value, "shape", None))
def test_wrong_shapes_are_named_and_the_hint_helps(array: Array, hint: str, fix: Callable[[Array], Any] | None) -> None:
    with pytest.raises(UnsupportedItem, match=hint) as caught:
        describe(array, 7, LIMIT)
    assert caught.value.index == 7
    assert caught.value.source.startswith("array ")
    if fix is not None:
        assert decoded(fix(array)).shape in (RAMP.shape, FRAMES.shape)


def test_hints_for_tensors_are_torchs() -> None:
    tensor = torch.from_numpy(RAMP.transpose(2, 0, 1).copy())
    with pytest.raises(UnsupportedItem, match=r"torch\.movedim\(x, 0, -1\)"):
        describe(tensor, 0, LIMIT)
    np.testing.assert_array_equal(decoded(torch.movedim(tensor, 0, -1)), RAMP)
    with pytest.raises(UnsupportedItem, match=r"Image\.fromarray\(x\.numpy\(\)\)"):
        describe(torch.zeros(5, 6, 4, dtype=torch.uint8), 0, LIMIT)


WRONG_DTYPES = [
    ((RAMP / 255).astype(np.float32), r"\(x \* 255\)\.round\(\)\.astype", lambda x: (x * 255).round().astype("uint8")),
    (RAMP / 255, "not float64", lambda x: (x * 255).round().astype("uint8")),
    ((RAMP / 255).astype(np.float16), "not float16", None),
    (RAMP.astype(np.int64), r"values of 0 to 255: x\.astype\('uint8'\) \[", lambda x: x.astype("uint8")),
    (RAMP.astype(np.int8), "not int8", None),
    (RAMP.astype(np.uint16) << 8, r"all 16 bits: \(x >> 8\)\.astype", lambda x: (x >> 8).astype("uint8")),
    (RAMP.astype(">u2") << 8, r"all 16 bits: \(x >> 8\)\.astype", lambda x: (x >> 8).astype("uint8")),
    (RAMP > 40, r"black and white: x\.astype\('uint8'\) \* 255", None),
    (RAMP.astype(complex), "not complex128", None),
    (RAMP.astype(object), "not object", None),
    (RAMP.astype("S1"), "not bytes8", None),
    (np.zeros((5, 6), [("r", "u1"), ("g", "u1"), ("b", "u1")]), "not void24", None),
]


@pytest.mark.parametrize(("array", "hint", "fix"), WRONG_DTYPES, ids=lambda value: str(getattr(value, "dtype", "")))
def test_wrong_dtypes_are_named_and_the_hint_helps(
    array: Array, hint: str, fix: Callable[[Array], Array] | None
) -> None:
    with pytest.raises(UnsupportedItem, match=hint):
        describe(array, 0, LIMIT)
    if fix is not None:
        np.testing.assert_array_equal(decoded(fix(array)), RAMP)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int8, torch.int64], ids=str)
def test_tensors_of_other_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedItem, match=rf"not {str(dtype).removeprefix('torch.')};.*\.to\(torch\.uint8\)"):
        describe(torch.zeros(5, 6, 3).to(dtype), 0, LIMIT)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda tensor: tensor.to_sparse(), r"\.to_dense\(\)"),
        (lambda tensor: tensor[..., 0].float().to_sparse_csr(), r"\.to_dense\(\)"),
        (lambda tensor: tensor.float().to_mkldnn(), r"\.to_dense\(\)"),
        (lambda tensor: torch.quantize_per_tensor(tensor.float(), 1, 0, torch.quint8), r"x\.int_repr\(\)\.to"),
        (lambda tensor: tensor.to("meta"), "has no data"),
        (lambda tensor: torch.nested.nested_tensor([tensor, tensor]), r"x\.unbind\(\)"),
    ],
    ids=["sparse", "csr", "mkldnn", "quantized", "meta", "nested"],
)
def test_tensors_without_dense_memory(make: Callable[[torch.Tensor], torch.Tensor], hint: str) -> None:
    with pytest.raises(UnsupportedItem, match=hint):
        describe(make(torch.zeros(5, 6, 3, dtype=torch.uint8)), 0, LIMIT)


def test_a_tensor_inside_a_transform_is_refused() -> None:
    def refused(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedItem, match="memory cannot be read"):
            describe(tensor, 0, LIMIT)
        return tensor

    torch.vmap(refused)(torch.zeros(2, 5, 6, 3, dtype=torch.uint8))


def test_a_masked_array_is_refused() -> None:
    masked = np.ma.masked_array(RAMP, RAMP > 5)
    with pytest.raises(UnsupportedItem, match=r"masked.*x\.filled\(0\)"):
        describe(masked, 0, LIMIT)
    assert decoded(masked.filled(0)).max() == 5


def test_a_vast_broadcast_view_is_refused_before_it_is_written_out() -> None:
    with pytest.raises(ImageTooLarge, match=r"300000000000 bytes.*max_item_bytes"):
        describe(np.broadcast_to(np.uint8(1), (10**5, 10**6, 3)), 0, LIMIT)
    with pytest.raises(ImageTooLarge, match="max_item_bytes"):
        describe(torch._neg_view(torch.ones(1, 1, 1, dtype=torch.uint8)).expand(10**5, 10**6, 3), 0, LIMIT)


@pytest.mark.parametrize(
    "shape",
    ["[2,2]", "[1,2,2,3]", "[2,1,2,4]", "[2,2,2]", "[1,1,1,2,3]", "[12]", "[]", "[0,2,2,3]", "[2,2,3.0]", "[2,2,true]"],
)
def test_headers_that_do_not_fit_their_bytes(shape: str) -> None:
    raw = memoryview(bytes(9))
    with pytest.raises(UnsupportedItem):
        OpenedMedia("array", f'{{"dtype":"uint8","shape":{shape}}}'.encode(), raw, 100)


def test_pixels_are_bounded_in_every_shape() -> None:
    for shape, says in (((8, 8), "8×8 is 64"), ((8, 8, 3), "8×8 is 64"), ((4, 4, 4, 3), "4 frames of 4×4 are 64")):
        assert decoded(np.zeros(shape, np.uint8), 64).shape[:2] == shape[:2]
        with pytest.raises(ImageTooLarge, match=rf"{says} pixels, the limit is 63.*max_pixels"):
            decoded(np.zeros(shape, np.uint8), 63)
    with pytest.raises(ImageTooLarge):
        OpenedMedia("array", b'{"dtype":"uint8","shape":[2000000000,2000000000,2000000000,3]}', memoryview(b"abc"), 100)


def test_one_bad_array_costs_nothing_else(client: mmcache.Client) -> None:
    bad = [RAMP.transpose(2, 0, 1), RAMP / 255, RAMP[..., :1], np.ma.masked_array(RAMP)]
    results: list[Any] = client.encode([image(6), *bad, image(7)[..., 0]], errors="return")
    for index, result in enumerate(results[1:-1], 1):
        assert isinstance(result, UnsupportedItem)
        assert result.index == index
    for lease in (results[0], results[-1]):
        assert not isinstance(lease, ItemError)
        lease.release()


@pytest.mark.parametrize(
    "item",
    [
        RAMP,
        RAMP[..., 0],
        FRAMES,
        RAMP.ravel(),
        np.uint8(1),
        torch.from_numpy(RAMP),
        torch.from_numpy(FRAMES),
        torch.zeros(5),
        Image.fromarray(RAMP),
        b"abc",
        "a.png",
        Path("a.png"),
        memoryview(b"abc"),
    ],
    ids=lambda item: f"{type(item).__name__}{getattr(item, 'shape', '')}",
)
def test_an_item_where_a_list_belongs(client: mmcache.Client, item: Any) -> None:
    with pytest.raises(TypeError, match=rf"one {type(item).__name__} give \[item\]"):
        client.encode(item)


def test_lists_of_other_kinds(client: mmcache.Client) -> None:
    pictures = [image(8), image(9)]
    objects = np.empty(2, object)
    objects[:] = pictures
    for items in (tuple(pictures), iter(pictures), objects, list(np.stack(pictures))):
        leases = client.encode(items)
        assert [lease.key for lease in leases] == [client.key(picture) for picture in pictures]
        for lease in leases:
            lease.release()
