"""The asyncio client without a sidecar: `AsyncClient.local`."""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

from mmcache.aio import AsyncClient, Connecting
from mmcache.aio_link import greeted
from mmcache.duplex import DuplexChannel
from mmcache.handshake import DEFAULT_TIMEOUT_S, Target, check_timeout
from mmcache.local import PLACE, started
from mmcache.retries import check_retries

if TYPE_CHECKING:
    from mmcache.server.inside import Inside


class AsyncLocalClient(AsyncClient):
    """A client of what is `inside` its own process, which ends with it."""

    def __init__(self, inside: Inside, *connection: Any) -> None:
        self._inside = inside
        super().__init__(*connection)

    async def close(self) -> None:
        """End what serves it too. See `Client.close`."""
        await super().close()
        await asyncio.to_thread(self._inside.close)

    def __del__(self, _warn: Any = warnings.warn) -> None:
        super().__del__(_warn)
        if not getattr(self, "_is_closed", True):
            self._inside.stop()


def connecting(
    model: str | os.PathLike[str],
    device: str,
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
    namespace: str = "",
    name: str | None = None,
    retry_overloaded: int = 0,
    **settings: object,
) -> Connecting:
    """A client, once the model is warm; the loop goes on meanwhile. See `mmcache.local`."""
    check_timeout(timeout)
    num_retries = check_retries(retry_overloaded)
    target = Target.of(PLACE, name, namespace)

    async def connected() -> AsyncClient:
        inside = await _begun(model, device, settings)
        try:
            pump = await greeted(DuplexChannel(inside.connect()), target, time.monotonic() + timeout)
            return AsyncLocalClient(inside, pump, target, timeout, False, num_retries)
        except BaseException:
            inside.stop()
            raise

    return Connecting(connected)


async def _begun(model: str | os.PathLike[str], device: str, settings: dict[str, object]) -> Inside:
    """Started in a thread. If the caller is cancelled meanwhile, it ends as soon as it has started."""
    starting = asyncio.get_running_loop().run_in_executor(None, partial(started, model, device, settings))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_stop)
        raise


def _stop(starting: asyncio.Future[Inside]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().stop()
