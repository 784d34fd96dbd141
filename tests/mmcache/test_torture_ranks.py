"""Eight clients ask for overlapping sets of pictures while ranks are killed and stopped: every embedding is right.

The sidecar is `deterministic`, so that right means the same bits as of an encode in this process.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mmcache
from encoder.model import Encoder
from encoder.sizing import grid_thw, num_tokens
from tests.mmcache.support import SidecarProcess, eventually, image

IS_SOAK = bool(os.environ.get("MMCACHE_SOAK"))
SHORTEST_S, LONGEST_S = (300, 1200) if IS_SOAK else (60, 240)
NUM_FAULTS = 20 if IS_SOAK else 3
NUM_CLIENTS, NUM_PICTURES, PICTURES_A_CALL = 8, 200, 12
"""Their embeddings are twice as large as both pools: there are misses all the time."""
SIDES = (28, 56, 90, 140, 196, 224)
TIMEOUT_S = 120.0


def pictures() -> list[Any]:
    draw = random.Random(5)
    return [image(seed, draw.choice(SIDES), draw.choice(SIDES)) for seed in range(NUM_PICTURES)]


def encoded_here(items: list[Any]) -> list[bytes]:
    """Each by itself, on as many threads as this process happens to have."""
    before = torch.get_num_threads()
    encoder = Encoder.load("moonvit-tiny", deterministic=True)
    found = []
    for item in items:
        grid = grid_thw(item.shape[1], item.shape[0], encoder.processor)
        out = torch.empty(num_tokens(grid, 2), encoder.config.text_width)
        assert encoder.encode([item], [out]) == [True]
        found.append(out.numpy().tobytes())
    torch.set_num_threads(before)
    return found


class Asker(threading.Thread):
    """A client that asks for one set after the other, and compares all that it gets."""

    def __init__(self, sidecar: SidecarProcess, seed: int, items: list[Any], expected: list[bytes]) -> None:
        super().__init__(name=f"asker {seed}")
        self._draw = random.Random(seed)
        self._sidecar, self._items, self._expected = sidecar, items, expected
        self.stopping = threading.Event()
        self.origins: Counter[str] = Counter()
        self.faults: list[str] = []

    def run(self) -> None:
        with self._sidecar.connect(timeout=TIMEOUT_S) as client:
            while not self.stopping.is_set() and not self.faults:
                self._ask(client, self._draw.sample(range(NUM_PICTURES), PICTURES_A_CALL))

    def _ask(self, client: mmcache.Client, numbers: list[int]) -> None:
        results = client.encode([self._items[number] for number in numbers], errors="return")
        for number, result in zip(numbers, results, strict=True):
            if not isinstance(result, mmcache.Lease):
                self.faults.append(f"{number}: {result!r}")
                continue
            if np.ascontiguousarray(result.numpy()).tobytes() != self._expected[number]:
                self.faults.append(f"{number}: not the bits of a fresh encode, from {result.origin}")
            self.origins[result.origin] += 1
            result.release()


def all_ready(client: mmcache.Client) -> bool:
    found = client.stats()["ranks"]
    return bool(found["ready"] == found["configured"])


def test_every_embedding_is_right_while_ranks_are_killed_and_stopped(tmp_path: Path) -> None:
    items, draw = pictures(), random.Random(3)
    expected = encoded_here(items)
    settings = {"ranks": "2", "deterministic": "true", "pool_bytes": "1MiB", "encode_timeout_s": "5"}
    with SidecarProcess(tmp_path, **settings) as sidecar, sidecar.connect(timeout=TIMEOUT_S) as client:
        askers = [Asker(sidecar, seed, items, expected) for seed in range(NUM_CLIENTS)]
        for asker in askers:
            asker.start()
        done: Counter[str] = Counter()
        started = time.monotonic()
        try:
            while time.monotonic() - started < SHORTEST_S or done.total() < NUM_FAULTS:
                assert time.monotonic() - started < LONGEST_S, "nothing goes on any more"
                eventually(lambda: all_ready(client), "what was lost is replaced", LONGEST_S)
                fault = "stopped" if done["killed"] > 2 * done["stopped"] else "killed"
                time.sleep(draw.uniform(0.0, 1.0))
                number = signal.SIGSTOP if fault == "stopped" else signal.SIGKILL
                before = client.stats()["ranks"]["restarts"]
                os.kill(draw.choice(client.stats()["ranks"]["pids"]), number)
                eventually(lambda n=before: client.stats()["ranks"]["restarts"] > n, "it is seen", 60)  # type: ignore[misc]
                done[fault] += 1
        finally:
            for asker in askers:
                asker.stopping.set()
            for asker in askers:
                asker.join()
        assert [fault for asker in askers for fault in asker.faults] == []
        eventually(lambda: all_ready(client), "all are replaced", LONGEST_S)
        stats = client.stats()
        assert stats["ranks"]["deaths"] == {"died": done["killed"], "hung": done["stopped"]}
        assert stats["errors"] == {}
        origins = sum((asker.origins for asker in askers), Counter[str]())
        assert origins["encoded"] > NUM_PICTURES, "they were encoded anew, again and again"
        assert origins["pool"] > NUM_PICTURES
        eventually(lambda: client.stats()["leases"]["active"] == 0, "every lease has ended")
        assert client.stats()["ingest"]["bytes_used"] == 0
        assert client.leases(check=True)["problems"] == []
        print(f"{dict(origins)} in {time.monotonic() - started:.0f} s, {dict(done)}")
