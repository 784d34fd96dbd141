"""docs/engines.md: its examples run, and print what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.mmcache.support import SidecarProcess, clean_environ

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")


def block(before: str, language: str) -> str:
    """The block of code that follows these words."""
    found = re.search(rf"{re.escape(before)}\n\n```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, f"the page has no block after {before!r}"
    return found[1]


def test_the_example_runs_as_the_page_says(sidecar: SidecarProcess, tmp_path: Path) -> None:
    for name in ("scheduler.py", "rank.py"):
        (tmp_path / name).write_text(block(f"`{name}`:", "python"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "scheduler.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        env=clean_environ(PYTHONPATH=str(ROOT), MMCACHE_SOCKET=str(sidecar.socket)),
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, block("The scheduler prints:", "text"), "")
    stats = sidecar.stats()
    assert (stats["items"]["encoded"], stats["leases"]["active"], stats["staging"]["bytes_used"]) == (2, 0, 0)


def test_the_example_without_a_sidecar_runs_as_the_page_says(tmp_path: Path) -> None:
    code = block("`AsyncClient.local` is its twin.", "python")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        env=clean_environ(PYTHONPATH=str(ROOT), MMCACHE_STATE=str(tmp_path / "state")),
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, block("It prints:", "text"), "")
