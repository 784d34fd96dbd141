"""A sidecar whose ranks sleep instead of encoding, for what is measured of everything else.

    BENCHMARK_ENCODE_MS=2 python -m benchmarks.sleeping_sidecar serve ...

Model, pool, ingest region, messages and guard's verdicts are as ever; what is in the pool is of no meaning.
"""

from __future__ import annotations

import os
import sys
import time

from benchmarks.sidecars import ENCODE_MS
from mmcache.server import rank as coordinator_side


def rank() -> None:
    """Entry point of the rank's process."""
    from mmcache.server import rank_process
    from mmcache.server.messages import Ran, Run

    seconds = float(os.environ[ENCODE_MS]) / 1e3

    class SleepingRank(rank_process.Rank):
        """Says of every microbatch that it is encoded, after that time."""

        def _encoded(self, run: Run) -> Ran:
            time.sleep(seconds)
            return Ran(batch_id=run.batch_id, seconds=seconds, finite=[True] * len(run.extents))

    rank_process.Rank = SleepingRank  # type: ignore[misc]
    rank_process.main()


def main() -> None:
    """The command line of `mmcache`."""
    from mmcache.cli import main as run

    coordinator_side.MODULE = "benchmarks.sleeping_sidecar"
    run()


if __name__ == "__main__":
    (main if sys.argv[1] == "serve" else rank)()
