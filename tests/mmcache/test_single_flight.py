"""One encode a key, however many wait for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmcache
from mmcache.framing import Kind, close_all
from mmcache.keys import KeyHasher
from mmcache.parts import cut
from tests.mmcache.support import SidecarProcess, encode_frame, eventually, image


def in_threads(jobs: list[Any]) -> list[Any]:
    """Run the jobs at the same time; their results in order."""
    results: list[Any] = [None] * len(jobs)
    barrier = threading.Barrier(len(jobs))

    def run(index: int) -> None:
        barrier.wait()
        try:
            results[index] = jobs[index]()
        except mmcache.MMCacheError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_sixteen_clients_one_encode(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, ranks="2") as sidecar:
        clients = [sidecar.connect() for _ in range(16)]
        picture = image(1, 700, 900)
        results = in_threads([lambda client=client: client.encode([picture])[0] for client in clients])
        arrays = [lease.numpy() for lease in results]
        for array in arrays[1:]:
            np.testing.assert_array_equal(arrays[0], array)
        items = sidecar.stats()["items"]
        assert items["encoded"] == 1
        assert items["joined"] + items["hit_pool"] == 15
        for lease in results:
            lease.release()
        for client in clients:
            client.close()


def test_a_dead_supplier_is_replaced(sidecar: SidecarProcess) -> None:
    """The client that was asked for the bytes closes instead: the next one that waits is asked."""
    picture = image(2)
    silent = sidecar.connect()
    key = silent.key(picture)
    silent._pump.channel.send(encode_frame(key))
    added = silent._pump.channel.receive(None)
    close_all(added.fds)
    assert added.kind == Kind.POOL_ADDED
    assert b'"need":[0]' in silent._pump.channel.receive(None).header
    with sidecar.connect() as patient:
        results: list[Any] = []
        waiting = threading.Thread(target=lambda: results.extend(patient.encode([picture])))
        waiting.start()
        while sidecar.stats()["items"]["joined"] == 0:
            pass
        silent._pump.channel.close()
        waiting.join()
        assert results[0].origin == "encoded"
        results[0].release()


def test_a_stalled_supplier_does_not_block_others(sidecar: SidecarProcess) -> None:
    """The client that was asked for the bytes neither sends them nor dies."""
    with sidecar.connect() as silent, sidecar.connect() as patient:
        key = silent.key(image(2))
        silent._pump.channel.send(encode_frame(key))
        with patient.encode([image(2)])[0] as lease:
            assert lease.origin == "encoded"


def test_a_liar_that_leaves_while_it_is_caught(sidecar: SidecarProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its false bytes lie at the decoder when it closes; whoever waits for the same key is asked next."""
    truth, lie = image(3), image(4)
    decoder = sidecar.stats()["decoders"]["pids"][0]
    with sidecar.connect() as honest:
        key = honest.key(truth)
        liar = sidecar.connect()
        monkeypatch.setattr(KeyHasher, "key", lambda *_: key)
        (part,) = cut([lie], liar._core.hasher.key, 1 << 20, on_error=lambda *_: None)
        pending = liar._core.encode(part, 60.0)
        monkeypatch.undo()
        os.kill(decoder, signal.SIGSTOP)
        channel, outbox = liar._pump.channel, liar._core.outbox
        channel.send_all(outbox, time.monotonic() + 10)
        while not outbox:
            liar._core.receive(channel.receive(time.monotonic() + 10))
        channel.send_all(outbox, time.monotonic() + 10)
        results: list[Any] = []
        waiting = threading.Thread(target=lambda: results.extend(honest.encode([truth], errors="return")))
        waiting.start()
        eventually(lambda: sidecar.stats()["items"]["joined"] == 1, "the honest one waits")
        channel.close()
        eventually(lambda: sidecar.stats()["leases"]["connections"] == 2, "the liar is gone")
        os.kill(decoder, signal.SIGCONT)
        waiting.join()
        assert not pending.is_done
        assert isinstance(results[0], mmcache.Lease), results
        results[0].release()


def test_a_liar_poisons_nobody(sidecar: SidecarProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client claims another's key for its own bytes: it fails, nothing is cached, the honest one is served."""
    truth, lie = image(3), image(4)
    with sidecar.connect() as honest, sidecar.connect() as liar:
        key = honest.key(truth)
        monkeypatch.setattr(KeyHasher, "key", lambda *_: key)
        (result,) = liar.encode([lie], errors="return")
        monkeypatch.undo()
        assert isinstance(result, mmcache.ContentMismatch)
        with honest.encode([truth])[0] as lease:
            assert lease.origin == "encoded"
            expected = lease.numpy().copy()
        with liar.encode([truth])[0] as lease:
            np.testing.assert_array_equal(lease.numpy(), expected)
        assert sidecar.stats()["errors"] == {"ContentMismatch": 1}


def test_bytes_travel_only_for_misses(sidecar: SidecarProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    supplied: list[int] = []
    with sidecar.connect() as client:
        supply = client._core.supply
        monkeypatch.setattr(
            client._core, "supply", lambda core, asked: (supplied.extend(asked.need), supply(core, asked))
        )
        for lease in client.encode([image(5), image(6)]):
            lease.release()
        assert sorted(supplied) == [0, 1]
        for lease in client.encode([image(5), image(6), image(7)]):
            lease.release()
        assert sorted(supplied) == [0, 1, 2]


def test_keys_do_not_depend_on_the_client(sidecar: SidecarProcess) -> None:
    with sidecar.connect() as one, sidecar.connect() as two:
        assert one.key(b"abc") == two.key(b"abc")
        (part,) = cut([b"abc"], one._core.hasher.key, 1000, on_error=lambda *_: None)
        media = part.media(0)
        assert one.key(b"abc") == KeyHasher(one._core.welcome.seed).key(media.kind, media.header, media.raw)


def test_one_failure_for_all_who_wait_and_a_new_try_for_who_comes(sidecar: SidecarProcess) -> None:
    """The rank is killed with the item in its hands, and so is the next one: that was its second and last try."""
    picture = image(8, 1400, 1400)
    with sidecar.connect(timeout=120) as one, sidecar.connect(timeout=120) as two, sidecar.connect() as observer:
        results: list[Any] = []

        def wait(client: mmcache.Client) -> None:
            results.extend(client.encode([picture], errors="return"))

        threads = [threading.Thread(target=wait, args=(client,)) for client in (one, two)]
        (rank,) = observer.stats()["ranks"]["pids"]
        os.kill(rank, signal.SIGSTOP)
        for thread in threads:
            thread.start()
        eventually(lambda: observer.stats()["items"]["joined"] == 1, "both wait")
        eventually(lambda: observer.stats()["batches"]["begun"] == 1, "the rank has it")
        os.kill(rank, signal.SIGKILL)
        eventually(lambda: observer.stats()["batches"]["begun"] == 2, "the next rank has it", 60)
        (rank,) = observer.stats()["ranks"]["pids"]
        os.kill(rank, signal.SIGKILL)
        for thread in threads:
            thread.join()
        assert [type(result) for result in results] == [mmcache.EncodeFailed] * 2
        assert str(results[0]) == str(results[1])
        assert "the ranks died" in str(results[0])
        with one.encode([picture])[0] as lease:
            assert lease.origin == "encoded"
        stats = observer.stats()
        assert (stats["items"]["encoded"], stats["batches"]["retried"]) == (1, 1)
