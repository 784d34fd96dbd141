"""The pages of a sidecar: who asks properly is answered, and who does not is closed and holds nobody up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

import mmcache.server.front
import mmcache.server.http
from mmcache.config import Settings
from mmcache.errors import ConfigError
from mmcache.server.front import Front, serving
from mmcache.server.http import Answer, HttpServer
from tests.mmcache.http_asks import Reply, ask, dial, until_closed
from tests.mmcache.support import SidecarProcess, eventually


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with SidecarProcess(tmp_path_factory.mktemp("http"), http="127.0.0.1:0") as sidecar:
        yield str(sidecar.stats()["http"])


def settings_of(tmp_path: Path, http: str) -> Settings:
    return Settings(state=tmp_path, socket=tmp_path / "s", http=http, store="none")


async def until(is_true: Callable[[], bool]) -> None:
    await asyncio.to_thread(eventually, is_true, "it comes about", 60)


@asynccontextmanager
async def server(delay: Callable[[], Awaitable[None]] | None = None) -> AsyncIterator[tuple[str, HttpServer]]:
    async def page(_: str) -> Answer:
        if delay is not None:
            await delay()
        return Answer(200, b"here\n")

    serves = HttpServer({"/": page})
    try:
        yield await serves.listen("127.0.0.1", 0), serves
    finally:
        await serves.close()


def test_the_address_is_in_the_statistics(address: str) -> None:
    host, _, port = address.rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0


@pytest.mark.parametrize(
    ("path", "says"), [("/healthz", "alive\n"), ("/readyz", "ready\n"), ("/healthz?from=probe", "alive\n")]
)
def test_health(address: str, path: str, says: str) -> None:
    reply = ask(address, path)
    assert (reply.status, reply.text) == (200, says)
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    assert reply.headers["connection"] == "close"
    assert "date" in reply.headers


def test_the_first_page_names_the_others(address: str) -> None:
    text = ask(address, "/").text
    assert all(path in text for path in ("/metrics", "/healthz", "/readyz"))


@pytest.mark.parametrize("path", ["/healthz", "/metrics"])
def test_head_is_the_head_alone(address: str, path: str) -> None:
    head = ask(address, path, "HEAD")
    assert (head.status, head.body) == (200, b"")
    assert int(head.headers["content-length"]) > 0


@pytest.mark.parametrize("path", ["/nothing", "/metrics/", "/../etc/passwd", "/%2e%2e/etc", "//healthz"])
def test_what_is_not_there(address: str, path: str) -> None:
    assert ask(address, path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_other_methods_are_refused(address: str, method: str) -> None:
    reply = ask(address, "/healthz", method, b"x" * 100)
    assert reply.status == 405
    assert reply.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),  # no Host
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-Y: " + b"z" * 20_000, b"431"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 4000, b"431"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100 + b"\r\n\r\n", b"400"),  # TLS
        (b"\0" * 30_000, b"4"),
        (b"GET /\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n", b"400"),
    ],
)
def test_what_is_no_request_gets_an_error_and_is_closed(address: str, sent: bytes, status: bytes) -> None:
    with dial(address) as sock:
        sock.sendall(sent)
        received = until_closed(sock)
    assert received.startswith(b"HTTP/1.1 " + status), received
    assert ask(address, "/healthz").status == 200


def test_who_leaves_early_leaves_nothing(address: str) -> None:
    for sent in (b"", b"GET", b"GET / HTTP/1.1\r\nHost: x\r\n", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"):
        with dial(address) as sock:
            sock.sendall(sent)
    assert ask(address, "/healthz").status == 200


def test_a_second_request_on_a_connection_is_not_served(address: str) -> None:
    with dial(address) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
        assert until_closed(sock).count(b"HTTP/1.1 200") == 1


def test_who_is_slow_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then keeps nothing open: the time is that of the whole request."""
    monkeypatch.setattr(mmcache.server.http, "REQUEST_TIMEOUT_S", 0.3)

    async def main() -> bytes:
        async with server() as (address, _):
            host, port = address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            for byte in b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: " + b"a" * 2000:
                try:
                    writer.write(bytes([byte]))
                    await writer.drain()
                except ConnectionError:
                    break
                if reader.at_eof():
                    break
                await asyncio.sleep(0.02)
            else:
                pytest.fail("it was never closed")
            try:
                return await reader.read()
            except ConnectionError:
                return b""

    assert asyncio.run(main()) == b""


def test_who_stays_after_its_answer_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmcache.server.http, "REQUEST_TIMEOUT_S", 0.3)

    async def main() -> None:
        async with server() as (address, serves):
            host, port = address.split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await until(lambda: bool(serves.num_answers) and not serves.num_open)
            writer.close()

    asyncio.run(main())


def test_of_too_many_the_oldest_is_closed() -> None:
    """Connections that ask nothing do not keep others out."""

    async def main() -> None:
        async with server() as (address, _):
            host, port = address.split(":")
            idle = [await asyncio.open_connection(host, int(port)) for _ in range(mmcache.server.http.MAX_CONNECTIONS)]
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(30):
                assert (await reader.read()).startswith(b"HTTP/1.1 200")
                with suppress(ConnectionError):
                    assert await idle[0][0].read() == b""
            assert not idle[-1][0].at_eof()
            for _, other in (*idle, (reader, writer)):
                other.close()

    asyncio.run(main())


def test_a_server_that_closes_leaves_nobody_waiting() -> None:
    async def main() -> None:
        asked = asyncio.Event()

        async def never() -> None:
            asked.set()
            await asyncio.Event().wait()

        async with server(never) as (address, serves):
            host, port = address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asked.wait()
            await serves.close()
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()

    asyncio.run(main())


def test_it_says_that_it_starts_until_it_is_ready(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    sidecar = SidecarProcess(tmp_path, http=address)
    sidecar.launch()
    seen: list[Reply] = []

    def is_ready() -> bool:
        try:
            seen.append(ask(address, "/readyz"))
        except ConnectionRefusedError:
            return False
        return seen[-1].status == 200

    try:
        eventually(is_ready, "it is ready", 120)
        assert seen[0].status == 503
        assert seen[0].text == "not ready: starting: the model is being loaded\n"
    finally:
        sidecar.wait_ready().stop()


@pytest.mark.parametrize(
    ("is_stopping", "outage", "status", "says"),
    [
        (False, "", 200, "ready\n"),
        (False, "rank 0: killed", 503, "not ready: rank 0: killed\n"),
        (True, "", 503, "not ready: stopping: what is in flight is finished, nothing new is taken\n"),
    ],
)
def test_why_it_is_not_ready(tmp_path: Path, is_stopping: bool, outage: str, status: int, says: str) -> None:
    async def main() -> Reply:
        async with serving(settings_of(tmp_path, "127.0.0.1:0")) as front:
            home: Any = SimpleNamespace(ranks=SimpleNamespace(outage=outage))
            front.home, front.is_stopping = home, is_stopping
            return await asyncio.to_thread(ask, front.address, "/readyz")

    reply = asyncio.run(main())
    assert (reply.status, reply.text) == (status, says)


def test_an_address_in_use_is_taken_when_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mmcache.server.front, "RETRY_S", 0.05)

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            chosen = f"127.0.0.1:{taken.getsockname()[1]}"
            async with serving(settings_of(tmp_path, chosen)) as front:
                assert front.address == ""
                taken.close()
                await until(lambda: front.address != "")
                assert front.address == chosen
                assert (await asyncio.to_thread(ask, chosen, "/healthz")).status == 200

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "something else listens there" in warning


@pytest.mark.parametrize("http", ["192.0.2.1:9464", "no.such.host.invalid:9464"])
def test_an_address_that_is_nobodys_is_a_wrong_setting(tmp_path: Path, http: str) -> None:
    async def main() -> None:
        async with serving(settings_of(tmp_path, http)):
            pytest.fail("it cannot listen there")

    with pytest.raises(ConfigError, match=f"http = {http}: cannot listen there"):
        asyncio.run(main())


def test_off_is_off(tmp_path: Path) -> None:
    async def main() -> Front:
        async with serving(settings_of(tmp_path, "off")) as front:
            return front

    assert asyncio.run(main()).address == ""


@pytest.mark.parametrize(
    ("http", "address"),
    [
        ("off", None),
        ("OFF", None),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("localhost:9464", ("localhost", 9464)),
        ("[::1]:80", ("::1", 80)),
        ("0.0.0.0:65535", ("0.0.0.0", 65535)),
    ],
)
def test_settings_of_it(tmp_path: Path, http: str, address: tuple[str, int] | None) -> None:
    assert settings_of(tmp_path, http).http_address == address


@pytest.mark.parametrize(
    "http",
    ["", "on", "9464", ":9464", "::1:9464", "host:", "host:65536", "host:-1", "http://host:1", "host:1/x", "h:１"],
)
def test_wrong_settings_of_it(tmp_path: Path, http: str) -> None:
    with pytest.raises(ValueError, match=r"must be HOST:PORT, such as 127\.0\.0\.1:9464"):
        settings_of(tmp_path, http)
