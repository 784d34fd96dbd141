"""Which arrays and tensors are pixels, and how others become some."""

from __future__ import annotations

import operator
from typing import Any

from mmcache.errors import UnsupportedItem

ANY = -1
SHAPE_HINTS = (
    (1, 0, ANY, "for an encoded file give its bytes"),
    (3, 0, 3, "this may be 3×H×W: {move}(x, 0, -1)"),
    (3, 2, 4, "this may be RGBA: Image.fromarray({array}) is composited on white"),
    (3, 2, 1, "this may be gray: x[..., 0]"),
    (3, 0, 1, "this may be gray: x[0]"),
    (3, 0, ANY, "for gray frames: x[..., None][..., [0, 0, 0]]"),
    (4, 1, 3, "this may be T×3×H×W: {move}(x, 1, -1)"),
    (4, 0, 3, "this may be 3×T×H×W: {move}(x, 0, -1)"),
    (4, 3, 4, "this may be RGBA: x[..., :3] drops the transparency"),
    (4, 3, 1, "this may be gray: x[..., [0, 0, 0]]"),
)
"""What an array of a wrong shape may be, and how it becomes an item: axes, one of them and its length, hint."""


def checked_array(shape: tuple[int, ...], dtype: str, what: str, index: int) -> str:
    """What errors call an array (`what` is "array" or "tensor") that has the shape and dtype of pixels.

    Raises:
        UnsupportedItem: it has not; how to convert it is said, not guessed.
    """
    source = f"{what} {'×'.join(map(str, shape)) or 'without axes'}"
    num_axes, is_tensor = len(shape), what == "tensor"
    if dtype != "uint8":
        cast = ".to(torch.uint8)" if is_tensor else ".astype('uint8')"
        reason = f"pixels must be uint8, 0 to 255, not {dtype}; {_dtype_hint(dtype, cast)}"
        raise UnsupportedItem(reason, index=index, source=f"{source} {dtype}")
    if 0 in shape or not (num_axes == 2 or (num_axes in (3, 4) and shape[-1] == 3)):
        hint = _shape_hint(shape, "torch.movedim" if is_tensor else "np.moveaxis", "x.numpy()" if is_tensor else "x")
        reason = f"pixels must have the shape H×W×3, H×W (gray) or T×H×W×3 (a video chunk); {hint}"
        raise UnsupportedItem(reason, index=index, source=source)
    return source


def _dtype_hint(dtype: str, cast: str) -> str:
    if dtype == "bool":
        return f"for black and white: x{cast} * 255"
    if "float" in dtype:
        return f"for values of 0 to 1: (x * 255).round(){cast}"
    if dtype.startswith(("quint", "qint")):
        return f"it is quantized; for its stored values: x.int_repr(){cast}"
    if "int" in dtype:
        return f"for values of 0 to 255: x{cast}" + f", for all 16 bits: (x >> 8){cast}" * dtype.endswith("16")
    return "convert it to values of 0 to 255 first"


def _shape_hint(shape: tuple[int, ...], move: str, array: str) -> str:
    if 0 in shape:
        return "this has no pixels"
    fits = (hint for num_axes, axis, side, hint in SHAPE_HINTS if len(shape) == num_axes and side in (shape[axis], ANY))
    return next(fits, "each picture or chunk is an item of its own").format(move=move, array=array)


def checked_grid(grid: Any) -> tuple[int, int, int]:
    """A grid as a user gives it: any sequence of three integers, numpy's too. Raises ValueError if it is none."""
    try:
        t, h, w = map(operator.index, grid)
    except (TypeError, ValueError):
        raise ValueError(f"grid must be three integers, patches in (t, h, w), got {grid!r}") from None
    return t, h, w
