"""The tower's parameters: read from a checkpoint folder, or drawn from a fixed seed for a preset.

Parameters go by the name that they have in `MoonViT`, which is the original checkpoint's. Of a checkpoint only the
files that hold vision tensors are opened.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from encoder.errors import CheckpointError
from encoder.moonvit import MoonViT
from encoder.names import Place, place
from encoder.source import ModelSource, read_json

PRESET_SEED: Final = 25
SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
READABLE_DTYPES: Final = ("F32", "BF16", "F16")
QUANTIZED_DTYPES: Final = ("I", "U", "F8_", "F6_", "F4")
"""Beginnings of the dtypes that no plain weight has."""
QUANTIZED_NAME: Final = re.compile(
    r".*\.(weight_(packed|scale|scale_inv|scale_2|global_scale|zero_point|shape|g_idx)|(input|output)_scale|qweight|"
    r"qzeros|scales|g_idx|SCB|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*))"
)
"""Tensors that a quantized layer has in place of its weight, or beside it."""

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def build_model(source: ModelSource, dtype: torch.dtype) -> MoonViT:
    """Return the model of a source on the CPU, its parameters private copies in `dtype`.

    Raises `CheckpointError` listing every vision tensor that is missing, extra, repeated, quantized, or of the wrong
    shape or dtype.
    """
    with torch.device("meta"):
        model = MoonViT(source.config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if source.folder is None:
        parameters = dict(random_parameters(shapes, dtype))
    else:
        parameters = read_parameters(source.folder, shapes, source.config.num_heads, dtype)
    model.load_state_dict(parameters, assign=True)
    return model.requires_grad_(False).eval()


def random_parameters(shapes: Shapes, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a preset, the same on every call: none is zero or one, and activations stay near one."""
    generator = torch.Generator().manual_seed(PRESET_SEED)
    for name, shape in sorted(shapes.items()):
        yield name, _scaled(name, torch.empty(shape).uniform_(-1.0, 1.0, generator=generator)).to(dtype)


def _scaled(name: str, draw: torch.Tensor) -> torch.Tensor:
    if name.endswith("bias"):
        return draw.mul_(0.1)
    if draw.ndim == 1:
        return draw.mul_(0.2).add_(1.0)
    if name.endswith("pos_emb.weight"):
        return draw.mul_(0.5)
    return draw.mul_(math.sqrt(3.0 / draw[0].numel()))


def read_parameters(folder: Path, shapes: Shapes, num_heads: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the parameters of these names and shapes from the safetensors of a folder, converted to `dtype`.

    Files are memory-mapped while read and copied from, so that a later change of a file cannot reach the result.
    Raises `CheckpointError` as `build_model` does, and for files that are missing or damaged.
    """
    with ExitStack() as stack:
        stored = _stored_tensors([_open(stack, path) for path in vision_files(folder)])
        if faults := _faults(stored, shapes):
            raise CheckpointError("\n  ".join([f"{folder}: vision tensors do not fit the model", *faults]))
        parameters = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        for name, (target, file) in stored.items():
            target.fill(parameters[target.parameter], file.get_tensor(name), num_heads)
    return parameters


def vision_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint folder that hold vision tensors, by its index if it is sharded.

    Raises `CheckpointError` if there is neither a single file nor an index, or if the index is unusable.
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists():
        return [single]
    if not index.exists():
        raise CheckpointError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}")
    table = read_json(index).get("weight_map")
    files = sorted({str(file) for name, file in table.items() if place(name)}) if isinstance(table, dict) else []
    if not files:
        raise CheckpointError(f"{index}: weight_map names no vision tensor")
    if foreign := [file for file in files if Path(file).name != file]:
        raise CheckpointError(f"{index}: files must lie beside the index: {', '.join(foreign)}")
    return [folder / file for file in files]


def _open(stack: ExitStack, path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return stack.enter_context(safe_open(path, framework="pt", device="cpu"))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _stored_tensors(files: list[Any]) -> dict[str, tuple[Place, Any]]:
    named = ((name, place(name), file) for file in files for name in file.keys())  # noqa: SIM118
    return {name: (target, file) for name, target, file in named if target}


def _faults(stored: Mapping[str, tuple[Place, Any]], shapes: Shapes) -> list[str]:
    faults = []
    for name, (target, file) in stored.items():
        piece = file.get_slice(name)
        if fault := _fault(name, target, tuple(piece.get_shape()), piece.get_dtype(), shapes):
            faults.append(fault)
    return sorted(faults + _incomplete([target for target, _ in stored.values()], shapes))


def _fault(name: str, target: Place, shape: tuple[int, ...], dtype: str, shapes: Shapes) -> str | None:
    readable = f"{name} is {dtype}, readable are {', '.join(READABLE_DTYPES)}"
    if target.parameter not in shapes:
        return f"quantized: {name} belongs to a quantized layer" if QUANTIZED_NAME.fullmatch(name) else f"extra: {name}"
    if dtype.startswith(QUANTIZED_DTYPES):
        return f"quantized: {readable}"
    if shape != (wanted := target.shape(shapes[target.parameter])):
        return f"wrong shape: {name} is {shape}, the model has {wanted}"
    return None if dtype in READABLE_DTYPES else f"wrong dtype: {readable}"


def _incomplete(places: list[Place], shapes: Shapes) -> list[str]:
    faults = [f"repeated: {target.label}" for target, times in Counter(places).items() if times > 1]
    for name in shapes:
        found = {target.part for target in places if target.parameter == name}
        wanted = {"q", "k", "v"} if found - {""} else {""}
        faults += [f"missing: {Place(name, part).label}" for part in wanted - found]
        faults += [f"repeated: {Place(name, part).label}" for part in found - wanted]
    return faults
