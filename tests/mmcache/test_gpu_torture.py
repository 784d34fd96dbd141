"""Many processes read device memory that others churn, in stream order; some are killed, and so is the rank."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from subprocess import Popen

import pytest

from tests.mmcache.gpu_clients import sidecar_on_cuda, start_client
from tests.mmcache.support import eventually

pytestmark = pytest.mark.gpu

IS_SOAK = bool(os.environ.get("MMCACHE_SOAK"))
NUM_LEASES = 1_000_000 if IS_SOAK else 100_000
NUM_CONSUMERS = 4
KILL_EVERY_S = 4.0
LONGEST_S = 3600 if IS_SOAK else 240

CONSUMER = """
import random
NUM_KEYS, DIM = 200, client.dim
rng = random.Random(int(sys.argv[2]))
keys = [mmcache.ContentKey(number.to_bytes(16, "big")) for number in range(NUM_KEYS)]
counts = [random.Random(number).choice((4, 8, 16, 64, 256)) for number in range(NUM_KEYS)]
streams = [torch.cuda.Stream() for _ in range(3)]
wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
rows = torch.arange(256, dtype=torch.float32, device="cuda")[:, None].expand(256, DIM)

def embedding(number):
    return (np.arange(counts[number], dtype=np.float32)[:, None] + 1000 * number).repeat(DIM, axis=1)

done = 0
while True:
    numbers = rng.choices(range(NUM_KEYS), weights=[1 / (rank + 3) for rank in range(NUM_KEYS)], k=16)
    results = client.encode([None] * 16, keys=[keys[number] for number in numbers], errors="return")
    for number, lease in zip(numbers, results):
        if not isinstance(lease, mmcache.Lease):
            assert isinstance(lease, mmcache.NotCached), lease
            try:
                client.put(keys[number], embedding(number), (1, 2, 2 * counts[number]))
            except (mmcache.EncodeFailed, mmcache.PoolExhausted):  # the rank died twice meanwhile
                pass
            continue
        index = rng.randrange(3)
        stream = streams[index]
        with torch.cuda.stream(stream):
            if rng.random() < 0.05:
                torch.cuda._sleep(2_000_000)  # a long read: a millisecond
            differing = lease.tensor != rows[: counts[number]] + 1000 * number
            wrong[index] += differing.sum()
            if rng.random() < 0.1:
                with torch.cuda.stream(streams[(index + 1) % 3]):
                    again = (lease.tensor != rows[: counts[number]] + 1000 * number).sum()
                    wrong[(index + 1) % 3] += again
                lease.release([stream, streams[(index + 1) % 3]])
            elif rng.random() < 0.1:
                held = lease.hold(stream)
                lease.release()
                del held
            else:
                lease.release()
        done += 1
    if done >= 2000:
        total = sum(int(count) for count in wrong)  # the only wait for the device
        assert total == 0, f"{total} values are not what was put"
        print(done, flush=True)
        done = 0
"""


def num_leases(out: Path) -> int:
    return sum(int(line) for line in out.read_text().splitlines() if line.isdigit())


def test_every_lease_is_what_was_put_while_consumers_and_the_rank_die(tmp_path: Path) -> None:
    draw = random.Random(11)
    logs: list[Path] = []

    def consumer() -> Popen[str]:
        logs.append(tmp_path / f"consumer{len(logs)}")
        return start_client(sidecar, CONSUMER, logs[-1], str(len(logs)))

    with sidecar_on_cuda(tmp_path / "sidecar", pool_bytes="8MiB") as sidecar, sidecar.connect() as client:
        consumers = {number: consumer() for number in range(NUM_CONSUMERS)}
        log_of = {number: logs[number] for number in range(NUM_CONSUMERS)}
        started, num_killed, num_ranks_killed = time.monotonic(), 0, 0
        while sum(num_leases(log.with_suffix(".out")) for log in logs) < NUM_LEASES or num_ranks_killed < 2:
            assert time.monotonic() - started < LONGEST_S, "too slow, or nothing goes on any more"
            time.sleep(KILL_EVERY_S)
            for number, process in consumers.items():
                assert process.poll() is None, log_of[number].with_suffix(".err").read_text()
            victim = draw.randrange(NUM_CONSUMERS)
            consumers[victim].kill()
            consumers[victim].wait()
            consumers[victim], log_of[victim] = consumer(), logs[-1]
            num_killed += 1
            if num_killed % 3 == 1:
                (pid,) = client.stats()["ranks"]["pids"] or (0,)
                if pid:
                    os.kill(pid, signal.SIGKILL)
                    num_ranks_killed += 1
        seconds = time.monotonic() - started
        for process in consumers.values():
            process.kill()
            process.wait()
        eventually(lambda: client.stats()["leases"]["active"] == 0, "the leases of the dead have ended")
        eventually(lambda: client.stats()["ranks"]["ready"] == 1, "the rank is back", 60)
        assert client.leases(check=True)["problems"] == []
        stats = client.stats()
        assert stats["pool"]["evictions"] > 1000, "the pool was churned"
        assert (stats["pool"]["bytes_leased"], stats["leases"]["quarantined"]) == (0, 0)
        assert stats["ranks"]["restarts"] == num_ranks_killed
        total = sum(num_leases(log.with_suffix(".out")) for log in logs)
        print(f"{total} leases in {seconds:.0f} s, {num_killed} consumers and {num_ranks_killed} ranks killed")
