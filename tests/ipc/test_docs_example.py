"""The page that lets others use ipc alone: its example runs, and its tables are those of the code."""

from __future__ import annotations

import enum
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ipc.extents import EXTENT_TRANSITIONS
from ipc.offers import OFFER_TRANSITIONS
from ipc.shares import HOLDER_TRANSITIONS, SHARE_TRANSITIONS
from ipc.staging import STAGED_TRANSITIONS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ipc.md").read_text(encoding="utf-8")


def code(name: str) -> str:
    """The block of Python that the page calls `name`."""
    found = re.search(rf"`{re.escape(name)}`:\n\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, f"the page has no {name}"
    return found[1]


def expected_output() -> list[str]:
    found = re.search(r"The owner prints:\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1].splitlines()


def start(name: str, folder: Path, socket: Path) -> subprocess.Popen[str]:
    path = folder / name
    path.write_text(code(name), encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, path, socket],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_the_example_of_two_processes_runs_as_the_page_says(tmp_path: Path) -> None:
    socket = tmp_path / "pool.sock"
    owner = start("owner.py", tmp_path, socket)
    readers = []
    try:
        assert owner.stdout is not None
        lines = [owner.stdout.readline().rstrip("\n")]
        assert lines == ["listening"]
        readers.append(start("reader.py", tmp_path, socket))
        told, _ = readers[0].communicate(timeout=60)
        rest, _ = owner.communicate(timeout=60)
    finally:
        for process in (owner, *readers):
            process.kill()
            process.wait()
    assert lines + rest.splitlines() == expected_output()
    assert told == "read 1000 bytes of 1, writable: False\n"
    assert (owner.returncode, readers[0].returncode) == (0, -9)
    assert not socket.exists()


def rows(heading: str) -> set[tuple[str, str]]:
    """The transitions of the page's table under that heading."""
    section = PAGE.split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    pairs = re.findall(r"^\| ([A-Z]+) \| ([A-Z]+) \| ", section, re.MULTILINE)
    assert len(pairs) == len(set(pairs)), "a transition is there twice"
    return set(pairs)


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("Share", SHARE_TRANSITIONS),
        ("Holder", HOLDER_TRANSITIONS),
        ("Offer", OFFER_TRANSITIONS),
        ("Extent", EXTENT_TRANSITIONS),
        ("Staged", STAGED_TRANSITIONS),
    ],
)
def test_the_pages_tables_are_those_of_the_code(heading: str, table: Mapping[enum.IntEnum, frozenset[Any]]) -> None:
    assert rows(heading) == {(origin.name, to.name) for origin, targets in table.items() for to in targets}
