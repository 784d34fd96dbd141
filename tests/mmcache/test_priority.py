"""The priority of a call, from whoever says it to the request that the sidecar serves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import mmcache
from mmcache.cli.app import cli
from mmcache.records import PRIORITIES
from mmcache.server.coordinator import Coordinator
from mmcache.server.requests import Request
from tests.mmcache.homes import RawClient, home_without_ranks, until
from tests.mmcache.refusing import RefusingSidecar
from tests.mmcache.support import SidecarProcess, encode_frame, image

KEY = mmcache.ContentKey(bytes(15) + b"k")


def never(wanted: bytes, times: int) -> bool:
    return False


@pytest.mark.parametrize(("said", "code"), [({}, 0), ({"priority": "interactive"}, 0), ({"priority": "bulk"}, 1)])
def test_every_call_says_it(tmp_path: Path, said: dict[str, Any], code: int) -> None:
    with RefusingSidecar(tmp_path, never) as sidecar, mmcache.connect(sidecar.path) as client:
        client.encode([None], keys=[KEY], **said)[0].release()
        client.submit([None], keys=[KEY], **said).result()[0].release()
        assert [asked.frame.priority for asked in sidecar.asked] == [code] * 2


def test_asyncio_says_it(tmp_path: Path) -> None:
    async def ask(sidecar: RefusingSidecar) -> None:
        async with mmcache.AsyncClient.connect(sidecar.path) as client:
            (await client.encode([None], keys=[KEY], priority="bulk"))[0].release()
            (await client.encode([None], keys=[KEY]))[0].release()
        assert [asked.frame.priority for asked in sidecar.asked] == [1, 0]

    with RefusingSidecar(tmp_path, never) as sidecar:
        asyncio.run(ask(sidecar))


def test_what_is_no_priority_is_refused(client: mmcache.Client) -> None:
    for call in (client.encode, client.submit):
        with pytest.raises(ValueError, match='priority must be "interactive" or "bulk"'):
            call([image(1)], priority="urgent")  # type: ignore[operator]


def test_the_request_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Request] = []
    monkeypatch.setattr(Coordinator, "serve_batch", lambda _, request: seen.append(request))

    async def ask() -> None:
        home = home_without_ranks(tmp_path)
        client = await RawClient.open(home)
        for code in range(len(PRIORITIES)):
            await client.send(encode_frame(bytes(16), request_id=code, priority=code))
        await until(lambda: len(seen) == 2, "both came")
        assert [request.priority for request in seen] == [0, 1]
        await client.send(encode_frame(bytes(16), request_id=9, priority=len(PRIORITIES)))
        await until(lambda: not home.connections, "it is forgotten")
        home.ingest.close()

    asyncio.run(ask())


def test_the_command_takes_it(shared_sidecar: SidecarProcess, tmp_path: Path) -> None:
    from PIL import Image

    Image.fromarray(image(77)).save(tmp_path / "a.png")
    command = ["encode", str(tmp_path / "a.png"), "--socket", str(shared_sidecar.socket)]
    done = CliRunner().invoke(cli, [*command, "--priority", "bulk"])
    assert (done.exit_code, "tokens" in done.output) == (0, True), done.output
    assert CliRunner().invoke(cli, [*command, "--priority", "urgent"]).exit_code == 2
