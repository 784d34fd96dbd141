"""A small HTTP server on the coordinator's loop: one request a connection, everything bounded, nothing kept.

Parsing is h11's. Whoever sends too much, too slowly, or no HTTP gets an error or is closed, and holds nobody up.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from typing import TypeAlias

import h11

MAX_HEAD_BYTES = 8 << 10
"""Of a request line and its headers together."""
MAX_CONNECTIONS = 64
"""Of one more, the oldest is closed."""
REQUEST_TIMEOUT_S = 10.0
"""From the first byte expected to the last byte sent."""
LINGER_BYTES = 64 << 10
"""What is read and dropped after an answer, so that closing does not take the answer away."""
TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a page says."""

    status: int
    body: bytes
    content_type: str = TEXT
    allow: str = ""


Page: TypeAlias = Callable[[str], Awaitable[Answer]]
"""Gets the Accept header, maybe empty."""


class HttpServer:
    """Serves `pages` by their paths, to GET and HEAD.

    Attributes:
        num_answers: by status.
    """

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self._pages = pages
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], None] = {}
        self.num_answers: Counter[int] = Counter()

    @property
    def num_open(self) -> int:
        """Connections that are open."""
        return len(self._open)

    async def listen(self, host: str, port: int) -> str:
        """Listen from now on. Returns the address, HOST:PORT. Raises OSError."""
        self._server = await asyncio.start_server(self._connected, host, port, limit=MAX_HEAD_BYTES, backlog=64)
        bound = self._server.sockets[0]
        host, port = bound.getsockname()[:2]
        return f"[{host}]:{port}" if bound.family == socket.AF_INET6 else f"{host}:{port}"

    async def close(self) -> None:
        """Stop at once."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "streams are served by tasks"
        self._open[task] = None
        if len(self._open) > MAX_CONNECTIONS:
            next(iter(self._open)).cancel()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await self._serve(reader, writer)
        except (TimeoutError, OSError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            del self._open[task]
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        is_head = False
        try:
            request = await _request(connection, reader)
            if request is None:
                return
            is_head = request.method == b"HEAD"
            answer = await self._answer(request)
        except h11.RemoteProtocolError as error:
            answer = Answer(error.error_status_hint, f"{error}\n".encode())
        self.num_answers[answer.status] += 1
        writer.write(_packed(connection, answer, is_head))
        await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()
        num_read = 0
        while num_read < LINGER_BYTES and (data := await reader.read(4096)):
            num_read += len(data)

    async def _answer(self, request: h11.Request) -> Answer:
        page = self._pages.get(request.target.partition(b"?")[0].decode("ascii", "replace"))
        if page is None:
            return Answer(404, b"not here; see /\n")
        if request.method not in (b"GET", b"HEAD"):
            return Answer(405, b"only GET and HEAD\n", allow="GET, HEAD")
        accept = b",".join(value for name, value in request.headers if name == b"accept")
        return await page(accept.decode("latin-1"))


async def _request(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    """The head of the request; None if nobody asks anything after all. Raises `h11.RemoteProtocolError`."""
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is not h11.NEED_DATA:
            return None
        connection.receive_data(await reader.read(4096))


def _packed(connection: h11.Connection, answer: Answer, is_head: bool) -> bytes:
    headers = [
        ("date", formatdate(usegmt=True)),
        ("content-type", answer.content_type),
        ("content-length", str(len(answer.body))),
        ("cache-control", "no-store"),
        ("x-content-type-options", "nosniff"),
        ("connection", "close"),
    ]
    if answer.allow:
        headers.append(("allow", answer.allow))
    events: list[h11.Event] = [h11.Response(status_code=answer.status, headers=headers)]
    if not is_head:
        events.append(h11.Data(data=answer.body))
    return b"".join(connection.send(event) or b"" for event in (*events, h11.EndOfMessage()))
