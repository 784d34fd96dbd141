"""The file store: the contract, a full map, crashes, other processes, a full disk."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from mmcache.errors import ConfigError
from mmcache.tiers.base import Tier, TierError
from mmcache.tiers.lmdb import LmdbTier
from tests.mmcache.tier_contract import CHUNK_BYTES, LONG_S, TierContract, make_entry, read_back

MAP_BYTES = 16 << 20
NUM_KILLS = 200 if os.environ.get("MMCACHE_SOAK") else 6


def _flip(tier: Tier, database: bytes, key: bytes, change: Callable[[bytes], bytes | None]) -> None:
    assert isinstance(tier, LmdbTier)
    env = tier._file._env
    with env.begin(write=True) as txn, txn.cursor(db=env.open_db(database, txn=txn)) as cursor:
        assert cursor.set_range(key)
        assert cursor.key()[:32] == key
        changed = change(cursor.value())
        if changed is None:
            cursor.delete()
        else:
            cursor.put(cursor.key(), changed)


def _one_bit(value: bytes) -> bytes:
    place = random.Random(len(value)).randrange(len(value))
    return value[:place] + bytes([value[place] ^ 4]) + value[place + 1 :]


class TestLmdbTier(TierContract):
    async def make(self, folder: Path) -> Tier:
        return await LmdbTier.open(folder / "store.lmdb", MAP_BYTES, chunk_bytes=CHUNK_BYTES)

    async def damage_header(self, tier: Tier, key: bytes) -> None:
        _flip(tier, b"headers", key, _one_bit)

    async def damage_payload(self, tier: Tier, key: bytes) -> None:
        _flip(tier, b"chunks", key, _one_bit)

    async def lose_chunk(self, tier: Tier, key: bytes) -> None:
        _flip(tier, b"chunks", key, lambda _: None)

    def test_a_short_chunk_is_a_counted_miss(self, tmp_path: Path) -> None:
        async def shorten(tier: Tier, key: bytes) -> None:
            _flip(tier, b"chunks", key, lambda value: value[:-1])

        self._run_damaged_read(tmp_path, shorten)

    def test_a_cancelled_read_writes_nothing_once_its_thread_goes_on(self, tmp_path: Path) -> None:
        async def test(tier: Tier) -> None:
            assert isinstance(tier, LmdbTier)
            entry, payload = make_entry(1)
            await tier.put(entry, payload)
            into = bytearray(entry.nbytes)
            with tier._file._gate.exclusive():  # holds the thread before its transaction
                task = asyncio.ensure_future(tier.read(entry, memoryview(into)))
                await asyncio.sleep(0.01)
                task.cancel()
                await asyncio.wait([task])
            assert await tier.close(LONG_S)  # waits for the thread
            assert task.cancelled()
            assert not any(into)

        self.run(tmp_path, test)


@contextmanager
def _store(folder: Path, map_bytes: int = MAP_BYTES) -> Iterator[tuple[LmdbTier, asyncio.Runner]]:
    with asyncio.Runner() as runner:
        tier = runner.run(LmdbTier.open(folder / "store.lmdb", map_bytes))
        try:
            yield tier, runner
        finally:
            runner.run(tier.close(LONG_S))


def test_entries_outlive_the_tier_in_a_private_file(tmp_path: Path) -> None:
    entry, payload = make_entry(1)
    with _store(tmp_path) as (tier, runner):
        runner.run(tier.put(entry, payload))
    with _store(tmp_path) as (tier, runner):
        assert tier.counters["entries"] == 1
        assert runner.run(tier.find([entry.key])) == [entry]
        assert runner.run(read_back(tier, entry)) == payload
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "store.lmdb": 0o600,
        "store.lmdb-lock": 0o600,
    }


def test_the_oldest_make_room_within_the_budget(tmp_path: Path) -> None:
    async def fill(tier: LmdbTier) -> None:
        sizes = random.Random(3)
        entries = [make_entry(number, tokens=sizes.randrange(100, 40_000)) for number in range(60)]
        for entry, payload in entries:
            await tier.put(entry, payload)
            assert await read_back(tier, entry) == payload
            assert tier.counters["bytes_used"] <= 0.7 * MAP_BYTES
        found = await tier.find([entry.key for entry, _ in entries])
        first = next(place for place, entry in enumerate(found) if entry is not None)
        assert None not in found[first:]
        assert tier.counters["entries"] == len(entries) - first
        assert tier.counters["evicted"] == first > 0

    with _store(tmp_path) as (tier, runner):
        runner.run(fill(tier))
    assert (tmp_path / "store.lmdb").stat().st_size <= MAP_BYTES


def test_an_entry_beyond_the_budget_evicts_nothing(tmp_path: Path) -> None:
    entry, payload = make_entry(1)
    large, large_payload = make_entry(2, tokens=200_000)
    with _store(tmp_path) as (tier, runner):
        runner.run(tier.put(entry, payload))
        with pytest.raises(TierError, match="beyond the store's budget"):
            runner.run(tier.put(large, large_payload))
        assert runner.run(tier.find([entry.key, large.key])) == [entry, None]


def test_a_smaller_budget_is_reached_by_eviction(tmp_path: Path) -> None:
    entries = [make_entry(number, tokens=1000) for number in range(300)]
    with _store(tmp_path, 4 * MAP_BYTES) as (tier, runner):
        for entry, payload in entries[:-1]:
            runner.run(tier.put(entry, payload))
        assert tier.counters["bytes_used"] > 0.7 * MAP_BYTES
    with _store(tmp_path) as (tier, runner):
        runner.run(tier.put(*entries[-1]))
        assert tier.counters["bytes_used"] <= 0.7 * MAP_BYTES
        assert runner.run(read_back(tier, entries[-1][0])) == entries[-1][1]


def test_reads_go_on_while_entries_are_evicted(tmp_path: Path) -> None:
    """A reader sees an entry whole or not at all, while the writer turns the whole store over."""

    async def turn_over(tier: LmdbTier) -> None:
        entries = [make_entry(number, tokens=20_000) for number in range(40)]

        async def write() -> None:
            for entry, payload in entries:
                await tier.put(entry, payload)

        async def read(start: int) -> int:
            num_read = 0
            for entry, payload in entries[start:] + entries[:start]:
                got = await read_back(tier, entry)
                assert got is None or got == payload
                num_read += got is not None
            return num_read

        writing = asyncio.ensure_future(write())
        num_read = 0
        while not writing.done():
            num_read += sum(await asyncio.gather(*(read(start) for start in (0, 13, 27))))
        await writing
        assert num_read > 0
        assert tier.counters["damaged"] == 0

    with _store(tmp_path) as (tier, runner):
        runner.run(turn_over(tier))


_CHILD = """
import asyncio, sys
from pathlib import Path
from mmcache.tiers.lmdb import LmdbTier
from tests.mmcache.tier_contract import make_entry, read_back

async def main(folder, map_bytes, first, last, tokens):
    tier = await LmdbTier.open(Path(folder) / "store.lmdb", int(map_bytes))
    for number in range(int(first), int(last)):
        print(number, flush=True)
        await tier.put(*make_entry(number, int(tokens)))
    assert await tier.close(30.0)

asyncio.run(main(*sys.argv[1:]))
"""


def _child(folder: Path, map_bytes: int, first: int, last: int, tokens: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _CHILD, str(folder), *map(str, (map_bytes, first, last, tokens))]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def test_a_writer_killed_at_any_point_leaves_whole_entries(tmp_path: Path) -> None:
    delays = random.Random(7)
    first, num_found = 0, 0
    for _ in range(NUM_KILLS):
        with _child(tmp_path, MAP_BYTES, first, first + 10_000, tokens=8000) as child:
            assert child.stdout is not None
            for _ in range(delays.randrange(1, 30)):
                last = int(child.stdout.readline())
            signal.sigtimedwait([], delays.random() * 0.005)
            child.kill()
            last = max([last, *map(int, child.stdout.read().split())])
        with _store(tmp_path) as (tier, runner):
            keys = [make_entry(number, 1)[0].key for number in range(first, last + 1)]
            for entry in filter(None, runner.run(tier.find(keys))):
                assert runner.run(read_back(tier, entry)) == make_entry(int.from_bytes(entry.key, "big"), 8000)[1]
                num_found += 1
            assert tier.counters["damaged"] == 0
        first = last + 1
    assert num_found > 0


def test_a_second_process_shares_the_file(tmp_path: Path) -> None:
    """The other one even makes the map larger than this one knew, and fills it."""
    mine, payload = make_entry(1_000_000)
    with _store(tmp_path, 1 << 20) as (tier, runner):
        runner.run(tier.put(mine, payload))
        with _child(tmp_path, MAP_BYTES, 0, 20, tokens=2000) as child:
            assert child.wait(60) == 0
        theirs = [make_entry(number, tokens=2000) for number in range(20)]
        assert runner.run(tier.find([entry.key for entry, _ in theirs])) == [entry for entry, _ in theirs]
        assert [runner.run(read_back(tier, entry)) for entry, _ in theirs] == [payload for _, payload in theirs]
        assert runner.run(read_back(tier, mine)) == payload


def test_a_full_disk_fails_the_put_and_nothing_else(tmp_path: Path) -> None:
    (old, old_payload), (new, new_payload) = make_entry(1), make_entry(2, tokens=60_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with _store(tmp_path) as (tier, runner):
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


def test_a_closed_store_fails_cleanly(tmp_path: Path) -> None:
    with _store(tmp_path) as (tier, runner):
        runner.run(tier.close(LONG_S))
        with pytest.raises(TierError, match="closed"):
            runner.run(tier.find([bytes(32)]))


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a file that LMDB can open"):
        asyncio.run(LmdbTier.open(tmp_path / "absent" / "store.lmdb", MAP_BYTES))
    (tmp_path / "text").write_bytes(b"not a store " * 1000)
    with pytest.raises(ConfigError, match="must be a file that LMDB can open"):
        asyncio.run(LmdbTier.open(tmp_path / "text", MAP_BYTES))
    for name, record, message in (
        ("foreign", (b"theirs", b"1"), "it holds something else"),
        ("later", (b"mmcache", b"2"), "layout version b'2'"),
    ):
        env = lmdb.Environment(str(tmp_path / name), subdir=False)
        with env.begin(write=True) as txn:
            txn.put(*record)
        env.close()
        with pytest.raises(ConfigError, match=message):
            asyncio.run(LmdbTier.open(tmp_path / name, MAP_BYTES))
        assert not (tmp_path / f"{name}.damaged").exists()


def _fill(folder: Path, num_entries: int = 60) -> None:
    async def fill(tier: LmdbTier) -> None:
        for number in range(num_entries):
            await tier.put(*make_entry(number))

    with _store(folder) as (tier, runner):
        runner.run(fill(tier))


_USE = """
import asyncio, os, sys
from pathlib import Path
from mmcache.tiers.base import TierError
from mmcache.tiers.lmdb import LmdbTier
from tests.mmcache.tier_contract import make_entry, read_back

async def main(path, live_bytes):
    tier = await LmdbTier.open(path, 16 << 20)
    entries = [make_entry(number) for number in range(60)]
    found = await tier.find([entry.key for entry, _ in entries])
    if live_bytes:
        os.truncate(path, int(live_bytes))
    outcomes = set()
    for entry, payload in entries:
        try:
            got = await read_back(tier, entry)
            assert got is None or got == payload
            await tier.put(*make_entry(1000))
            outcomes.add("served")
        except TierError as error:
            assert "damaged" in str(error) or "out of use" in str(error), error
            outcomes.add("failed")
    assert await tier.close(30.0)
    print(len(found) - found.count(None), tier.counters["damaged_files"], *sorted(outcomes))

asyncio.run(main(Path(sys.argv[1]), *(sys.argv[2:] or [None])))
"""


def _use_in_a_process(path: Path, live_bytes: int | None = None) -> tuple[int, int, list[str]]:
    """Entries found, damaged files and outcomes of a process that reads and writes, and whose death is an error."""
    command = [sys.executable, "-c", _USE, str(path)] + ([] if live_bytes is None else [str(live_bytes)])
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    num_found, num_damaged, *outcomes = ran.stdout.split()
    return int(num_found), int(num_damaged), outcomes


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.01, 0.5, 0.9])
def test_a_file_truncated_while_stopped_is_set_aside(tmp_path: Path, share: float) -> None:
    _fill(tmp_path)
    path = tmp_path / "store.lmdb"
    size = path.stat().st_size
    (tmp_path / "store.lmdb.damaged").write_bytes(b"an earlier one")
    os.truncate(path, int(size * share))
    assert _use_in_a_process(path) == (0, 1, ["served"])
    assert (tmp_path / "store.lmdb.damaged").stat().st_size == int(size * share)
    assert _use_in_a_process(path) == (0, 0, ["served"])


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.5, 0.95])
def test_a_file_truncated_under_a_process_fails_until_the_next_start(tmp_path: Path, share: float) -> None:
    _fill(tmp_path)
    path = tmp_path / "store.lmdb"
    assert _use_in_a_process(path, int(path.stat().st_size * share)) == (60, 1, ["failed"])
    assert _use_in_a_process(path) == (0, 0, ["served"])


def test_a_replaced_file_fails_until_the_next_start_and_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "store.lmdb"
    (mine, payload), (other, other_payload) = make_entry(1), make_entry(2)
    (tmp_path / "other").mkdir()
    with _store(tmp_path / "other") as (tier, runner):
        runner.run(tier.put(other, other_payload))
    with _store(tmp_path) as (tier, runner):
        runner.run(tier.put(mine, payload))
        (tmp_path / "other" / "store.lmdb").replace(path)
        for _ in range(2):
            with pytest.raises(TierError, match="another file is in its place"):
                runner.run(tier.find([mine.key]))
    assert not (tmp_path / "store.lmdb.damaged").exists()
    with _store(tmp_path) as (tier, runner):
        assert runner.run(tier.find([mine.key, other.key])) == [None, other]


@pytest.mark.parametrize("first_page", [0, 1, 2, 5, 20])
def test_garbage_pages_are_set_aside(tmp_path: Path, first_page: int, caplog: pytest.LogCaptureFixture) -> None:
    _fill(tmp_path)
    path = tmp_path / "store.lmdb"
    with path.open("r+b") as file:
        file.seek(first_page * 4096)
        file.write(random.Random(first_page).randbytes(400 * 4096))
    damaged = path.read_bytes()
    with _store(tmp_path) as (tier, runner):
        assert (tier.counters["damaged_files"], tier.counters["entries"]) == (1, 0)
        runner.run(tier.put(*make_entry(1)))
        assert runner.run(read_back(tier, make_entry(1)[0])) == make_entry(1)[1]
    assert path.with_name("store.lmdb.damaged").read_bytes() == damaged
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_store_without_its_mark_is_damaged(tmp_path: Path) -> None:
    _fill(tmp_path, 1)
    with lmdb.Environment(str(tmp_path / "store.lmdb"), subdir=False) as env, env.begin(write=True) as txn:
        assert txn.delete(b"mmcache")
    with _store(tmp_path) as (tier, _):
        assert (tier.counters["damaged_files"], tier.counters["entries"]) == (1, 0)


def test_flipped_bits_never_kill(tmp_path: Path) -> None:
    """Wherever they are: in what LMDB trusts, in entries, or in free pages."""
    _fill(tmp_path)
    path = tmp_path / "store.lmdb"
    whole = path.read_bytes()
    flips = random.Random(11)
    for _ in range(NUM_KILLS):
        altered = bytearray(whole)
        for _ in range(20):
            altered[flips.randrange(len(whole) if flips.random() < 0.5 else 8 * 4096)] ^= 1 << flips.randrange(8)
        path.write_bytes(altered)
        _, _, outcomes = _use_in_a_process(path)
        assert outcomes in (["served"], ["failed"], ["failed", "served"])


def test_a_whole_file_is_never_taken_for_damaged(tmp_path: Path) -> None:
    """Puts of all sizes, replacements, removals and evictions, with the file opened anew between them."""
    changes = random.Random(5)
    for _ in range(8):
        with _store(tmp_path) as (tier, runner):
            assert tier.counters["damaged_files"] == 0
            for _ in range(40):
                entry, payload = make_entry(changes.randrange(60), changes.choice([1, 40, 300, 9000, 20_000]))
                runner.run(tier.put(entry, payload))
                runner.run(tier.remove([changes.randrange(60).to_bytes(32, "big")] * (changes.random() < 0.4)))
    assert not (tmp_path / "store.lmdb.damaged").exists()


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
            key=entry.key, shape=entry.shape, dtype=entry.dtype, grid_thw=entry.grid_thw, encode_seconds=0.1,
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
    _fill(tmp_path, 1)
    with _writer_lock_held(tmp_path / "store.lmdb"), _python(_WAIT, "open_late", tmp_path / "store.lmdb") as waiting:
        assert waiting.communicate(timeout=60)[0] == "late\n"
        assert waiting.returncode == 0
    with _store(tmp_path) as (tier, _):  # the lock outlives nobody
        assert tier.counters["entries"] == 1


def test_closing_behind_a_held_writer_lock_is_bounded_and_lets_the_process_end(tmp_path: Path) -> None:
    path = tmp_path / "store.lmdb"
    _fill(tmp_path, 1)
    with _python(_WAIT, "close_late", path) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "open\n"
        with _writer_lock_held(path):
            assert waiting.communicate("go\n", timeout=60)[0] == "False False [1, 2] 2 0\n"
            assert waiting.returncode == 0
