"""A file store whose writer lock somebody holds: neither opening nor closing it hangs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.mmcache.lmdb_store import fill, open_store

_HOLD = """
import lmdb, sys
env = lmdb.Environment(sys.argv[1], map_size=16 << 20, subdir=False, max_dbs=4)
with env.begin(write=True):
    print("held", flush=True)
    sys.stdin.read()
"""
_WAIT = """
import asyncio, sys
from pathlib import Path
from mmcache.tiers.lmdb import LmdbTier
from mmcache.tiers.tiered import TieredStore
from tests.mmcache.tier_contract import make_entry

async def open_late(path):
    try:
        async with asyncio.timeout(0.2):
            await LmdbTier.open(path, 16 << 20)
    except TimeoutError:
        print("late")

async def close_late(path):
    store = TieredStore([await LmdbTier.open(path, 16 << 20)], 30.0, 1 << 20)
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    done = []
    for number in range(3):
        entry, payload = make_entry(number)
        store.put_behind(
            key=entry.key, namespace=entry.namespace, shape=entry.shape,
            dtype=entry.dtype, grid_thw=entry.grid_thw, encode_seconds=0.1,
            payload=payload, done=lambda number=number: done.append(number),
        )
    assert await store.find([entry.key]) == [None]  # reads need no lock
    await store.drain(0.2)
    closed = await store.close(0.2)
    print(closed, await store.close(0.2), done, store.counters()["dropped"], store.counters()["written"])

asyncio.run(globals()[sys.argv[1]](Path(sys.argv[2])))
"""


def _python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextmanager
def _writer_lock_held(path: Path) -> Iterator[None]:
    with _python(_HOLD, path) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            yield
        finally:
            holder.kill()


def test_opening_behind_a_held_writer_lock_can_be_given_up(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    with _writer_lock_held(tmp_path / "store.lmdb"), _python(_WAIT, "open_late", tmp_path / "store.lmdb") as waiting:
        assert waiting.communicate(timeout=60)[0] == "late\n"
        assert waiting.returncode == 0
    with open_store(tmp_path) as (tier, _):  # the lock outlives nobody
        assert tier.counters["entries"] == 1


def test_closing_behind_a_held_writer_lock_is_bounded_and_lets_the_process_end(tmp_path: Path) -> None:
    path = tmp_path / "store.lmdb"
    fill(tmp_path, 1)
    with _python(_WAIT, "close_late", path) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "open\n"
        with _writer_lock_held(path):
            assert waiting.communicate("go\n", timeout=60)[0] == "False False [1, 2] 2 0\n"
            assert waiting.returncode == 0
