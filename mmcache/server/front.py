"""What a sidecar says over HTTP: whether it lives, whether it is ready, and its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from mmcache.config import Settings
from mmcache.errors import ConfigError
from mmcache.server.http import Answer, HttpServer
from mmcache.server.metrics import Exposition

if TYPE_CHECKING:
    from mmcache.server.coordinator import Coordinator

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""Between tries to listen where something else listens."""
PAGES = b"""mmcache
/metrics  counters, gauges and histograms (Prometheus, OpenMetrics)
/healthz  200 while the sidecar lives
/readyz   200 while it takes requests, else 503 and why not
"""


class Front:
    """The pages.

    Attributes:
        address: where they are, HOST:PORT; empty while nothing listens.
        home: whose metrics they are; None while it starts.
        is_stopping: whether it takes no more requests.
    """

    def __init__(self) -> None:
        self.address = ""
        self.home: Coordinator | None = None
        self.is_stopping = False
        self._exposition = Exposition(self)
        self.server = HttpServer(
            {"/": self._index, "/metrics": self._metrics, "/healthz": self._health, "/readyz": self._readiness}
        )

    @property
    def unready(self) -> str:
        """Why it takes no requests; empty if it does."""
        if self.home is None:
            return "starting: the model is being loaded"
        if self.is_stopping:
            return "stopping: what is in flight is finished, nothing new is taken"
        return self.home.ranks.outage

    async def _index(self, _: str) -> Answer:
        return Answer(200, PAGES)

    async def _health(self, _: str) -> Answer:
        return Answer(200, b"alive\n")

    async def _readiness(self, _: str) -> Answer:
        if reason := self.unready:
            return Answer(503, f"not ready: {reason}\n".encode())
        return Answer(200, b"ready\n")

    async def _metrics(self, accept: str) -> Answer:
        content_type, body = await self._exposition.render(accept)
        return Answer(200, body, content_type)


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[Front]:
    """The pages as the settings say, inside.

    An address that something else has is no reason not to serve: it is logged, and tried again until it is free.

    Raises:
        ConfigError: the address cannot be used at all.
    """
    front = Front()
    if settings.http_address is None:
        yield front
        return
    host, port = settings.http_address
    retrying: asyncio.Task[None] | None = None
    try:
        try:
            await _listen(front, host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"http = {settings.http}: cannot listen there: {error.strerror or error}") from None
            log.warning(
                "http = %s: something else listens there; no metrics until it is free (http=off to do without)",
                settings.http,
            )
            retrying = asyncio.get_running_loop().create_task(_listen_when_free(front, host, port))
        yield front
    finally:
        if retrying is not None:
            retrying.cancel()
        await front.server.close()


async def _listen(front: Front, host: str, port: int) -> None:
    front.address = await front.server.listen(host, port)
    log.info("metrics and health on http://%s", front.address)


async def _listen_when_free(front: Front, host: str, port: int) -> None:
    while not front.address:
        await asyncio.sleep(RETRY_S)
        with contextlib.suppress(OSError):
            await _listen(front, host, port)
