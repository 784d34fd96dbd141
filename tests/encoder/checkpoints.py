"""Checkpoint folders of every naming, made from what transformers writes; and which of their files are opened."""

import ctypes
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file, save_file

from encoder.weights import INDEX_FILE

IN_OPEN = 0x20
EVENT = struct.Struct("iIII")
VT_NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data))


def original_name(name: str) -> str:
    """The original checkpoint's name of a tensor in transformers' default spelling."""
    return name.replace("model.mm_projector.", "mm_projector.").replace("encoder.patch_embed.", "patch_embed.")


def write_original(source: Path, folder: Path) -> Path:
    """Write the folder that the original repository would hold, from one in the default spelling of transformers."""
    for path in source.glob("*.safetensors"):
        tensors = {original_name(name): tensor for name, tensor in load_file(path).items()}
        save_file(tensors, folder / path.name)
    if (source / INDEX_FILE).exists():
        index = json.loads((source / INDEX_FILE).read_text())
        index["weight_map"] = {original_name(name): file for name, file in index["weight_map"].items()}
        write_json(folder / INDEX_FILE, index)
    write_json(folder / "config.json", original_settings(json.loads((source / "config.json").read_text())))
    return folder


def original_settings(settings: dict) -> dict:
    vision = settings["vision_config"]
    original = {f"vt_{name}": vision[name] for name in VT_NAMES}
    original |= {f"init_pos_emb_{side}": vision[f"pos_emb_{side}"] for side in ("height", "width", "time")}
    original |= {"text_hidden_size": settings["text_config"]["hidden_size"], "mm_hidden_size": vision["hidden_size"]}
    original |= {"projector_ln_eps": settings["projection_layer_norm_eps"], "merge_type": "sd2_tpool"}
    return {"model_type": "kimi_k25", "vision_config": original}


@contextmanager
def watched_opens(folder: Path) -> Iterator[set[str]]:
    """Fill a set, on leaving, with the names of the folder's files that were opened meanwhile, by the kernel's word."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    assert libc.inotify_add_watch(descriptor, bytes(folder), IN_OPEN) >= 0, os.strerror(ctypes.get_errno())
    opened: set[str] = set()
    try:
        yield opened
        opened.update(_event_names(os.read(descriptor, 1 << 20)))
    finally:
        os.close(descriptor)


def _event_names(events: bytes) -> Iterator[str]:
    start = 0
    while start < len(events):
        *_, length = EVENT.unpack_from(events, start)
        start += EVENT.size
        yield events[start : start + length].rstrip(b"\0").decode()
        start += length
