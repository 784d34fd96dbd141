"""A model as a rank has it: the encoder, ready, and what the coordinator is told about it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from encoder.calibration import calibrate, conditions
from encoder.config import NUMERICS_VERSION
from encoder.device_options import DeviceOptions
from encoder.errors import CheckpointError
from encoder.memory import ActivationMemory, measure_activations, predict_activations
from encoder.model import Encoder
from encoder.source import SETTINGS_FILES, resolve_model
from encoder.stamps import Stamp, are_settled, stamp_files, stamp_present
from encoder.weights import vision_files
from mmcache.keys import digest_parts
from mmcache.server.messages import ModelReport, StartRank
from mmcache.server.rank_bound import bound_of, free_bytes

_IDENTITY_TAG = b"mmcache weights by their files"
_COST_TAG = b"mmcache costs by what decides them"


@dataclass(frozen=True, slots=True)
class RankModel:
    """Weights in memory, warm."""

    encoder: Encoder
    report: ModelReport
    activations: ActivationMemory


def load_model(
    start: StartRank,
    model: str,
    known: Mapping[str, str],
    costs: Mapping[str, Sequence[float]],
    before: RankModel | None = None,
) -> RankModel:
    """Load a model, warm it up and describe it.

    Args:
        start: what the rank was started with: device, dtype, whether it is deterministic, how it uses a GPU.
        model: a preset or a checkpoint folder.
        known: digests of weights by the identity of their files; see docs/fingerprint.md.
        costs: numbers of cost models by the conditions that they were measured under; what is there is not measured.

    Raises:
        CheckpointError: it cannot be loaded, or its files changed meanwhile.
    """
    folder = resolve_model(model).folder
    began_ns = time.time_ns()
    stamps, settings = _stamps(folder), _settings_stamps(folder)
    encoder = Encoder.load(
        model, device=start.device, dtype=getattr(torch, start.dtype), deterministic=start.deterministic,
        options=DeviceOptions(start.attention, start.graph_bytes),
    )  # fmt: skip
    if (stamps, settings) != (_stamps(folder), _settings_stamps(folder)):
        raise CheckpointError(f"{folder}: its files changed while they were read; try again when they are complete")
    identity = identify(encoder, stamps) if stamps and are_settled(stamps, began_ns) else ""
    encoder.warm_up()
    activations = measure_activations(encoder) if before is None else _activations_beside(before, encoder)
    encoder.use_graphs()  # a graph takes no memory when it runs, so that was measured without
    cost_identity = digest_parts((_COST_TAG, conditions(encoder).encode())).hex()
    report = ModelReport(
        weights_digest=bytes.fromhex(known[identity]) if identity in known else digest_weights(encoder),
        identity=identity,
        model_config_json=encoder.config.canonical(),
        processor_json=encoder.processor.canonical(),
        numerics_version=NUMERICS_VERSION,
        dim=encoder.config.text_width,
        cost=list(costs[cost_identity]) if cost_identity in costs else calibrate(encoder).numbers(),
        cost_identity=cost_identity,
        max_patches=bound_of(activations, _free_bytes(start, encoder, before)),
        bytes_per_patch=activations.bytes_per_patch,
        acceleration=asdict(encoder.acceleration),
    )
    return RankModel(encoder, report, activations)


def _activations_beside(before: RankModel, encoder: Encoder) -> ActivationMemory:
    """While the one before encodes, nothing can be measured: its own go by the ratio of both arithmetics."""
    ours, theirs = (predict_activations(one.config, one.dtype) for one in (encoder, before.encoder))
    return before.activations.scaled(ours.bytes_per_patch / theirs.bytes_per_patch)


def _free_bytes(start: StartRank, encoder: Encoder, before: RankModel | None) -> int | None:
    """What there will be for activations when the model before this one is gone, and graphs take all they may."""
    free = free_bytes(encoder.device, start.num_sharing, start.device_bytes)
    if free is None:
        return None
    if encoder.acceleration.attention:
        free = max(0, free - max(0, start.graph_bytes - encoder.acceleration.graph_bytes))
    return free if before is None else free + before.encoder.num_bytes


def digest_weights(encoder: Encoder) -> bytes:
    """Digest of every tensor's name, dtype, shape and bytes, in the order of names."""

    def parts() -> list[bytes | memoryview]:
        found: list[bytes | memoryview] = []
        for name, tensor in encoder.tensors():
            found.append(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.append(tensor.contiguous().view(torch.uint8).numpy().data.cast("B"))
        return found

    return digest_parts(parts())


def identify(encoder: Encoder, stamps: Sequence[Stamp]) -> str:
    """Name what was loaded from files in this state, by all that decides the tensors: 32 hex digits."""
    how = f"{NUMERICS_VERSION} {encoder.dtype} {encoder.config.canonical()}"
    return digest_parts((_IDENTITY_TAG, how.encode(), *map(bytes, stamps))).hex()


def _stamps(folder: Path | None) -> tuple[Stamp, ...]:
    """The state of the files that the weights are read from; of a preset, none."""
    return () if folder is None else stamp_files(vision_files(folder))


def _settings_stamps(folder: Path | None) -> tuple[Stamp | None, ...]:
    """The state of what else is read, or would be if it were there. It is no part of the weights' identity."""
    return () if folder is None else stamp_present([folder / name for name in SETTINGS_FILES])
