"""Files and names that no model has: one error each, at once, and never another exception."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from encoder.errors import CheckpointError
from encoder.files import MAX_JSON_BYTES, read_json, shown
from encoder.source import SETTINGS_FILES, resolve_model
from encoder.weights import SINGLE_FILE, vision_files


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path may be too long
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_loop(path: Path) -> None:
    path.symlink_to(path)


LOAD_EACH = """
import json, sys, torch
from encoder.errors import CheckpointError
from encoder.source import resolve_model
from encoder.weights import build_model

for folder in sys.argv[1:]:
    try:
        build_model(resolve_model(folder), torch.float32)
    except CheckpointError as error:
        print(json.dumps(str(error)), flush=True)
"""


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    """In a process of its own: a pipe that is waited for would hang the test."""
    folders, names = [], []
    for make in (make_pipe, make_socket, link_to_device, make_loop, Path.mkdir):
        for name in (*SETTINGS_FILES, SINGLE_FILE):
            folder = tmp_path / str(len(folders))
            folder.mkdir()
            if name != "config.json":
                (folder / "config.json").write_text('{"model_type": "kimi_k25", "vision_config": {}}')
            make(folder / name)
            folders.append(folder)
            names.append(name)
    command = [sys.executable, "-c", LOAD_EACH, *folders]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    errors = [json.loads(line) for line in done.stdout.splitlines()]
    for folder, name, error in zip(folders, names, errors, strict=True):
        assert error.startswith(f"{folder}/{name}: ")


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b"\xef\xbb\xbf{}",
        b"\xff{}",
        b"",
        b"[1]",
        b'{"a": 1, "a": 1}',
        b'{"a": {"b": 1, "b": 2}}',
        b'{"a": "' + b"x" * MAX_JSON_BYTES + b'"}',
    ],
    ids=["array", "objects", "digits", "bom", "latin", "empty", "list", "repeated", "repeated inside", "large"],
)
def test_json_that_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json: ") as caught:
        read_json(path)
    assert len(str(caught.value)) < 1000


NAMES = ["a" * 300, "/tmp" + "/a" * 3000, "~no-such-user/x", "a\0b", "\ud800", "\udc80", "x\n" * 100]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_that_no_folder_has(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"^model "):
        resolve_model(name)


def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    """It exists, but its name cannot be told to a rank."""
    folder = os.path.join(os.fsencode(tmp_path), b"\x80")
    os.mkdir(folder)
    with pytest.raises(CheckpointError, match="utf-8"):
        resolve_model(os.fsdecode(folder))


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [10, 300, 900])
def test_deep_values_are_compared_and_shown(tmp_path: Path, depth: int) -> None:
    settings = {
        "model_type": "kimi_k25",
        "vision_config": {"hidden_size": nested(depth), "vt_hidden_size": nested(depth)},
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError) as caught:
        resolve_model(str(tmp_path))
    assert len(str(caught.value)) < 500


def test_values_are_shown_in_part() -> None:
    assert shown("abc") == "'abc'"
    assert len(shown("x" * 1000)) < 210
    assert shown("\ud800") == r"'\ud800'"


@pytest.mark.parametrize(
    "file", [None, 5, [1], {"a": 1}, "", ".", "..", "/etc/passwd", "../a", "a/b", "a\0b"], ids=repr
)
def test_an_index_names_files_beside_it(tmp_path: Path, file: object) -> None:
    table = {"mm_projector.proj.0.bias": "good.safetensors", "mm_projector.proj.0.weight": file}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    with pytest.raises(CheckpointError, match="beside the index"):
        vision_files(tmp_path)
