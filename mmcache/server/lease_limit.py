"""The longest that a lease may be held: beyond it, it is quarantined, or its process is killed. See the settings.

What nobody reads yet, an unclaimed share or the embedding of staged pixels, is not kept any longer than that either.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

from ipc.leases import Holder
from ipc.shares import HolderState, Share, ShareState

if TYPE_CHECKING:
    from mmcache.server.connection import Connection
    from mmcache.server.coordinator import Coordinator

OUTLIVED = "nobody came for the embedding of the staged pixels within lease_limit_s"

log = logging.getLogger(__name__)


class LeaseLimit:
    """Looked at with every regular sweep. A lease that meets the limit still ends only by acknowledgement or death.

    Attributes:
        limit_s: 0 for no limit.
        num_over: leases that met the limit.
        num_killed: processes that were killed for it.
        num_ended: offers, and embeddings kept for staged pixels, that met the limit and were ended.
    """

    def __init__(self, limit_s: float, action: Literal["quarantine", "kill"]) -> None:
        self.limit_s = limit_s
        self._kills = action == "kill"
        self._killed: set[Connection] = set()
        self.num_over = 0
        self.num_killed = 0
        self.num_ended = 0

    def enforce(self, home: Coordinator) -> None:
        """Act on everything that is over the limit by now, once."""
        if not self.limit_s:
            return
        self._killed.intersection_update(home.connections)
        for connection in list(home.connections):
            if connection.holder is None:
                continue
            self._end_kept(home, connection, connection.holder)
            if over := self._over(connection.holder):
                if self._kills:
                    self._kill(connection, connection.holder, over)
                else:
                    self._quarantine(connection.holder, over)

    def quarantined(self, holder: Holder) -> Collection[Share]:
        """Leases of a holder that are quarantined, for this reason or another."""
        if holder.state is HolderState.QUARANTINED:
            return holder.shares()
        return [share for share in self._over(holder) if share.state is ShareState.QUARANTINED]

    def _end_kept(self, home: Coordinator, connection: Connection, holder: Holder) -> None:
        before = time.monotonic() - self.limit_s
        num_ended = home.offers.expire(holder, before)
        for staged in home.staging.kept_of(connection):
            if staged.kept is not None and staged.kept.since < before:
                staged.let_go(OUTLIVED)
                num_ended += 1
        self.num_ended += num_ended
        if num_ended:
            log.warning(
                "%s (pid %d) has kept %d embeddings for others for longer than %g s (lease_limit_s): not any more",
                holder.name, holder.pid, num_ended, self.limit_s,
            )  # fmt: skip

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
