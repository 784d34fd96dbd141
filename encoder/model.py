"""The encoder as its rank uses it: load once, then images and video chunks in, embeddings out."""

from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from encoder.config import EncoderConfig, ProcessorConfig, check_frames
from encoder.determinism import OneByOne, align_parameters, is_aligned
from encoder.device_options import Acceleration, DeviceOptions
from encoder.errors import ImageError
from encoder.finite import all_finite
from encoder.moonvit import MoonViT
from encoder.packing import check_grid
from encoder.patches import PatchRows, check_rows, joined
from encoder.preprocess import Pixels, pixels_grid, preprocess
from encoder.sizing import Grid, grid_thw, num_patches, num_tokens
from encoder.source import resolve_model
from encoder.weights import build_model

if TYPE_CHECKING:
    from encoder.device_encoder import DeviceEncoder

Item: TypeAlias = Pixels | PatchRows


class Encoder:
    """A MoonViT with its processor on one device. Not for use by several threads at once."""

    config: EncoderConfig
    processor: ProcessorConfig
    dtype: torch.dtype
    device: torch.device

    def __init__(
        self,
        model: MoonViT,
        processor: ProcessorConfig,
        *,
        deterministic: bool = False,
        options: DeviceOptions | None = None,
    ) -> None:
        """Take over a model whose parameters share one dtype and one device.

        With `deterministic`, an embedding's bytes depend on nothing but its item, whatever it is encoded with and on
        how many threads, on one type of device: see `encoder.determinism`. Otherwise a GPU encodes in half precision
        as `encoder.device_encoder` does, by `options`. Raises `EncoderError` as those two do, and `CheckpointError` if
        the processor's chunks have more frames than the model takes.
        """
        check_frames(model.config, processor)
        parameter = next(model.parameters())
        self.config = model.config
        self.processor = processor
        self.dtype = parameter.dtype
        self.device = parameter.device
        self._model = model
        self._mean = self._channels(processor.image_mean)
        self._std = self._channels(processor.image_std)
        self._one_by_one = OneByOne(self.device) if deterministic else None
        self._accelerated = None if deterministic else _accelerated(model, processor, options or DeviceOptions())
        if deterministic:
            align_parameters(model)

    @classmethod
    def load(
        cls,
        model: str,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        deterministic: bool = False,
        options: DeviceOptions | None = None,
    ) -> "Encoder":
        """Load a preset by its name, or a checkpoint by its folder.

        Raises `CheckpointError` listing what is wrong with the settings or the tensors.
        """
        source = resolve_model(model)
        model_there = build_model(source, dtype).to(device)
        return cls(model_there, source.processor, deterministic=deterministic, options=options)

    @property
    def is_deterministic(self) -> bool:
        """Whether an embedding's bytes depend on nothing but its item."""
        return self._one_by_one is not None

    @property
    def num_at_once(self) -> int:
        """How many items of a batch are encoded side by side; 1 where they are packed or follow each other."""
        return 1 if self._one_by_one is None else self._one_by_one.num_at_once

    @property
    def num_bytes(self) -> int:
        """Memory of all parameters."""
        return sum(parameter.nbytes for parameter in self._model.parameters())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter, sorted by name, as a contiguous CPU tensor in the encoder's dtype.

        Names are the original checkpoint's whichever spelling was read, so equal weights yield equal tensors. On a
        CPU they are the encoder's own: read only.
        """
        for name, parameter in sorted(self._model.named_parameters()):
            yield name, parameter.detach().cpu().contiguous()

    def encode(self, items: Sequence[Item], outs: Sequence[torch.Tensor]) -> list[bool]:
        """Encode items as one packed batch (if deterministic, each by itself), each into its own output.

        An item is uint8 and RGB, only read: an image `[height, width, 3]`, or a video chunk `[frames, height, width,
        3]`; or it is the `PatchRows` of one that is normalised already. Each of `outs` is contiguous `[num_tokens,
        text_width]` in the encoder's dtype and on its device; time is pooled away, so a chunk has the tokens of one
        frame. Returns per item whether every value is finite; the caller must not use one that is not. Raises
        `ImageError`, before anything is written, if an item or output does not fit.
        """
        if len(items) != len(outs):
            raise ImageError(f"{len(items)} items need as many outputs, got {len(outs)}")
        grids = [self._checked_grid(item, out) for item, out in zip(items, outs, strict=True)]
        if not grids:
            return []
        if self._one_by_one is None:
            self._encode_pack(items, grids, outs)
            return self._judged(items, grids, outs)
        work = zip(items, grids, outs, strict=True)
        self._one_by_one.run([partial(self._encode_alone, *part) for part in work])
        return all_finite(outs)

    def warm_up(self) -> None:
        """Encode one small image, so that the first real one pays for no lazy set-up."""
        tile = self.processor.tile
        tokens = num_tokens(grid_thw(tile, tile, self.processor), self.config.merge_size)
        out = torch.empty(tokens, self.config.text_width, dtype=self.dtype, device=self.device)
        self.encode([np.zeros((tile, tile, 3), np.uint8)], [out])

    def use_graphs(self) -> None:
        """From now on batches that are seen repeatedly may run as CUDA graphs, which take memory of their own."""
        if self._accelerated is not None:
            self._accelerated.use_graphs()

    @property
    def acceleration(self) -> Acceleration:
        """What of a GPU is used, and what its graphs take, as of now."""
        return Acceleration() if self._accelerated is None else self._accelerated.acceleration

    def _encode_pack(self, items: Sequence[Item], grids: Sequence[Grid], outs: Sequence[torch.Tensor]) -> None:
        if self._accelerated is not None:
            self._accelerated.encode(items, grids, outs)
            return
        self._model(self._input(items, grids), grids, outs)

    def _judged(self, items: Sequence[Item], grids: Sequence[Grid], outs: Sequence[torch.Tensor]) -> list[bool]:
        """Whether each output is finite; those that are not are encoded once more alone, where it may be another's
        fault: FlashAttention-3 multiplies what lies behind an item by zero, and NaN stay NaN."""
        if self._accelerated is None:
            return all_finite(outs)
        flags = self._accelerated.are_finite(outs)
        if len(items) > 1:
            for place, is_finite in enumerate(flags):
                if not is_finite:
                    part = slice(place, place + 1)
                    self._encode_pack(items[part], grids[part], outs[part])
                    flags[part] = self._accelerated.are_finite(outs[part])
        return flags

    def _encode_alone(self, item: Item, grid: Grid, out: torch.Tensor) -> None:
        aligned = out if is_aligned(out) else torch.empty_like(out)
        self._encode_pack([item], [grid], [aligned])
        if aligned is not out:
            out.copy_(aligned)

    def _checked_grid(self, item: Item, out: torch.Tensor) -> Grid:
        if isinstance(item, PatchRows):
            grid = check_rows(item, self.config, self.dtype, self.device)
            check_grid(grid, self.config)
        else:
            grid = pixels_grid(item, self.processor)
        shape = (num_tokens(grid, self.config.merge_size), self.config.text_width)
        fits = tuple(out.shape) == shape and out.dtype == self.dtype and out.device == self.device
        if not fits or not out.is_contiguous():
            raise ImageError(
                f"the output of {_named(item)} must be contiguous {self.dtype} {shape} on {self.device}, got "
                f"{out.dtype} {tuple(out.shape)} on {out.device}"
            )
        return grid

    def _input(self, items: Sequence[Item], grids: Sequence[Grid]) -> torch.Tensor:
        """The rows of all items: those that come as rows are joined to those that are made of pixels."""
        parts: list[torch.Tensor] = []
        for comes_as_rows, group in groupby(zip(items, grids, strict=True), lambda pair: type(pair[0]) is PatchRows):
            pairs = list(group)
            if comes_as_rows:
                parts += [item.rows for item, _ in pairs if isinstance(item, PatchRows)]
            else:
                pixels = [item for item, _ in pairs if not isinstance(item, PatchRows)]
                parts.append(self._normalised(self._patches(pixels, [grid for _, grid in pairs])))
        return joined(parts)

    def _patches(self, items: Sequence[Pixels], grids: Sequence[Grid]) -> torch.Tensor:
        patch = self.config.patch_size
        lengths = [num_patches(grid) for grid in grids]
        rows = np.empty((sum(lengths), 3, patch, patch), np.uint8)
        start = 0
        for item, length in zip(items, lengths, strict=True):
            preprocess(item, self.processor, rows[start : start + length])
            start += length
        return torch.from_numpy(rows).to(self.device, non_blocking=True)

    def _normalised(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.float().sub_(self._mean).div_(self._std).flatten(1).to(self.dtype)

    def _channels(self, values: Sequence[float]) -> torch.Tensor:
        """A setting for channels scaled to 0..1, as one for bytes."""
        return (torch.tensor(values, dtype=torch.float32) * 255.0).view(3, 1, 1).to(self.device)


def _accelerated(model: MoonViT, processor: ProcessorConfig, options: DeviceOptions) -> "DeviceEncoder | None":
    """On CUDA in half precision, where Triton is installed."""
    parameter = next(model.parameters())
    is_half = parameter.dtype in (torch.bfloat16, torch.float16)
    if parameter.device.type != "cuda" or not is_half or find_spec("triton") is None:
        return None
    from encoder.device_encoder import DeviceEncoder

    return DeviceEncoder(model, processor, options)


def _named(item: Item) -> str:
    if isinstance(item, PatchRows):
        return f"patch rows of grid {item.grid}"
    *frames, height, width, _ = item.shape
    what = f"a chunk of {frames[0]} frames" if frames else "an image"
    return f"{what} of {width}x{height} pixels"
