"""Many processes read what others churn, and some are killed in the middle: every byte is what was put there."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.mmcache.support import SidecarProcess, clean_environ, eventually

IS_SOAK = bool(os.environ.get("MMCACHE_SOAK"))
NUM_LEASES = 3_000_000 if IS_SOAK else 100_000
NUM_WORKERS = 4
KILL_EVERY_S = 3.0
SHORTEST_S, LONGEST_S = (1200, 3600) if IS_SOAK else (60, 400)

WORKER = """
import random, sys
import numpy as np
import mmcache

NUM_KEYS, DIM = 300, 256
rng = random.Random(int(sys.argv[2]))
keys = [mmcache.ContentKey(number.to_bytes(16, "big")) for number in range(NUM_KEYS)]
counts = [random.Random(number).choice((1, 2, 4, 8, 16, 48)) for number in range(NUM_KEYS)]

def embedding(number):
    rows = np.arange(counts[number], dtype=np.float32)[:, None] + 1000 * number
    return np.broadcast_to(rows, (counts[number], DIM))

def check(number, lease):
    assert lease.num_tokens == counts[number], (number, lease)
    assert np.array_equal(lease.numpy(), embedding(number)), f"{number}: not the bytes that were put"

kept, refs, done = [], [], 0
with mmcache.connect(sys.argv[1]) as client, mmcache.connect(sys.argv[1]) as other:
    while True:
        numbers = rng.choices(range(NUM_KEYS), weights=[1 / (rank + 3) for rank in range(NUM_KEYS)], k=16)
        consumers = rng.random() < 0.1
        handle = client.submit([None] * 16, keys=[keys[number] for number in numbers], errors="return",
                               consumers=int(consumers))
        for number, lease in zip(numbers, handle.result()):
            if isinstance(lease, mmcache.NotCached):
                client.put(keys[number], np.ascontiguousarray(embedding(number)), (1, 2, 2 * counts[number]))
                continue
            assert isinstance(lease, mmcache.Lease), lease
            check(number, lease)
            done += 1
            if consumers:
                refs.append((number, lease.ref))
            if rng.random() < 0.2:
                kept.append((number, lease))
            else:
                lease.release()
        while len(kept) > 24 or (kept and rng.random() < 0.3):
            number, lease = kept.pop(rng.randrange(len(kept)))
            check(number, lease)
            lease.release()
        while refs:
            number, ref = refs.pop()
            if rng.random() < 0.2:
                client.cancel(ref)
                continue
            with other.open(ref) as lease:
                check(number, lease)
            done += 1
        if done >= 500:
            print(done, flush=True)
            done = 0
"""


class Worker:
    """A consumer. Its counts come in blocks; what it had not reported when it is killed is not counted."""

    def __init__(self, sidecar: SidecarProcess, seed: int, log: Path) -> None:
        self.log = log
        self._counts = log.with_suffix(".counts").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(sidecar.socket), str(seed)], stdout=self._counts, stderr=log.open("w"),
            env=clean_environ(PYTHONPATH="."),
        )  # fmt: skip

    def num_leases(self) -> int:
        return sum(int(line) for line in Path(self._counts.name).read_text().splitlines())

    def kill(self) -> int:
        """Kill it; how many leases it had checked."""
        assert self.process.poll() is None, self.log.read_text()
        self.process.kill()
        self.process.wait()
        self._counts.close()
        return self.num_leases()


def test_every_lease_of_many_is_what_was_put_while_others_churn_and_die(tmp_path: Path) -> None:
    draw = random.Random(7)
    with SidecarProcess(tmp_path, pool_bytes="2MiB", ranks="2") as sidecar, sidecar.connect() as client:
        workers = [Worker(sidecar, seed, tmp_path / f"worker{seed}") for seed in range(NUM_WORKERS)]
        num_started, num_checked, num_killed = NUM_WORKERS, 0, 0
        started = time.monotonic()
        while (
            time.monotonic() - started < SHORTEST_S
            or num_checked + sum(worker.num_leases() for worker in workers) < NUM_LEASES
        ):
            assert time.monotonic() - started < LONGEST_S, "too slow, or nothing goes on any more"
            time.sleep(KILL_EVERY_S)
            victim = draw.randrange(NUM_WORKERS)
            if draw.random() < 0.5:
                os.kill(workers[victim].process.pid, signal.SIGSTOP)  # killed while it holds what it holds
            num_checked += workers[victim].kill()
            workers[victim] = Worker(sidecar, num_started, tmp_path / f"worker{num_started}")
            num_started, num_killed = num_started + 1, num_killed + 1
            for worker in workers:
                assert worker.process.poll() is None, worker.log.read_text()
        num_checked += sum(worker.kill() for worker in workers)
        assert num_checked >= NUM_LEASES
        eventually(lambda: client.stats()["leases"]["active"] == 0, "the leases of the dead have ended")
        assert client.leases(check=True)["problems"] == []
        stats = client.stats()
        assert stats["pool"]["evictions"] > 1000, "the pool was churned"
        assert (stats["pool"]["bytes_leased"], stats["leases"]["quarantined"], stats["ranks"]["restarts"]) == (0, 0, 0)
        assert num_killed > 0
        assert not [name for name in os.listdir("/dev/shm") if "mmcache" in name]
