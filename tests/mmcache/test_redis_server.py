"""The servers that other tests rely on: they start, can be harmed, and leave nothing."""

from __future__ import annotations

import pytest
import redis

from tests.mmcache.redis_server import RedisServer, SentinelServer, free_port, replica_of


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_a_server_dies_starts_again_empty_and_leaves_nothing(kind: str) -> None:
    with RedisServer(kind, password="secret") as server:
        with server.client() as client:
            client.set("a", "1")
        server.kill()
        with server.client() as client, pytest.raises(redis.ConnectionError):
            client.ping()
        server.start()
        with server.client() as client:
            assert client.get("a") is None
        with server.client(password="wrong") as client, pytest.raises(redis.RedisError):
            client.ping()
    assert not server.folder.exists()


def test_a_frozen_server_answers_once_it_thaws() -> None:
    with RedisServer() as server, server.client(socket_timeout=0.2) as client:
        client.set("a", "1")
        server.freeze()
        with pytest.raises(redis.TimeoutError):
            client.get("a")
        server.thaw()
        with server.client() as patient:
            assert patient.get("a") == b"1"


def test_a_sentinel_knows_its_master_and_a_replica_refuses_writes() -> None:
    with RedisServer(port=free_port()) as master, replica_of(master) as replica:
        with replica.client() as client, pytest.raises(redis.ReadOnlyError):
            client.set("a", "1")
        with SentinelServer("images", master.port) as sentinel, sentinel.client() as client:
            address = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "images")
            assert int(address[1]) == master.port
