"""A sidecar that has too much queued: what it says on the wire, and who asks again."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import mmcache
from mmcache.encode_call import EncodeCall
from mmcache.framing import Kind, parse
from mmcache.keys import ContentKey
from mmcache.parts import Part
from mmcache.protocol import MAX_RETRY_S, Unsettled
from mmcache.retries import LEAST_PAUSE_S, MAX_RETRIES, pause_s
from mmcache.server.coordinator import Coordinator
from mmcache.server.requests import Request
from tests.mmcache.homes import RawClient, home_without_ranks, until
from tests.mmcache.loops import Run
from tests.mmcache.refusing import HINT_S, RefusingSidecar
from tests.mmcache.support import encode_frame, eventually


def key(number: int) -> ContentKey:
    return ContentKey(number.to_bytes(16, "little"))


KEYS = [key(number) for number in range(1, 5)]
ITEMS = [None] * len(KEYS)


def is_even(wanted: bytes, times: int) -> bool:
    """Even keys are refused twice."""
    return wanted[0] % 2 == 0 and times < 2


def always(wanted: bytes, times: int) -> bool:
    return True


def kinds(results: list[mmcache.Lease]) -> list[type]:
    for result in results:
        if isinstance(result, mmcache.Lease):
            result.release()
    return [type(result) for result in results]


def test_the_error_says_when_to_come_again(tmp_path: Path) -> None:
    with RefusingSidecar(tmp_path, is_even) as sidecar, mmcache.connect(sidecar.path) as client:
        results = client.encode(ITEMS, "return", keys=KEYS)
        refused = [result for result in results if isinstance(result, mmcache.Overloaded)]
        assert [(error.index, error.retry_after_s) for error in refused] == [(1, HINT_S), (3, HINT_S)]
        assert "16384 items are queued" in str(refused[0])
        assert kinds(results) == [mmcache.Lease, mmcache.Overloaded] * 2
        assert len(sidecar.asked) == 1, "nobody asked it to ask again"


def test_only_what_was_refused_is_asked_for_again(tmp_path: Path) -> None:
    with RefusingSidecar(tmp_path, is_even) as sidecar, mmcache.connect(sidecar.path, retry_overloaded=2) as client:
        leases = client.encode(ITEMS, keys=KEYS, priority="bulk", consumers=3)
        assert [lease.key for lease in leases] == KEYS
        assert leases[1].tensor.tolist() == [[0.0, 1.0, 2.0, 3.0]]
        assert [asked.keys for asked in sidecar.asked] == [KEYS, KEYS[1::2], KEYS[1::2]]
        first, *again = [asked.frame for asked in sidecar.asked]
        assert [(frame.priority, frame.consumers, frame.has_more) for frame in again] == [(1, 3, False)] * 2
        assert first.call_id not in {frame.call_id for frame in again}
        assert kinds(leases) == [mmcache.Lease] * 4
    assert sidecar.cancelled == []


def test_the_tries_have_an_end(tmp_path: Path) -> None:
    with RefusingSidecar(tmp_path, always) as sidecar, mmcache.connect(sidecar.path, retry_overloaded=2) as client:
        with pytest.raises(mmcache.EncodeError) as caught:
            client.encode(ITEMS, keys=KEYS)
        assert {type(result) for result in caught.value.results} == {mmcache.Overloaded}
        assert [result.index for result in caught.value.results if isinstance(result, mmcache.ItemError)] == [
            0,
            1,
            2,
            3,
        ]
        assert [sidecar.times(wanted) for wanted in KEYS] == [3] * 4


def test_nobody_waits_for_what_would_be_too_late(tmp_path: Path) -> None:
    with RefusingSidecar(tmp_path, always, hint_s=MAX_RETRY_S) as sidecar:
        with mmcache.connect(sidecar.path, retry_overloaded=5, timeout=20) as client:
            (error,) = client.encode([None], "return", keys=KEYS[:1])
        assert isinstance(error, mmcache.Overloaded)
        assert error.retry_after_s == MAX_RETRY_S
        assert len(sidecar.asked) == 1


def test_a_handle_asks_again_while_it_is_polled(tmp_path: Path) -> None:
    with RefusingSidecar(tmp_path, is_even) as sidecar, mmcache.connect(sidecar.path, retry_overloaded=2) as client:
        handle = client.submit(ITEMS, keys=KEYS)
        eventually(handle.poll, "it is done")
        assert kinds(handle.result()) == [mmcache.Lease] * 4
        assert len(sidecar.asked) == 3
        other = client.submit(ITEMS, keys=[key(number) for number in range(11, 15)])
        assert kinds(other.result()) == [mmcache.Lease] * 4


def test_a_result_waits_no_longer_than_it_was_told(tmp_path: Path) -> None:
    with RefusingSidecar(tmp_path, always, hint_s=10.0) as sidecar:
        with mmcache.connect(sidecar.path, retry_overloaded=1) as client:
            handle = client.submit(ITEMS, keys=KEYS)
            with pytest.raises(TimeoutError, match="the call goes on"):
                handle.result(timeout=0.05)
            assert not handle.poll()
            assert handle.cancel()
            with pytest.raises(mmcache.RequestCancelled):
                handle.result()
        assert len(sidecar.asked) == 1


def test_who_waits_to_ask_again_holds_nobody_up(tmp_path: Path) -> None:
    """Of two threads of one client one waits for its turn; the calls of the other go on."""

    def refuses(wanted: bytes, times: int) -> bool:
        return wanted == KEYS[0] and times == 0

    found: list[type] = []
    with (
        RefusingSidecar(tmp_path, refuses, hint_s=0.2) as sidecar,
        mmcache.connect(sidecar.path, retry_overloaded=1) as client,
    ):
        waiter = threading.Thread(target=lambda: found.extend(kinds(client.encode([None], keys=KEYS[:1]))))
        waiter.start()
        eventually(lambda: sidecar.times(KEYS[0]) == 1, "it was refused")
        for number in range(50):
            client.encode([None], keys=[key(100 + number)])[0].release()
        waiter.join()
        assert found == [mmcache.Lease]
        assert sidecar.times(KEYS[0]) == 2


def test_asyncio_asks_again(tmp_path: Path, run: Run) -> None:
    async def ask(sidecar: RefusingSidecar) -> None:
        async with mmcache.AsyncClient.connect(sidecar.path, retry_overloaded=2) as client:
            leases = await client.encode(ITEMS, keys=KEYS, priority="bulk")
            assert kinds(leases) == [mmcache.Lease] * 4
        assert [asked.keys for asked in sidecar.asked] == [KEYS, KEYS[1::2], KEYS[1::2]]
        assert {asked.frame.priority for asked in sidecar.asked} == {1}

    with RefusingSidecar(tmp_path, is_even) as sidecar:
        run(ask(sidecar))


def test_a_cancelled_task_asks_no_more(tmp_path: Path, run: Run) -> None:
    async def ask(sidecar: RefusingSidecar) -> None:
        async with mmcache.AsyncClient.connect(sidecar.path, retry_overloaded=5) as client:
            task = asyncio.create_task(client.encode(ITEMS, keys=KEYS))
            await until(lambda: bool(sidecar.asked), "it was asked for")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert len(sidecar.asked) == 1

    with RefusingSidecar(tmp_path, always, hint_s=5.0) as sidecar:
        run(ask(sidecar))


def test_parts_of_a_long_call_are_asked_again_each_for_itself(tmp_path: Path, one_item_a_part: None) -> None:
    """More parts than are asked for at once: what was refused comes between them, and every item at its place."""
    with (
        RefusingSidecar(tmp_path, lambda wanted, times: times < 1) as sidecar,
        mmcache.connect(sidecar.path, retry_overloaded=1) as client,
    ):
        items = [number.to_bytes(2, "little") for number in range(70)]
        wanted = [client.key(item) for item in items]
        leases = client.encode(items)
        assert [lease.key for lease in leases] == wanted
        assert [sidecar.times(each) for each in wanted] == [2] * 70
        kinds(leases)


@pytest.mark.parametrize("attempt", [0, 1, 4])
def test_pauses_spread_and_grow(attempt: int) -> None:
    pauses = [pause_s(1.0, attempt) for _ in range(200)]
    assert all(0.5 <= pause / 2**attempt <= 1.5 for pause in pauses)
    assert max(pauses) - min(pauses) > 0.5 * 2**attempt
    assert 0.5 * LEAST_PAUSE_S <= pause_s(0.0, 0) <= 1.5 * LEAST_PAUSE_S


@pytest.mark.parametrize("wrong", [-1, MAX_RETRIES + 1, True])
def test_a_wrong_number_of_tries_is_refused(tmp_path: Path, wrong: int) -> None:
    with pytest.raises(ValueError, match="retry_overloaded must be 0 to 100"):
        mmcache.connect(tmp_path / "none", retry_overloaded=wrong)
    with pytest.raises(ValueError, match="retry_overloaded must be 0 to 100"):
        mmcache.AsyncClient.connect(tmp_path / "none", retry_overloaded=wrong)


def test_the_hint_goes_out_beside_the_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest of a frame's hints, within bounds; the next frame says nothing of it."""

    def refuse(home: Coordinator, request: Request) -> None:
        request.fail(0, mmcache.Overloaded("full", 2.5))
        request.fail(1, mmcache.Overloaded("full", 0.5))
        request.flush()
        request.fail(2, mmcache.NoRanks("all are dead"))
        request.flush()
        request.fail(3, mmcache.Overloaded("full", 1e9))
        request.flush()

    async def ask() -> None:
        home = home_without_ranks(tmp_path)
        monkeypatch.setattr(Coordinator, "serve_batch", refuse)
        client = await RawClient.open(home)
        await client.send(encode_frame(b"".join(KEYS)))
        frames = []
        while len(frames) < 3:
            if (frame := await client.receive()).kind == Kind.RESULTS:
                frames.append(parse(Unsettled, frame))
        assert [(frame.failed, frame.retry_after_s) for frame in frames] == [
            ([0, 1], 2.5),
            ([2], 0.0),
            ([3], MAX_RETRY_S),
        ]
        assert frames[1].errors == ["NoRanks"]
        await client.close(home)
        home.ingest.close()

    asyncio.run(ask())


def test_a_pause_is_no_busy_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []
    next_part = EncodeCall.next_part

    def counted(call: EncodeCall) -> Part | None:
        looks.append(None)
        return next_part(call)

    monkeypatch.setattr(EncodeCall, "next_part", counted)
    with (
        RefusingSidecar(tmp_path, lambda wanted, times: times < 1, hint_s=0.2) as sidecar,
        mmcache.connect(sidecar.path, retry_overloaded=1) as client,
    ):
        client.encode([None], keys=KEYS[:1])[0].release()
    assert len(looks) < 10
