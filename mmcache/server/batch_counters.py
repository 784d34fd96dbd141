"""What the microbatches of all ranks were like: how full, how fast, and how long their items had waited."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mmcache.histograms import SLOW_S, Histogram
from mmcache.server.flows import CLASSES
from mmcache.server.microbatch import Microbatch

NUM_SAMPLES = 1024
"""The last microbatches, and the last items of each class."""


class BatchCounters:
    """Counts since the start; fill and waits over the last samples.

    Attributes:
        queue_seconds: by class, how long each item waited for its microbatch to begin.
        encode_seconds: of each microbatch.
    """

    def __init__(self) -> None:
        self._num_batches = self._num_items = self._num_patches = 0
        self._busy_s = 0.0
        self._fill: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._waits_s: list[deque[float]] = [deque(maxlen=NUM_SAMPLES) for _ in CLASSES]
        self._num_waited = [0] * len(CLASSES)
        self.num_retried = 0
        self.queue_seconds = {name: Histogram(SLOW_S) for name in CLASSES}
        self.encode_seconds = Histogram(SLOW_S)

    def began(self, batch: Microbatch, max_patches: int, now: float) -> None:
        """A microbatch began. Of items that never stood in the queue no wait is counted."""
        self._num_batches += 1
        self._num_items += len(batch.jobs)
        self._num_patches += batch.num_patches
        self._fill.append(min(1.0, batch.num_patches / max_patches))
        for job in batch.jobs:
            if job.queued_at_s is not None:
                self._num_waited[job.priority] += 1
                self._waits_s[job.priority].append(now - job.queued_at_s)
                self.queue_seconds[CLASSES[job.priority]].observe(now - job.queued_at_s)

    def done(self, _: Sequence[int], seconds: float) -> None:
        """A microbatch was encoded."""
        self._busy_s += seconds
        self.encode_seconds.observe(seconds)

    def counters(self) -> dict[str, object]:
        """For the statistics. `fill`: part of the budget of patches; `retried`: tries of items after a failed one."""
        waits = {
            name: {"items": self._num_waited[code]} | _quantiles_ms(self._waits_s[code])
            for code, name in enumerate(CLASSES)
        }
        return {
            "begun": self._num_batches,
            "items": self._num_items,
            "patches": self._num_patches,
            "busy_seconds": round(self._busy_s, 6),
            "fill": round(sum(self._fill) / len(self._fill), 4) if self._fill else 0.0,
            "retried": self.num_retried,
            "waits": waits,
        }


def _quantiles_ms(waits_s: Sequence[float]) -> dict[str, float]:
    ordered = sorted(waits_s) or [0.0]
    picks = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
    return {
        name: round(ordered[min(len(ordered) - 1, int(len(ordered) * part))] * 1e3, 3) for name, part in picks.items()
    }
