"""A bit that changes in a cached embedding is found, however little it changes the numbers."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from tests.mmcache.support import eventually, image
from tests.mmcache.verifications import counts, is_at_rest, verifying


def flip_last_bit(pid: int, pattern: bytes) -> None:
    """In the memory of a rank: of the first value of what begins so."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    ranges = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in maps.splitlines()
        if re.search(r"^\S+ rw-s .*memfd:", line)
    ]
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for start, end in ranges:
            if (place := os.pread(memory.fileno(), end - start, start).find(pattern)) >= 0:
                os.pwrite(memory.fileno(), bytes([pattern[0] ^ 1]), start + place)
                return
    raise AssertionError("the embedding is not in the rank's memory")


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_changed_bit_is_found(tmp_path: Path, is_restored: bool) -> None:
    with verifying(tmp_path, ranks="1", store="none") as sidecar, sidecar.connect() as client:
        with client.encode([image(1)])[0] as lease:
            bits = lease.numpy().view(np.uint8).reshape(-1)[:64].tobytes()
        (rank,) = sidecar.stats()["ranks"]["pids"]
        flip_last_bit(rank, bits)
        if is_restored:
            flip_last_bit(rank, bytes([bits[0] ^ 1]) + bits[1:])
        client.encode([image(1)])[0].release()
        eventually(lambda: counts(sidecar)["sampled"] == 1 and is_at_rest(sidecar), "the hit was checked")
        found = {name: counts(sidecar)[name] for name in ("matched", "mismatched", "dropped")}
        assert found == {"matched": int(is_restored), "mismatched": int(not is_restored), "dropped": 0}
        if not is_restored:
            assert "its bytes have changed since it was encoded" in sidecar.log()
