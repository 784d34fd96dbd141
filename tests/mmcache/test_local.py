"""A client without a sidecar: the same calls inside this process, which stays as it was and gets everything back."""

from __future__ import annotations

import _thread
import asyncio
import gc
import io
import itertools
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import mmcache
from mmcache.framing import Frame, Kind
from mmcache.server.messages import Ran, Run
from mmcache.server.rank_guest import GuestRank
from tests.mmcache import loops
from tests.mmcache.support import SidecarProcess, clean_environ, eventually, image, is_alive

SMALL: dict[str, Any] = {"pool_bytes": "8MiB", "ingest_bytes": "16MiB", "device": "cpu"}


def own_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("mmcache"))


def mapped() -> int:
    """Memories of pools and of ingest regions that are mapped, once for each mapping."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:mmcache-pool" in line or "memfd:mmcache-ingest" in line for line in lines)


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def decoder_pids(client: mmcache.Client) -> list[int]:
    pids: list[int] = client.stats()["decoders"]["pids"]
    return pids


def png(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image(seed)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def inside(state: Path) -> Iterator[mmcache.Client]:
    with mmcache.local(state=state, name="engine", **SMALL) as client:
        yield client


def test_every_call_is_as_with_a_sidecar(inside: mmcache.Client, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    items = [image(1), png(2), tmp_path / "a.png", b"no picture", image(1)]
    results: list[Any] = inside.encode(items, "return", consumers=1)
    assert [getattr(result, "origin", None) for result in results] == ["encoded"] * 3 + [None, "encoded"]
    assert isinstance(results[3], mmcache.UndecodableImage)
    leases = [result for result in results if isinstance(result, mmcache.Lease)]
    assert leases[0].tensor.shape == (leases[0].num_tokens, inside.dim)
    assert torch.equal(inside.fetch(leases[0]), leases[0].tensor)
    assert torch.equal(leases[0].tensor, leases[3].tensor)
    assert inside.lookup([leases[0].key, mmcache.ContentKey(bytes(16))]) == ["pool", None]
    with inside.open(leases[0].ref) as shared:
        assert torch.equal(shared.tensor, leases[0].tensor)
    (plan,) = inside.plan([image(1)])
    assert isinstance(plan, mmcache.Plan)
    assert plan.num_tokens == leases[0].num_tokens
    key = inside.key(image(99))
    assert inside.put(key, inside.fetch(leases[0]), leases[0].grid_thw)
    handle = inside.submit([inside.stage(image(5))], priority="bulk")
    for lease in (*leases, *handle.result()):
        lease.release()
    eventually(lambda: inside.stats()["leases"]["active"] == 0, "every lease ends")
    stats = inside.stats()
    assert (stats["ranks"]["ready"], stats["ranks"]["pids"], stats["items"]["put"]) == (1, [os.getpid()], 1)
    found = inside.leases(check=True)
    assert (found["problems"], [holder["name"] for holder in found["holders"]]) == ([], ["engine"])


def test_it_is_what_a_sidecar_gives(shared_sidecar: SidecarProcess) -> None:
    """With the same state folder a picture has the same key; and the same weights give the same embedding."""
    with (
        mmcache.local(state=shared_sidecar.folder / "state", **SMALL) as here,
        shared_sidecar.connect() as there,
    ):
        (mine,), (theirs,) = here.encode([image(40)]), there.encode([image(40)])
        assert (mine.key, mine.fingerprint, mine.grid_thw) == (theirs.key, theirs.fingerprint, theirs.grid_thw)
        torch.testing.assert_close(mine.tensor, theirs.tensor)
        mine.release()
        theirs.release()


def test_the_process_stays_as_it_was(inside: mmcache.Client, state: Path) -> None:
    def seen() -> tuple[object, ...]:
        kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_DATA)
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
        limits = [resource.getrlimit(kind) for kind in kinds]
        arithmetic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()
        return limits, handlers, arithmetic, dict(os.environ), threading.excepthook, sys.excepthook, gc.get_threshold()

    before, threads = seen(), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        changed = seen()
        with mmcache.local(state=state, **SMALL) as client:
            client.encode([image(50)])[0].release()
            assert seen() == changed
        assert seen() == changed
    finally:
        torch.set_num_threads(threads)
    assert seen() == before


def test_close_gives_everything_back(state: Path) -> None:
    gc.collect()
    before = own_threads(), mapped(), children(), len(os.listdir("/proc/self/fd"))
    client = mmcache.local(state=state, **SMALL)
    (lease, kept) = client.encode([image(60), image(61)])
    client.stage(image(62))
    held = kept.hold()
    expected = held.clone()
    decoders = decoder_pids(client)
    assert own_threads() != before[0]
    client.close()
    client.close()
    assert own_threads() == before[0]
    assert not any(is_alive(pid) for pid in decoders)
    with pytest.raises(mmcache.LeaseReleased):
        assert lease.tensor is None
    assert torch.equal(held, expected), "what is held stays readable"
    with pytest.raises(mmcache.ClientClosed):
        client.encode([image(60)])
    del lease, kept, held, client
    gc.collect()
    assert (own_threads(), mapped(), children()) == before[:3]
    assert len(os.listdir("/proc/self/fd")) <= before[3]


def test_one_that_is_dropped_warns_and_ends(state: Path) -> None:
    gc.collect()
    before, mapped_before = own_threads(), mapped()
    client = mmcache.local(state=state, **SMALL)
    (lease,) = client.encode([image(70)])
    decoders = decoder_pids(client)
    expected = lease.tensor.clone()
    kept = [client]
    del client
    with pytest.warns(ResourceWarning, match="dropped unclosed"):
        kept.clear()
    eventually(lambda: own_threads() == before, "its threads end")
    eventually(lambda: not any(is_alive(pid) for pid in decoders), "its decoders end")
    assert torch.equal(lease.tensor, expected), "a lease that was taken from it goes on"
    lease.release()
    del lease
    gc.collect()
    assert mapped() == mapped_before


@pytest.mark.parametrize("method", ["_run", "_handle"])
@pytest.mark.parametrize("fault", [SystemExit, AssertionError])
def test_a_fault_in_the_rank_ends_the_rank_alone(
    inside: mmcache.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str,
    fault: type[BaseException],
) -> None:  # fmt: skip
    """In the thread that encodes, and in the one that reads."""
    restarts = inside.stats()["ranks"]["restarts"]
    (before,) = inside.encode([image(80)])
    expected = before.tensor.clone()
    real = getattr(GuestRank, method)
    raised: list[type[BaseException]] = []

    def faulty(rank: GuestRank, work: Run | Frame) -> Ran | None:
        if not raised and (isinstance(work, Run) or work.kind == Kind.RUN):
            raised.append(fault)
            raise fault("a fault")  # a new one: its traceback keeps the rank's memory
        return real(rank, work)  # type: ignore[no-any-return]

    monkeypatch.setattr(GuestRank, method, faulty)
    seeds = itertools.count(1000 * (restarts + 1))
    with caplog.at_level(logging.ERROR):
        while not raised:  # whoever reads has looked the method up before its first frame
            (after,) = inside.encode([image(next(seeds))])
            assert after.origin == "encoded"
            after.release()
    assert raised == [fault]
    assert "internal error in the rank's thread" in caplog.text
    assert inside.stats()["ranks"]["restarts"] == restarts + 1
    assert torch.equal(before.tensor, expected), "what was leased before stays readable"
    before.release()
    assert inside.leases(check=True)["problems"] == []


def test_a_killed_decoder_is_replaced(inside: mmcache.Client) -> None:
    (old,) = decoder_pids(inside)
    os.kill(old, signal.SIGKILL)
    inside.encode([png(90)])[0].release()
    assert old not in decoder_pids(inside)


def test_new_weights_are_loaded_beside_the_old(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    first, second = folders
    with mmcache.local(first, state=tmp_path / "state", **SMALL) as client:
        (old,) = client.encode([image(95)])
        assert client.reload(second) != old.fingerprint
        (new,) = client.encode([image(95)])
        assert (new.origin, new.fingerprint == client.fingerprint) == ("encoded", True)
        assert not torch.equal(old.tensor, new.tensor)
        old.release()
        new.release()


def test_a_store_outlives_it(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store.lmdb"
    origins = []
    for _ in range(2):
        with mmcache.local(state=tmp_path / "state", store=store, **SMALL) as client:
            (lease,) = client.encode([image(96)])
            origins.append(lease.origin)
            lease.release()
    assert origins == ["encoded", "store"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pool_bytes": "tiny"}, r"pool_bytes = 'tiny' \(argument\): "),
        ({"pool_byte": "1MiB"}, "argument pool_byte: not a setting; did you mean pool_bytes?"),
        ({"model": "no-such-model"}, r"model = 'no-such-model' \(argument\): "),
        ({"ranks": 2}, "there is one"),
        ({"socket": "/tmp/x"}, "there is none"),
        ({"device_bytes": 1 << 30}, "the engine's to bound"),
        ({"lease_limit_action": "kill"}, "the engine that is killed"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str, state: Path) -> None:
    before = own_threads()
    with pytest.raises(mmcache.ConfigError, match=message):
        mmcache.local(**{"state": state, "device": "cpu"} | settings)
    assert own_threads() == before


def test_a_model_that_cannot_be_loaded_leaves_nothing(state: Path, folders: tuple[Path, Path]) -> None:
    (weights,) = folders[0].glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-64])
    gc.collect()
    before = own_threads(), mapped(), children()
    with pytest.raises(mmcache.CheckpointError):
        mmcache.local(folders[0], state=state, **SMALL)
    gc.collect()
    assert (own_threads(), mapped(), children()) == before


def test_a_start_that_is_interrupted_leaves_nothing(state: Path) -> None:
    before = own_threads(), children()

    def start_again_and_again() -> None:
        while True:  # an interruption that comes in a finalizer is lost
            timer = threading.Timer(0.2, _thread.interrupt_main)
            timer.start()
            mmcache.local(state=state, **SMALL).close()
            timer.join()

    with pytest.raises(KeyboardInterrupt):
        start_again_and_again()
    eventually(lambda: (own_threads(), children()) == before, "everything ends")


SCRIPT = """
import os, sys
import mmcache
from tests.mmcache import loops
from tests.mmcache.support import image
client = mmcache.local(state=sys.argv[1], pool_bytes="8MiB", ingest_bytes="16MiB", device="cpu")
lease = client.encode([image(1)])[0]
client.stage(image(2))
print(client.stats()["decoders"]["pids"][0], flush=True)
{then}
"""


def ended(state: Path, then: str) -> subprocess.CompletedProcess[str]:
    """A process that did not close its client, when it and its decoder are gone."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(then=then), str(state)], capture_output=True, text=True, timeout=120,
        env=clean_environ(PYTHONPATH="."), check=False,
    )  # fmt: skip
    eventually(lambda: not is_alive(int(done.stdout.split()[0])), "the decoder ends")
    return done


@pytest.mark.parametrize(
    ("then", "status"),
    [("", 0), ("sys.exit(3)", 3), ("raise ValueError('mine')", 1), ("os.kill(os.getpid(), 9)", -9)],
)
def test_exit_ends_it(state: Path, then: str, status: int) -> None:
    done = ended(state, then)
    assert done.returncode == status, done.stderr
    lines = [line for line in done.stderr.splitlines() if "ResourceWarning" not in line]
    assert bool(lines) == (status == 1), done.stderr
    assert "mine" in done.stderr or status != 1


FORK = """
child = os.fork()
if not child:
    try:
        client.stats()
    except mmcache.ClientClosed:
        client.close()
        sys.exit(7)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
client.encode([image(3)])[0].release()
lease.release()
client.close()
print("closed")
"""


def test_a_forked_child_leaves_it_alone(state: Path) -> None:
    done = ended(state, FORK)
    assert done.stdout.split()[1:] == ["7", "closed"], done.stderr
    assert done.returncode == 0


def test_importing_mmcache_loads_no_server() -> None:
    code = "import sys, mmcache; assert callable(mmcache.local); print('mmcache.server' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_threads_share_it(inside: mmcache.Client) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for number in range(20):
                inside.encode([image(1000 + (seed + number) % 30)])[0].release()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(7 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    eventually(lambda: inside.stats()["leases"]["active"] == 0, "every lease ends")


def test_asyncio_has_it_too(state: Path, run: loops.Run) -> None:
    async def use() -> None:
        async with mmcache.AsyncClient.local(state=state, **SMALL) as client:
            leases = await client.encode([image(300), png(301)])
            again = await client.encode([image(300)], priority="bulk")
            assert [lease.origin for lease in (*leases, *again)] == ["encoded", "encoded", "pool"]
            assert torch.equal(leases[0].tensor, again[0].tensor)
            for lease in (*leases, *again):
                lease.release()
            pids = (await client.stats())["decoders"]["pids"]
        assert not any(is_alive(pid) for pid in pids)
        with pytest.raises(mmcache.ClientClosed):
            await client.stats()
        with pytest.raises(mmcache.ConfigError, match="there is one"):
            await mmcache.AsyncClient.local(ranks=3)

    before = own_threads()
    run(use())
    assert own_threads() == before


def test_a_cancelled_start_ends_by_itself(state: Path, run: loops.Run) -> None:
    async def cancel() -> None:
        async def start() -> None:
            await mmcache.AsyncClient.local(state=state, **SMALL)

        task = asyncio.create_task(start())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = own_threads(), children()
    run(cancel())
    eventually(lambda: (own_threads(), children()) == before, "everything ends")
