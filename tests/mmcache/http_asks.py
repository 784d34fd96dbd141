"""Plain HTTP for the tests: what a real client sends, and what none would."""

from __future__ import annotations

import http.client
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class Reply:
    """An answer."""

    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def text(self) -> str:
        return self.body.decode()


def ask(address: str, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Reply:
    """One request, answered."""
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Reply(answer.status, answer.read(), found)
    finally:
        connection.close()


def dial(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host.strip("[]"), int(port)), timeout=60)


def until_closed(sock: socket.socket) -> bytes:
    """Everything that the other end still sends."""
    received = b""
    try:
        while data := sock.recv(65536):
            received += data
    except ConnectionError:
        pass
    return received
