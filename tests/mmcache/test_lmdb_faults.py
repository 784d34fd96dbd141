"""The file store when its writer is killed, its map or disk is full, records are damaged, or others write it too."""

from __future__ import annotations

import os
import random
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mmcache.keys import checksum
from mmcache.tiers.base import TierError
from mmcache.tiers.lmdb import MAX_ATTEMPTS, LmdbFile, LmdbTier
from tests.mmcache.lmdb_store import MAP_BYTES, open_store
from tests.mmcache.tier_contract import make_entry, read_back

NUM_KILLS = 200 if os.environ.get("MMCACHE_SOAK") else 20

_CHILD = """
import sys, types
from pathlib import Path
from typing import Any
sys.modules["mmcache"] = package = types.ModuleType("mmcache")  # without the client, to start fast
package.__path__ = ["mmcache"]
import asyncio
from mmcache.tiers.lmdb import LmdbTier
from tests.mmcache.entries import make_entry

async def main(folder, map_bytes, tokens):
    first, last = map(int, sys.stdin.readline().split())
    tier = await LmdbTier.open(Path(folder) / "store.lmdb", int(map_bytes))
    for number in range(first, last):
        print(number, flush=True)
        await tier.put(*make_entry(number, int(tokens)))
    assert await tier.close(30.0)

asyncio.run(main(*sys.argv[1:]))
"""


class Writer:
    """A process that writes entries once it is told which."""

    def __init__(self, folder: Path, tokens: int) -> None:
        command = [sys.executable, "-c", _CHILD, str(folder), str(MAP_BYTES), str(tokens)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=Path(__file__).parents[2])

    def begin(self, first: int, last: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{first} {last}\n".encode())
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_a_writer_killed_at_any_point_leaves_whole_entries(tmp_path: Path) -> None:
    delays = random.Random(7)
    first, num_found = 0, 0
    with ExitStack() as at_end:
        following = Writer(tmp_path, tokens=4000)
        at_end.callback(following.end)
        for _ in range(NUM_KILLS):
            writer, following = following, Writer(tmp_path, tokens=4000)  # it starts while this one writes
            at_end.callback(following.end)
            writer.begin(first, first + 10_000)
            told = writer.process.stdout
            assert told is not None
            for _ in range(delays.randrange(1, 12)):
                last = int(told.readline())
            signal.sigtimedwait([], delays.random() * 0.005)
            writer.process.kill()
            last = max([last, *map(int, told.read().split())])
            with open_store(tmp_path) as (tier, runner):
                keys = [make_entry(number, 1)[0].key for number in range(first, last + 1)]
                for entry in filter(None, runner.run(tier.find(keys))):
                    payload = make_entry(int.from_bytes(entry.key, "big"), 4000)[1]
                    assert runner.run(read_back(tier, entry)) == payload
                    num_found += 1
                assert tier.counters["damaged"] == 0
                assert tier.counters["damaged_files"] == 0
            first = last + 1
    assert num_found > NUM_KILLS


def test_a_second_process_shares_the_file(tmp_path: Path) -> None:
    """The other one even makes the map larger than this one knew, and fills it."""
    mine, payload = make_entry(1_000_000)
    with open_store(tmp_path, 1 << 20) as (tier, runner):
        runner.run(tier.put(mine, payload))
        writer = Writer(tmp_path, tokens=2000)
        writer.begin(0, 20)
        writer.process.communicate(timeout=60)
        assert writer.process.returncode == 0
        theirs = [make_entry(number, tokens=2000) for number in range(20)]
        assert runner.run(tier.find([entry.key for entry, _ in theirs])) == [entry for entry, _ in theirs]
        assert [runner.run(read_back(tier, entry)) for entry, _ in theirs] == [payload for _, payload in theirs]
        assert runner.run(read_back(tier, mine)) == payload


def test_several_writers_keep_the_budget_together(tmp_path: Path) -> None:
    """Each evicts what any has written, and each reads what the other left."""
    writers = [Writer(tmp_path, tokens=3000) for _ in range(2)]
    for number, writer in enumerate(writers):
        writer.begin(1000 * number, 1000 * number + 100)
    with open_store(tmp_path) as (tier, runner):
        for number in range(2000, 2050):
            runner.run(tier.put(*make_entry(number, tokens=3000)))
        for writer in writers:
            writer.process.communicate(timeout=120)
            assert writer.process.returncode == 0
        runner.run(tier.put(*make_entry(3000, tokens=3000)))
        assert tier.counters["bytes_used"] <= 0.7 * MAP_BYTES
        numbers = [*range(100), *range(1000, 1100), *range(2000, 2050), 3000]
        entries = [make_entry(number, tokens=3000) for number in numbers]
        found = runner.run(tier.find([entry.key for entry, _ in entries]))
        assert sum(entry is not None for entry in found) == tier.counters["entries"] > 10
        for entry, (_, payload) in zip(found, entries, strict=True):
            assert entry is None or runner.run(read_back(tier, entry)) == payload
        assert tier.counters["damaged"] == 0


def test_a_full_disk_fails_the_put_and_nothing_else(tmp_path: Path) -> None:
    (old, old_payload), (new, new_payload) = make_entry(1), make_entry(2, tokens=60_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_store(tmp_path) as (tier, runner):
        runner.run(tier.put(old, old_payload))
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "store.lmdb").stat().st_size + 65_536, hard))
        try:
            with pytest.raises(TierError, match="the file store failed"):
                runner.run(tier.put(new, new_payload))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert runner.run(tier.find([old.key, new.key])) == [old, None]
        assert runner.run(read_back(tier, old)) == old_payload
        runner.run(tier.put(new, new_payload))
        assert runner.run(read_back(tier, new)) == new_payload


def test_a_map_without_free_pages_fails_the_put_within_bounds(tmp_path: Path) -> None:
    """A reader that stays keeps every page that it may see: evictions give nothing back until it ends."""
    entries = [make_entry(number, tokens=10_000) for number in range(60)]
    with open_store(tmp_path) as (tier, runner):
        for entry, payload in entries[:15]:
            runner.run(tier.put(entry, payload))
        with _env(tier).begin():
            reasons: list[str] = []
            for entry, payload in entries[15:]:
                before = tier.counters["evicted"]
                try:
                    runner.run(tier.put(entry, payload))
                except TierError as error:
                    reasons.append(str(error))
                assert tier.counters["evicted"] - before <= MAX_ATTEMPTS * 64
            assert reasons
            assert all("no room" in reason or "store is full" in reason for reason in reasons)
            assert all(tier.counters[what] == 0 for what in ("damaged", "damaged_files"))
        runner.run(tier.put(*entries[-1]))
        assert runner.run(read_back(tier, entries[-1][0])) == entries[-1][1]


def test_no_reader_stays_and_evictions_are_transactions_of_their_own(tmp_path: Path) -> None:
    with open_store(tmp_path) as (tier, runner):
        env = _env(tier)
        number = 0
        while not tier.counters["evicted"]:
            before = env.info()["last_txnid"]
            entry, payload = make_entry(number, tokens=20_000)
            runner.run(tier.put(entry, payload))
            assert runner.run(read_back(tier, entry)) == payload
            assert _readers(tier) == []
            number += 1
        assert env.info()["last_txnid"] - before == 2, "the eviction, then the entry"
        runner.run(tier.find([bytes(32)]))
        assert _readers(tier) == []


def _file(tier: LmdbTier) -> LmdbFile:
    assert isinstance(tier._file, LmdbFile)
    return tier._file


def _env(tier: LmdbTier) -> Any:
    return _file(tier)._env


def _readers(tier: LmdbTier) -> list[str]:
    """Read transactions that are open, one line each."""
    lines = _env(tier).readers().splitlines()[1:]
    return [line for line in lines if not line.split()[-1].startswith("-")]


def _resealed(record: bytes, offset: int, field: bytes) -> bytes:
    changed = record[:offset] + field + record[offset + len(field) : -8]
    return changed + struct.pack("<Q", checksum(changed))


DAMAGES: dict[str, tuple[bytes, Callable[[bytes], bytes | None]]] = {
    "a header cut short": (b"headers", lambda record: record[:-1]),
    "a header of nothing": (b"headers", lambda _: b""),
    "a longer header": (b"headers", lambda record: record + b"\0"),
    "a foreign version": (b"headers", lambda record: _resealed(record, 8, struct.pack("<H", 99))),
    "another's header": (b"headers", lambda record: _resealed(record, 12, b"k" * 32)),
    "a flipped bit of a header": (b"headers", lambda record: record[:60] + bytes([record[60] ^ 1]) + record[61:]),
    "a chunk cut short": (b"chunks", lambda chunk: chunk[: len(chunk) // 2]),
    "a longer chunk": (b"chunks", lambda chunk: chunk + b"\0"),
    "a missing chunk": (b"chunks", lambda _: None),
    "a chunk of zeros": (b"chunks", lambda chunk: bytes(len(chunk))),
    "a flipped bit of a chunk": (b"chunks", lambda chunk: bytes([chunk[0] ^ 128]) + chunk[1:]),
}


@pytest.mark.parametrize("name", list(DAMAGES))
def test_every_damage_is_one_counted_miss_and_the_entry_is_removed(tmp_path: Path, name: str) -> None:
    database, damage = DAMAGES[name]
    entry, payload = make_entry(1, tokens=20_000)
    other, other_payload = make_entry(2, tokens=20_000)
    with open_store(tmp_path) as (tier, runner):
        runner.run(tier.put(entry, payload))
        runner.run(tier.put(other, other_payload))
        env = _env(tier)
        with env.begin(write=True) as txn, txn.cursor(db=env.open_db(database, txn=txn)) as cursor:
            assert cursor.set_range(entry.key)
            changed = damage(cursor.value())
            if changed is None:
                cursor.delete()
            else:
                cursor.put(cursor.key(), changed)
        found = runner.run(tier.find([entry.key, other.key]))
        assert found == [None if database == b"headers" else entry, other]
        if found[0] is not None:
            assert runner.run(read_back(tier, entry)) is None
        assert tier.counters["damaged"] == 1
        runner.run(tier.remove([]))  # comes after the removal
        assert tier.counters["entries"] == 1
        assert runner.run(tier.find([entry.key])) == [None]
        assert runner.run(read_back(tier, other)) == other_payload
    with open_store(tmp_path) as (tier, runner):
        assert tier.counters["entries"] == 1
        with _env(tier).begin() as txn:
            num_chunks = txn.stat(_file(tier)._layout.chunks)["entries"]
        assert num_chunks == 3, "no chunk of it is left"
