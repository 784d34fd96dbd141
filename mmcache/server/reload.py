"""New weights at run time: loaded beside the old ones, then served from one turn of the loop to the next."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from encoder.config import PRESETS
from mmcache.errors import MMCacheError, SidecarError
from mmcache.protocol import Reload, Reloaded

if TYPE_CHECKING:
    from mmcache.server.coordinator import Coordinator

log = logging.getLogger(__name__)


class Reloads:
    """One reload at a time, which goes on when whoever asked for it is gone.

    Attributes:
        num_done: reloads that succeeded, of the weights that were served already too.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._home = coordinator
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self.num_done = 0

    def start(self, reload: Reload, reply: Callable[[Reloaded], None]) -> None:
        """Load what is asked for and serve it. `reply` is called once, when that is done or has failed."""
        if self._task is not None and not self._task.done():
            reason = "a reload is under way; try again when it has ended"
            reply(Reloaded(ask_id=reload.ask_id, error=SidecarError.__name__, reason=reason))
            return
        model = reload.model if reload.model in PRESETS else reload.folder
        self._task = self._loop.create_task(self._reload(model or self._home.facts.model, reload.ask_id, reply))
        self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """Drop what is under way: the sidecar stops."""
        if self._task is not None:
            self._task.cancel()

    async def _reload(self, model: str, ask_id: int, reply: Callable[[Reloaded], None]) -> None:
        try:
            await self._load_and_switch(model)
        except MMCacheError as error:
            log.error("reload: %s; all stays as it was", error)
            reply(Reloaded(ask_id=ask_id, error=type(error).__name__, reason=str(error)[:4000]))
        else:
            reply(Reloaded(ask_id=ask_id))

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("internal error in a reload", exc_info=fault)
            self._home.stats.errors["Internal"] += 1

    async def _load_and_switch(self, model: str) -> None:
        ranks = self._home.ranks
        log.info("reload: loading %s", model)
        facts = await ranks.load(model)
        before = self._home.fingerprint
        if facts.fingerprint != before:
            try:
                await ranks.pause()
            except BaseException:
                ranks.unload()
                raise
        # Within this turn of the loop: whatever comes next, ranks, index and clients have the same model.
        ranks.switch(facts)
        self._home.adopt(facts)
        self.num_done += 1
        log.info("reload: %s is served, fingerprint %s (was %s)", model, facts.fingerprint, before)
