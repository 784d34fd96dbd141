"""The longest that a lease may be held: beyond it, it is quarantined, or its process is killed. See the settings."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

from ipc.leases import Holder, HolderState, Share, ShareState

if TYPE_CHECKING:
    from mmcache.server.connection import Connection

log = logging.getLogger(__name__)


class LeaseLimit:
    """Looked at with every regular sweep. A lease that meets the limit still ends only by acknowledgement or death.

    Attributes:
        limit_s: 0 for no limit.
        num_over: leases that met the limit.
        num_killed: processes that were killed for it.
    """

    def __init__(self, limit_s: float, action: Literal["quarantine", "kill"]) -> None:
        self.limit_s = limit_s
        self._kills = action == "kill"
        self._killed: set[Connection] = set()
        self.num_over = 0
        self.num_killed = 0

    def enforce(self, connections: Collection[Connection]) -> None:
        """Act on every lease that is over the limit by now, once."""
        if not self.limit_s:
            return
        self._killed.intersection_update(connections)
        for connection in list(connections):
            if connection.holder is not None and (over := self._over(connection.holder)):
                if self._kills:
                    self._kill(connection, connection.holder, over)
                else:
                    self._quarantine(connection.holder, over)

    def num_quarantined(self, holder: Holder) -> int:
        """Leases of a holder that are quarantined, for this reason or another."""
        if holder.state is HolderState.QUARANTINED:
            return holder.num_active
        return sum(share.state is ShareState.QUARANTINED for share in self._over(holder))

    def _over(self, holder: Holder) -> list[Share]:
        return holder.older_than(time.monotonic() - self.limit_s) if self.limit_s else []

    def _quarantine(self, holder: Holder, over: Collection[Share]) -> None:
        held = [share for share in over if share.state is ShareState.HELD]
        for share in held:
            share.quarantine()
        if held:
            self._count(holder, held, "they are quarantined")

    def _kill(self, connection: Connection, holder: Holder, over: Collection[Share]) -> None:
        if connection in self._killed:  # it takes a moment to die
            return
        self._killed.add(connection)
        is_killed = connection.kill()
        self.num_killed += is_killed
        self._count(holder, over, "its process is killed" if is_killed else "its process cannot be killed")

    def _count(self, holder: Holder, over: Collection[Share], what: str) -> None:
        self.num_over += len(over)
        log.warning(
            "%s (pid %d) has %d leases for longer than %g s (lease_limit_s): %s",
            holder.name, holder.pid, len(over), self.limit_s, what,
        )  # fmt: skip
