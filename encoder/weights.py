"""The tower's parameters: read from a checkpoint folder, or drawn from a fixed seed for a preset.

Parameters go by the name that they have in `MoonViT`, which is the original checkpoint's. Of a checkpoint only the
files that hold vision tensors are opened.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Final, TypeAlias

import torch

from encoder.errors import CheckpointError
from encoder.files import exists, read_json, shown
from encoder.moonvit import MoonViT
from encoder.names import Place, place
from encoder.source import INDEX_FILE, SINGLE_FILE, ModelSource
from encoder.tensors import BUFFER_BYTES, READABLE_DTYPES, StoredTensor, opened_tensors

PRESET_SEED: Final = 25
QUANTIZED_DTYPES: Final = ("I", "U", "F8_", "F6_", "F4")
"""Beginnings of the dtypes that no plain weight has."""
QUANTIZED_NAME: Final = re.compile(
    r".*\.(weight_(packed|scale|scale_inv|scale_2|global_scale|zero_point|shape|g_idx)|(input|output)_scale|qweight|"
    r"qzeros|scales|g_idx|SCB|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*))"
)
"""Tensors that a quantized layer has in place of its weight, or beside it."""

MAX_LISTED: Final = 50
"""Faults that an error lists; the others are counted."""
MAX_LISTED_CHARS: Final = 3000
MAX_LINE: Final = 200

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
Stored: TypeAlias = Sequence[tuple[Place, StoredTensor]]
Table: TypeAlias = Mapping[str, str]


def build_model(source: ModelSource, dtype: torch.dtype) -> MoonViT:
    """Return the model of a source on the CPU, its parameters private copies in `dtype`.

    Raises `CheckpointError` listing every vision tensor that is missing, extra, repeated, quantized, in another file
    than the index says, or of the wrong shape or dtype.
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

    Tensors are read into them, so that a later change of a file cannot reach the result. Raises `CheckpointError` as
    `build_model` does, and for files that are missing, damaged, or become shorter meanwhile.
    """
    table = _vision_table(folder)
    with ExitStack() as stack:
        files = [stack.enter_context(opened_tensors(path)) for path in _files_of(folder, table)]
        stored = [(target, tensor) for file in files for tensor in file if (target := place(tensor.name))]
        if faults := _faults(stored, shapes, table):
            raise CheckpointError("\n  ".join([f"{folder}: vision tensors do not fit the model", *_first(faults)]))
        parameters = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
        for target, tensor in stored:
            target.fill(parameters[target.parameter], partial(tensor.read_into, buffer=buffer), num_heads)
    return parameters


def vision_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint folder that hold vision tensors, by its index if it is sharded.

    Raises `CheckpointError` if there is neither a single file nor an index, or if the index is unusable.
    """
    return _files_of(folder, _vision_table(folder))


def _files_of(folder: Path, table: Table | None) -> list[Path]:
    return [folder / name for name in sorted(set(table.values()))] if table else [folder / SINGLE_FILE]


def _vision_table(folder: Path) -> Table | None:
    """The file of every vision tensor, by the index; None if all are in one file, which goes before an index."""
    if exists(folder / SINGLE_FILE):
        return None
    index = folder / INDEX_FILE
    if not exists(index):
        raise CheckpointError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}")
    table = read_json(index).get("weight_map")
    files = {name: file for name, file in table.items() if place(name)} if isinstance(table, dict) else {}
    if not files:
        raise CheckpointError(f"{index}: weight_map names no vision tensor")
    if foreign := [shown(file) for file in files.values() if not _is_plain(file)]:
        raise CheckpointError(f"{index}: files must lie beside the index: {', '.join(dict.fromkeys(foreign[:10]))}")
    return files


def _is_plain(file: object) -> bool:
    """Whether it is the name of a file, and no path."""
    return isinstance(file, str) and file not in ("", ".", "..") and not set(file) & set("/\0")


def _faults(stored: Stored, shapes: Shapes, table: Table | None) -> list[str]:
    faults = [fault for target, tensor in stored if (fault := _fault(target, tensor, shapes))]
    return sorted(faults + _misplaced(stored, table) + _incomplete(stored, shapes))


def _first(faults: list[str]) -> list[str]:
    """The first faults, as many as a message has room for, and how many more there are."""
    lines = [fault if len(fault) <= MAX_LINE else f"{fault[:MAX_LINE]}..." for fault in faults[:MAX_LISTED]]
    ends = accumulate(len(line) for line in lines)
    shown_lines = [line for line, end in zip(lines, ends, strict=True) if end <= MAX_LISTED_CHARS]
    hidden = len(faults) - len(shown_lines)
    return [*shown_lines, f"and {hidden} more"] if hidden else shown_lines


def _fault(target: Place, tensor: StoredTensor, shapes: Shapes) -> str | None:
    name, dtype, shape = tensor.name, tensor.dtype, tensor.shape
    readable = f"{name} is {dtype}, readable are {', '.join(READABLE_DTYPES)}"
    if target.parameter not in shapes:
        return f"quantized: {name} belongs to a quantized layer" if QUANTIZED_NAME.fullmatch(name) else f"extra: {name}"
    if dtype.startswith(QUANTIZED_DTYPES):
        return f"quantized: {readable}"
    if shape != (wanted := target.shape(shapes[target.parameter])):
        return f"wrong shape: {name} is {shape}, the model has {wanted}"
    return None if dtype in READABLE_DTYPES else f"wrong dtype: {readable}"


def _misplaced(stored: Stored, table: Table | None) -> list[str]:
    """Of a tensor that the index has in another file, or in none, nobody can say which file is the right one."""
    found = [] if table is None else [(tensor, table.get(tensor.name)) for _, tensor in stored]
    return [
        f"misplaced: {tensor.name} is in {tensor.path.name}, the index says {file or 'nothing of it'}"
        for tensor, file in found
        if file != tensor.path.name
    ]


def _incomplete(stored: Stored, shapes: Shapes) -> list[str]:
    places: dict[Place, list[str]] = defaultdict(list)
    parts: dict[str, set[str]] = defaultdict(set)
    for target, tensor in stored:
        places[target].append(tensor.path.name)
        parts[target.parameter].add(target.part)
    faults = [_repeated(target, files) for target, files in places.items() if len(files) > 1]
    for name in shapes:
        found = parts[name]
        wanted = {"q", "k", "v"} if found - {""} else {""}
        faults += [f"missing: {Place(name, part).label}" for part in wanted - found]
        faults += [f"repeated: {Place(name, part).label}" for part in found - wanted]
    return faults


def _repeated(target: Place, files: list[str]) -> str:
    where = f" is in {' and in '.join(sorted(set(files)))}" if len(set(files)) > 1 else ""
    return f"repeated: {target.label}{where}"
