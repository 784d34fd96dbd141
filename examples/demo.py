"""The main job on embedded defaults: photographs in, cached embeddings out, through a real sidecar, three times.

    python -m examples.demo [IMAGE ...]

Runs `mmcache serve` as a user would, with state, store and socket in a temporary folder that is removed at the end.
This process is the client.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import mmcache
from examples.pictures import make_strip, photographs

MMCACHE = (sys.executable, "-m", "mmcache")
NOTE = (
    "The default preset moonvit-tiny has random weights, so the embeddings mean nothing: "
    "for real ones run `mmcache serve --model /path/to/Kimi-K2.5`."
)


class Sidecar:
    """`mmcache serve` in `folder`, ready on entering and stopped on leaving."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "mmcache.sock"
        self._command = (*MMCACHE, "serve", "--state", str(folder / "state"), "--socket", str(self.socket))

    def __enter__(self) -> Sidecar:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("MMCACHE_")}
        environ |= {"MMCACHE_LOG_LEVEL": "warning", "MMCACHE_HTTP": "off"}
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, env=environ)
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        if not ready:
            raise SystemExit(f"the sidecar ended with status {self._process.wait()}")
        print(ready, end="")
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.communicate()


def size_of(path: Path) -> str:
    """Pixels of a picture, as text."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            return f"{picture.width}×{picture.height}"
    except (OSError, UnidentifiedImageError):
        return "?"


def run_pass(title: str, client: mmcache.Client, paths: Sequence[Path]) -> list[str]:
    """Encode each picture and print its row. Returns the origins."""
    print(f"\n{title}")
    origins = []
    for path in paths:
        started = time.perf_counter()
        (result,) = client.encode([path], errors="return")
        took_ms = (time.perf_counter() - started) * 1000
        if isinstance(result, mmcache.ItemError):
            origins.append("failed")
            print(f"{path.name:<24} {size_of(path):>10}  {type(result).__name__}: {result.reason}")
            continue
        with result as lease:
            origins.append(lease.origin)
            row = f"{path.name:<24} {size_of(path):>10} {lease.num_tokens:>6} tokens  {str(lease.key)[:12]}"
            print(f"{row}  {lease.origin:<8} {took_ms:9.2f} ms")
    return origins


def main(arguments: Sequence[str]) -> int:
    """Three passes: encoded, from the pool, and from the store after a restart. Status 1 if they are not."""
    with tempfile.TemporaryDirectory(prefix="mmcache-demo-") as name:
        folder = Path(name)
        paths = [Path(argument) for argument in arguments] or [*photographs(), make_strip(folder / "strip.png")]
        print(NOTE)
        with Sidecar(folder) as sidecar, mmcache.connect(sidecar.socket) as client:
            first = run_pass("first pass: every picture is new", client, paths)
            second = run_pass("second pass: every picture is in the pool", client, paths)
        print("\nrestarting the sidecar")
        with Sidecar(folder) as sidecar, mmcache.connect(sidecar.socket) as client:
            third = run_pass("third pass: the pool is empty, the store is not", client, paths)
            print("\n$ mmcache stats", flush=True)
            subprocess.run((*MMCACHE, "stats", "--socket", str(sidecar.socket)), check=True)
    # The same content given twice is a pool hit from its second time on.
    expected = ({"encoded", "pool"}, {"pool"}, {"store", "pool"})
    is_right = all(set(origins) <= allowed for origins, allowed in zip((first, second, third), expected, strict=True))
    if not is_right:
        print("\nsome pictures failed, or did not come from where they should", file=sys.stderr)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
