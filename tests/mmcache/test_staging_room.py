"""Room for pixels: one client's region and those of all, when they are full; and what is refused before it has room."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import mmcache
from mmcache.framing import Kind, OutgoingFrame, close_all, pack_frame, parse
from mmcache.handshake import shake_hands
from mmcache.media import ArrayHeader
from mmcache.protocol import Bye, Stage, StagePlaces, Withdraw
from mmcache.records import KEY_BYTES, MAX_REQUESTS, TOKEN
from mmcache.transport import BlockingChannel
from tests.mmcache.staging_clients import is_idle, staging
from tests.mmcache.support import SidecarProcess, eventually, image

SIDE = 340
"""Three pictures of this side fill a region of 1 MiB."""


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """A sidecar with room for the regions of two clients, of 1 MiB each."""
    settings = {"staging_bytes": "1MiB", "staging_bytes_total": "2MiB"}
    with SidecarProcess(tmp_path_factory.mktemp("tight"), **settings) as sidecar:
        yield sidecar


@pytest.fixture(autouse=True)
def no_region_is_left(tight: SidecarProcess) -> Iterator[None]:
    yield
    eventually(lambda: staging(tight)["regions"] == 0, "a client that says goodbye leaves nothing")
    assert is_idle(tight)


def pictures(*seeds: int) -> list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    return [image(seed, SIDE, SIDE) for seed in seeds]


def test_a_full_region_waits_then_says_so_and_what_never_fits_fails_at_once(tight: SidecarProcess) -> None:
    with tight.connect(timeout=4.0) as client:
        refs = client.stage_all(pictures(0, 1, 2))
        with pytest.raises(mmcache.StagingExhausted, match="until the deadline: 3 slices of this client"):
            client.stage_all(pictures(4))
        client.cancel(*refs)
    with tight.connect(timeout=600.0) as client:
        with pytest.raises(mmcache.StagingExhausted, match="never fit"):
            client.stage(image(5, 700, 700))
        for ref in client.stage_all(pictures(0, 1, 2)):
            client.encode([ref])[0].release()


def test_more_at_once_than_a_region_holds_fails_at_once(tight: SidecarProcess) -> None:
    with tight.connect(timeout=600.0) as client:
        other = client.stage(image(9))
        with pytest.raises(mmcache.StagingExhausted):
            client.stage_all(pictures(0, 1, 2, 3))
        client.cancel(other)
        client.cancel(*client.stage_all(pictures(0, 1, 2)))


def test_room_comes_back_while_a_stage_waits(tight: SidecarProcess) -> None:
    with tight.connect() as client:
        refs = client.stage_all(pictures(0, 1, 2))
        waiting: list[mmcache.StagedRef] = []
        thread = threading.Thread(target=lambda: waiting.append(client.stage(image(4, SIDE, SIDE))))
        thread.start()
        client.encode(refs[:1])[0].release()
        thread.join(20)
        assert waiting
        client.encode([*refs[1:], *waiting])


def test_calls_that_need_the_whole_region_take_turns(tight: SidecarProcess) -> None:
    """Two that had half of it each would wait on each other."""
    with tight.connect(timeout=60.0) as client:

        def stage_and_encode(_: int) -> None:
            for lease in client.encode(client.stage_all(pictures(0, 1, 2))):
                lease.release()

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(stage_and_encode, range(12)))
        assert staging(tight)["bytes_used"] == 0


def test_threads_that_stage_first_at_the_same_time_share_one_region(tight: SidecarProcess) -> None:
    for turn in range(3):
        with tight.connect() as client, ThreadPoolExecutor(8) as threads:
            list(threads.map(client.stage, [image(200 + 8 * turn + seed) for seed in range(8)]))
            assert (staging(tight)["regions"], staging(tight)["bytes_total"]) == (1, 1 << 20)
        eventually(lambda: staging(tight)["regions"] == 0, "it is gone")


def test_the_regions_of_all_clients_are_bounded(tight: SidecarProcess) -> None:
    clients = [tight.connect() for _ in range(3)]
    for client in clients[:2]:
        client.stage(image(1))
    with pytest.raises(mmcache.StagingExhausted, match="staging_bytes_total"):
        clients[2].stage(image(1))
    clients[0].close()
    eventually(lambda: staging(tight)["regions"] == 1, "its region is gone")
    clients[2].stage(image(1))
    for client in clients:
        client.close()


def test_rows_that_are_none_are_named(tight: SidecarProcess) -> None:
    rows = torch.zeros(24, 588)
    with tight.connect() as client:
        for wrong, grid, message in (
            (rows.double(), (1, 4, 6), "float32, float16 or bfloat16"),
            (rows, (1, 4, 4), "has 16 rows"),
            (rows, (1, 4), r"patches in \(t, h, w\)"),
            (rows[0], (1, 4, 6), r"patch rows are"),
            ("rows", (1, 4, 6), r"patch rows are"),
        ):
            with pytest.raises(mmcache.UnsupportedItem, match=message):
                client.stage(wrong, grid=grid)  # type: ignore[arg-type]
        with pytest.raises(mmcache.UnsupportedItem, match="only uint8 arrays"):
            client.stage(b"a file")
        with pytest.raises(mmcache.UnsupportedItem):
            client.stage(np.zeros((3, 5), np.float32))


@pytest.mark.parametrize(
    ("rows", "grid", "message"),
    [
        (torch.zeros(24, 12), (1, 4, 6), "588 values"),
        (torch.zeros(15, 588), (1, 3, 5), "multiples of 2"),
        (torch.zeros(40, 588), (10, 2, 2), "1 to 4 frames"),
        (torch.zeros(1, 588).expand(2 * 514, -1), (1, 2, 514), "sides of 2 to 512 patches"),
        (torch.zeros(1, 588).expand(132 * 132, -1), (1, 132, 132), r"16384 patches before padding \(max_patches\)"),
        (torch.zeros(1, 588).expand(2 * 68 * 68, -1), (2, 68, 68), r"4096 patches .* \(max_patches_per_frame\)"),
    ],
)
def test_rows_that_the_model_does_not_take_are_refused_before_they_are_written(
    tight: SidecarProcess, rows: torch.Tensor, grid: tuple[int, int, int], message: str
) -> None:
    with tight.connect() as client:
        with pytest.raises(mmcache.UnsupportedItem, match=message):
            client.stage(rows.bfloat16(), grid=grid)
        assert staging(tight)["regions"] == 0


def test_a_chunk_of_too_many_frames_is_refused_before_it_is_written(tight: SidecarProcess) -> None:
    with tight.connect() as client:
        with pytest.raises(mmcache.UnsupportedItem, match="frames_per_chunk"):
            client.stage(np.zeros((5, 28, 28, 3), np.uint8))
        assert staging(tight)["regions"] == 0


def stage_frame(ask_id: int, height: int) -> OutgoingFrame:
    """One slice of 2,100 bytes a row."""
    stage = Stage(
        ask_id=ask_id, timeout_ms=600_000, kinds=["array"],
        headers=[ArrayHeader(shape=(height, 700, 3)).canonical()], sizes=[2100 * height],
    )  # fmt: skip
    return pack_frame(Kind.STAGE, stage, ask_id.to_bytes(KEY_BYTES, "little"))


def test_one_question_too_many_is_answered_and_costs_nothing_else(tight: SidecarProcess) -> None:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(tight.socket))
    channel = BlockingChannel(sock)
    _, control_fd = shake_hands(channel, tight.socket, "test", "", time.monotonic() + 20)
    os.close(control_fd)

    def answer() -> StagePlaces:
        while (frame := channel.receive(time.monotonic() + 20)).kind != Kind.STAGE_PLACES:
            close_all(frame.fds)
        close_all(frame.fds)
        return parse(StagePlaces, frame)

    channel.send(stage_frame(0, 499))
    first = answer()
    assert first.errors == [""], "it fills the region"
    for ask_id in range(1, MAX_REQUESTS + 2):
        channel.send(stage_frame(ask_id, 499))
    refused = answer()
    assert (refused.ask_id, refused.errors) == (MAX_REQUESTS + 1, ["TooManyRequests"])
    assert f"{MAX_REQUESTS} requests of this connection are open" in refused.reasons[0]
    channel.send(pack_frame(Kind.WITHDRAW, Withdraw(), TOKEN.pack(first.tokens[0])))
    assert (answer().ask_id, staging(tight)["cancelled"] > 0) == (1, True), "the others go on"
    channel.send(pack_frame(Kind.BYE, Bye()))
    channel.close()
