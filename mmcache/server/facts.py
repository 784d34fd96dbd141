"""What the ranks have to agree on about the model that is served, and how it becomes a fingerprint."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TypeAlias

from encoder.config import ProcessorConfig
from encoder.sizing import Grid, grid_thw, num_patches, num_tokens
from ipc.errors import MemoryUnavailable
from mmcache.config import Settings
from mmcache.errors import CheckpointError, ConfigError, MMCacheError, SidecarError
from mmcache.foreign import VALUE_BYTES, ForeignModel
from mmcache.keys import Fingerprint, fingerprint
from mmcache.protocol import ModelChanged
from mmcache.server.messages import Loaded, ModelReport, StartFailed
from mmcache.tiers.base import Entry

Sides: TypeAlias = "tuple[int, int, int]"
"""Height, width and number of frames; 0 for a picture."""
Sizes: TypeAlias = "tuple[Grid, int, int]"
"""Grid, patches and tokens."""

MAX_KNOWN_SIZES = 4096


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as it is served. `model`: what the setting names; all else follows from what a rank loaded.

    `known_sizes`: what `sizes` remembers.
    """

    model: str
    fingerprint: Fingerprint
    dtype: str
    dim: int
    numerics_version: int
    processor: ProcessorConfig
    known_sizes: dict[Sides, Sizes] = field(default_factory=dict, compare=False, repr=False)

    def sizes(self, height: int, width: int, num_frames: int) -> Sizes:
        """Grid, patches and tokens of decoded pixels. Raises `ImageError` as `grid_thw` does."""
        sides = (height, width, num_frames)
        try:
            return self.known_sizes[sides]
        except KeyError:
            grid = grid_thw(width, height, self.processor, num_frames)
            sizes = grid, num_patches(grid), num_tokens(grid, self.processor.merge_size)
            if len(self.known_sizes) == MAX_KNOWN_SIZES:
                self.known_sizes.clear()
            self.known_sizes[sides] = sizes
            return sizes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's embedding."""
        return self.dim * VALUE_BYTES[self.dtype]

    def changed(self) -> ModelChanged:
        """What a client is told of a model that is served from now on."""
        return ModelChanged(
            fingerprint=str(self.fingerprint), model=self.model, dtype=self.dtype, dim=self.dim,
            processor=self.processor.canonical(),
        )  # fmt: skip


def is_usable(entry: Entry, model: ModelFacts | ForeignModel) -> bool:
    """Whether a stored embedding has the dtype and width of a model; a foreign one has any width."""
    dim = model.dim if isinstance(model, ModelFacts) else entry.shape[1]
    return entry.dtype == model.dtype and entry.shape[1] == dim


def facts_of(settings: Settings, model: str, report: ModelReport) -> ModelFacts:
    """The facts of a model that a rank has loaded under these settings."""
    return ModelFacts(
        model=model,
        fingerprint=fingerprint(
            weights_digest=report.weights_digest,
            model_config=report.model_config_json,
            processor=report.processor_json,
            decoding=settings.decoding,
            is_deterministic=settings.deterministic,
            dtype=settings.dtype,
            numerics_version=report.numerics_version,
        ),
        dtype=settings.dtype,
        dim=report.dim,
        numerics_version=report.numerics_version,
        processor=ProcessorConfig(**json.loads(report.processor_json)),
    )


def start_failure(settings: Settings, model: str, failed: StartFailed) -> MMCacheError:
    """Why a rank did not start."""
    if failed.error == CheckpointError.__name__:
        return CheckpointError(f"model = {model}: {failed.reason}")
    if failed.error == MemoryUnavailable.__name__:
        return ConfigError(f"pool_bytes = {settings.pool_bytes} for each of {settings.ranks} ranks: {failed.reason}")
    return SidecarError(f"a rank cannot start: {failed.reason}")


def load_failure(model: str, failed: Loaded) -> MMCacheError:
    """Why a rank did not load a model beside its own."""
    kinds: dict[str, type[MMCacheError]] = {kind.__name__: kind for kind in (ConfigError, CheckpointError)}
    if failed.error in kinds:
        return kinds[failed.error](f"model = {model}: {failed.reason}")
    return SidecarError(f"model = {model}: cannot be loaded beside the one that is served: {failed.reason}")
