"""Arrays and tensors: every memory layout is the same item, every shape another one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmcache
from mmcache.media import ArrayHeader, describe
from tests.mmcache.array_items import LIMIT, Array, as_rgb, decoded, key
from tests.mmcache.support import SidecarProcess, image


@st.composite
def views(draw: st.DrawFn, steps: tuple[int, ...] = (-2, -1, 1, 2), may_repeat: bool = True) -> Array:
    """A view of pixels: axes in any order in memory, sliced with any step, one of them perhaps repeated."""
    shape = draw(st.sampled_from([(5, 6), (4, 7, 3), (3, 5, 4, 3), (1, 1), (1, 9, 3), (4, 1, 1, 3)]))
    order = draw(st.permutations(range(len(shape))))
    base = np.random.default_rng(draw(st.integers(0, 9))).integers(
        0, 256, [2 * shape[axis] for axis in order], np.uint8
    )
    view = base.transpose(np.argsort(order))
    for axis, side in enumerate(shape):
        step = draw(st.sampled_from(steps))
        view = np.moveaxis(np.moveaxis(view, axis, 0)[::step][:side], 0, axis)
    if may_repeat and draw(st.booleans()):
        axis = draw(st.integers(0, len(shape) - 1))
        view = np.broadcast_to(np.moveaxis(np.moveaxis(view, axis, 0)[:1], 0, axis), shape)
    assert view.shape == shape
    return view


@given(views())
def test_every_layout_is_the_item_that_its_copy_is(view: Array) -> None:
    copy = view.copy(order="C")
    assert key(view) == key(copy)
    np.testing.assert_array_equal(decoded(view), as_rgb(copy))


@given(views(steps=(1, 2), may_repeat=False))
def test_every_layout_of_a_tensor_too(view: Array) -> None:
    assert key(torch.from_numpy(view)) == key(view.copy(order="C"))


class Subclass(np.ndarray):
    """As libraries make them."""


PIXELS = image(3)

ARRAYS: dict[str, Callable[[], Array]] = {
    "Fortran order": lambda: np.asfortranarray(PIXELS),
    "backwards": lambda: PIXELS[::-1, ::-1].copy()[::-1, ::-1],
    "BGR as RGB": lambda: PIXELS[..., ::-1].copy()[..., ::-1],
    "a crop": lambda: np.pad(PIXELS, ((3, 5), (2, 7), (1, 1)))[3:-5, 2:-7, 1:-1],
    "channels first, moved": lambda: np.moveaxis(np.ascontiguousarray(PIXELS.transpose(2, 0, 1)), 0, -1),
    "a subclass": lambda: PIXELS.view(Subclass),
    "not aligned": lambda: np.frombuffer(b"x" + PIXELS.tobytes(), np.uint8, offset=1).reshape(PIXELS.shape),
    "read only": lambda: np.frombuffer(PIXELS.tobytes(), np.uint8).reshape(PIXELS.shape),
    "signed bytes, viewed": lambda: PIXELS.view(np.int8).view(np.uint8),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_that_are_the_same_picture(name: str) -> None:
    array = ARRAYS[name]()
    assert key(array) == key(PIXELS)
    np.testing.assert_array_equal(decoded(array), PIXELS)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_a_mapped_file_and_a_matrix(tmp_path: Path) -> None:
    PIXELS.tofile(tmp_path / "pixels")
    assert key(np.memmap(tmp_path / "pixels", np.uint8, "r", shape=PIXELS.shape)) == key(PIXELS)
    gray = PIXELS[..., 0]
    assert key(np.asmatrix(gray)) == key(gray)
    np.testing.assert_array_equal(decoded(np.asmatrix(gray)), as_rgb(gray))


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.from_numpy(PIXELS.copy()),
    "permuted": lambda: torch.from_numpy(PIXELS.transpose(2, 0, 1).copy()).permute(1, 2, 0),
    "strided": lambda: torch.from_numpy(np.repeat(PIXELS, 2, axis=1))[:, ::2],
    "negated": lambda: torch._neg_view(torch.from_numpy(PIXELS.copy()).neg()),
    "a parameter": lambda: torch.nn.Parameter(torch.from_numpy(PIXELS.copy()), requires_grad=False),
    "channels last": lambda: torch.from_numpy(PIXELS[None].copy()).to(memory_format=torch.channels_last)[0],
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_are_the_same_picture(name: str) -> None:
    tensor = TENSORS[name]()
    assert key(tensor) == key(PIXELS)
    np.testing.assert_array_equal(decoded(tensor), PIXELS)


def test_an_expanded_tensor_and_one_of_inference_mode() -> None:
    row = torch.from_numpy(PIXELS[:1].copy())
    assert key(row.expand(56, -1, -1)) == key(np.repeat(PIXELS[:1], 56, axis=0))
    with torch.inference_mode():
        tensor = torch.from_numpy(PIXELS.copy()) + 0
    assert key(tensor) == key(PIXELS)


def test_layouts_give_the_same_embeddings(client: mmcache.Client) -> None:
    items = [PIXELS, *(make() for make in ARRAYS.values()), *(make() for make in TENSORS.values())]
    leases = client.encode(items)
    assert {lease.key for lease in leases} == {client.key(PIXELS)}
    for lease in leases:
        np.testing.assert_array_equal(lease.numpy(), leases[0].numpy())
    for lease in leases:
        lease.release()


def test_layouts_are_encoded_alike_when_each_is_the_first(sidecar: SidecarProcess) -> None:
    """Each in a namespace of its own, so that each is supplied, decoded and encoded."""
    embeddings = []
    for index, item in enumerate([PIXELS, ARRAYS["Fortran order"](), ARRAYS["backwards"](), TENSORS["permuted"]()]):
        with sidecar.connect(namespace=f"layout {index}") as client, client.encode([item])[0] as lease:
            assert lease.origin == "encoded"
            embeddings.append(lease.numpy().copy())
    for embedding in embeddings:
        np.testing.assert_array_equal(embedding, embeddings[0])


def test_a_gray_picture_is_the_same_in_each_channel(client: mmcache.Client) -> None:
    gray = image(5)[..., 1]
    np.testing.assert_array_equal(decoded(gray), as_rgb(gray))
    leases = client.encode([gray, as_rgb(gray), torch.from_numpy(gray)])
    assert leases[0].key == leases[2].key != leases[1].key
    assert leases[0].grid_thw == leases[1].grid_thw == (1, 4, 6)
    np.testing.assert_array_equal(leases[0].numpy(), leases[1].numpy())
    for lease in leases:
        lease.release()


def test_three_columns_are_channels_only_where_there_are_three_axes() -> None:
    assert decoded(np.zeros((3, 5, 3), np.uint8)).shape == (3, 5, 3)
    assert decoded(np.zeros((5, 3), np.uint8)).shape == (5, 3, 3)
    assert decoded(np.zeros((3, 3, 3, 3), np.uint8)).shape == (3, 3, 3, 3)


SHAPES = st.one_of(
    st.tuples(st.integers(1, 24), st.integers(1, 24)),
    st.tuples(st.integers(1, 24), st.integers(1, 24), st.just(3)),
    st.tuples(st.integers(1, 6), st.integers(1, 12), st.integers(1, 12), st.just(3)),
)


@given(st.data())
def test_equal_bytes_of_another_shape_are_another_item(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    size = math.prod(shape)
    alike = [
        other
        for height in range(1, size + 1)
        if size % height == 0
        for other in ((height, size // height), (height, size // height // 3, 3), (1, height, size // height // 3, 3))
        if math.prod(other) == size
    ]
    raw = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    shapes = {shape, *alike}
    assert len({key(raw.reshape(shape)) for shape in shapes}) == len(shapes)


def test_headers_are_the_same_in_every_release() -> None:
    """They are hashed into the keys: a change of a byte here needs a new key version."""
    for shape, written in (
        ((56, 84, 3), b'{"dtype":"uint8","shape":[56,84,3]}'),
        ((56, 84), b'{"dtype":"uint8","shape":[56,84]}'),
        ((2, 56, 84, 3), b'{"dtype":"uint8","shape":[2,56,84,3]}'),
    ):
        assert describe(np.zeros(shape, np.uint8), 0, LIMIT).header == written
        assert ArrayHeader(shape=shape).canonical() == written
