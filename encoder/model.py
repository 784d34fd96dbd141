"""The encoder as its rank uses it: load once, then images in and embeddings out."""

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from encoder.config import EncoderConfig, ProcessorConfig
from encoder.errors import ImageError
from encoder.moonvit import MoonViT
from encoder.preprocess import Pixels, image_size, preprocess
from encoder.sharding import CostModel, attention_flops_per_patch_squared, linear_flops_per_patch
from encoder.sizing import Grid, grid_thw, num_patches, num_tokens
from encoder.source import resolve_model
from encoder.weights import build_model


class Encoder:
    """A MoonViT with its processor on one device. Not for use by several threads at once."""

    config: EncoderConfig
    processor: ProcessorConfig
    dtype: torch.dtype
    device: torch.device

    def __init__(self, model: MoonViT, processor: ProcessorConfig) -> None:
        """Take over a model whose parameters share one dtype and one device."""
        parameter = next(model.parameters())
        self.config = model.config
        self.processor = processor
        self.dtype = parameter.dtype
        self.device = parameter.device
        self._model = model
        self._mean = self._channels(processor.image_mean)
        self._std = self._channels(processor.image_std)

    @classmethod
    def load(cls, model: str, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> "Encoder":
        """Load a preset by its name, or a checkpoint by its folder.

        Raises `CheckpointError` listing what is wrong with the settings or the tensors.
        """
        source = resolve_model(model)
        return cls(build_model(source, dtype).to(device), source.processor)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter, sorted by name, as a contiguous CPU tensor in the encoder's dtype.

        Names are the original checkpoint's whichever spelling was read, so equal weights yield equal tensors. On a
        CPU they are the encoder's own: read only.
        """
        for name, parameter in sorted(self._model.named_parameters()):
            yield name, parameter.detach().cpu().contiguous()

    def encode(self, images: Sequence[Pixels], outs: Sequence[torch.Tensor]) -> list[bool]:
        """Encode images as one packed batch, each embedding written into its own output.

        Images are uint8 `[height, width, 3]`, RGB, only read. Each of `outs` is contiguous `[num_tokens, text_width]`
        in the encoder's dtype and on its device. Returns per item whether every value is finite; the caller must not
        use one that is not. Raises `ImageError`, before anything is written, if an image or output does not fit.
        """
        if len(images) != len(outs):
            raise ImageError(f"{len(images)} images need as many outputs, got {len(outs)}")
        grids = [self._checked_grid(image, out) for image, out in zip(images, outs, strict=True)]
        if not grids:
            return []
        self._model(self._normalised(self._patches(images, grids)), grids, outs)
        return all_finite(outs)

    def warm_up(self) -> None:
        """Encode one small image, so that the first real one pays for no lazy set-up."""
        self._time_square(self.processor.tile)

    def calibrate(self) -> CostModel:
        """Measure two square images and return a cost model of this device's speed; takes a few encodes.

        The launch cost is what a single token takes; the model's own arithmetic divides the rest between the linear
        and the squared term.
        """
        tile = self.processor.tile
        launch = min(self._time_square(tile) for _ in range(3))
        side = 8 * tile
        busy = min(self._time_square(side) for _ in range(3))
        patches = num_patches(grid_thw(side, side, self.processor))
        linear = patches * linear_flops_per_patch(self.config)
        flops = linear + patches**2 * attention_flops_per_patch_squared(self.config)
        return CostModel.from_config(
            self.config, flops_per_second=flops / max(busy - launch, busy / 2), seconds_per_launch=launch
        )

    def _time_square(self, side: int) -> float:
        tokens = num_tokens(grid_thw(side, side, self.processor), self.config.merge_size)
        out = torch.empty(tokens, self.config.text_width, dtype=self.dtype, device=self.device)
        started = time.perf_counter()
        self.encode([np.zeros((side, side, 3), np.uint8)], [out])
        return time.perf_counter() - started

    def _checked_grid(self, image: Pixels, out: torch.Tensor) -> Grid:
        width, height = image_size(image)
        grid = grid_thw(width, height, self.processor)
        shape = (num_tokens(grid, self.config.merge_size), self.config.text_width)
        fits = tuple(out.shape) == shape and out.dtype == self.dtype and out.device == self.device
        if not fits or not out.is_contiguous():
            raise ImageError(
                f"the output of an image of {width}x{height} pixels must be contiguous {self.dtype} {shape} on "
                f"{self.device}, got {out.dtype} {tuple(out.shape)} on {out.device}"
            )
        return grid

    def _patches(self, images: Sequence[Pixels], grids: Sequence[Grid]) -> torch.Tensor:
        patch = self.config.patch_size
        lengths = [num_patches(grid) for grid in grids]
        rows = np.empty((sum(lengths), 3, patch, patch), np.uint8)
        start = 0
        for image, length in zip(images, lengths, strict=True):
            preprocess(image, self.processor, rows[start : start + length])
            start += length
        return torch.from_numpy(rows).to(self.device, non_blocking=True)

    def _normalised(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.float().sub_(self._mean).div_(self._std).flatten(1).to(self.dtype)

    def _channels(self, values: Sequence[float]) -> torch.Tensor:
        """A setting for channels scaled to 0..1, as one for bytes."""
        return (torch.tensor(values, dtype=torch.float32) * 255.0).view(3, 1, 1).to(self.device)


def all_finite(outs: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each tensor whether it holds neither NaN nor infinity: one pass over each, one read of the device."""
    extremes = torch.stack([torch.stack(out.aminmax()) for out in outs])
    flags: list[bool] = extremes.isfinite().all(dim=1).tolist()
    return flags
