"""What is noted of a request that is settled: how long it took, and how it ended."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmcache.server.requests import Request

log = logging.getLogger(__name__)


def settled(request: Request) -> None:
    """Note a request, once: what an earlier call takes back of it and is settled anew is not timed again."""
    seconds, request.began_s = time.monotonic() - request.began_s, 0.0
    outcome = outcome_of(request)
    request.connection.coordinator.stats.request_seconds[outcome].observe(seconds)
    if log.isEnabledFor(logging.DEBUG):
        log.debug(
            "request %d of %s (pid %d): %d items, %d failed, %s in %.3f ms",
            request.request_id, request.holder.name, request.holder.pid, len(request.keys), request.num_failed,
            outcome, seconds * 1e3,
            extra={
                "fields": {
                    "request": request.request_id, "client": request.holder.name, "pid": request.holder.pid,
                    "items": len(request.keys), "failed": request.num_failed, "outcome": outcome, "seconds": seconds,
                }
            },
        )  # fmt: skip


def outcome_of(request: Request) -> str:
    """One of `OUTCOMES`."""
    if request.num_failed:
        return "failed"
    if request.is_cancelled:
        return "cancelled"
    return "miss" if request.has_waited else "hit"
