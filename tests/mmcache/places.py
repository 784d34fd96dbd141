"""Pictures that fill a pool of 1 MiB, and what tests of it look at."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mmcache
from tests.mmcache.support import eventually, image

PLACES = 4
"""Pictures of `SIDE` whose embeddings fill the pool: 256 tokens of 1 KiB each."""
SIDE = 448


def big(*seeds: int) -> list[Any]:
    return [image(seed, SIDE, SIDE) for seed in seeds]


def digest(lease: mmcache.Lease) -> str:
    return hashlib.sha256(lease.numpy().tobytes()).hexdigest()


def digests(client: mmcache.Client, seeds: Sequence[int]) -> list[str]:
    """What each picture's embedding has to be."""
    found = []
    for seed in seeds:
        (lease,) = client.encode(big(seed))
        found.append(digest(lease))
        lease.release()
    return found


def release(leases: list[mmcache.Lease]) -> None:
    for lease in leases:
        lease.release()


def counters(client: mmcache.Client) -> Counter[str]:
    """What a test looks at, so that it can be compared with what it was before."""
    stats = client.stats()
    of_pool = {name: stats["pool"][name] for name in ("recalls", "room_waits", "evictions")}
    return Counter({"items": stats["items"]["total"], "encoded": stats["items"]["encoded"]} | of_pool)


def pixels(client: mmcache.Client) -> int:
    """Bytes of decoded pictures, those that wait for room too."""
    nbytes = client.stats()["ingest"]["bytes_used"]
    assert isinstance(nbytes, int)
    return nbytes


def arrived(client: mmcache.Client, num_items: int) -> None:
    eventually(lambda: counters(client)["items"] == num_items, "the call has arrived")


def decoded(client: mmcache.Client, call: mmcache.Handle, num_bytes: int) -> None:
    """Poll a call, which sends the bytes that it was asked for, until there are as many of pixels."""
    eventually(lambda: call.poll() or pixels(client) == num_bytes, "it is decoded")


def ends(call: mmcache.Handle, other: mmcache.Handle) -> None:
    """Poll both until one of them ends, which has to be the first."""
    eventually(lambda: other.poll() or call.poll(), "a call ends", 60)
    assert call.poll(), "it came first"


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=Path(__file__).parents[2])
