"""The log: whole records for machines and people, repeats sampled, and no secret in it whatever happens."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mmcache
from mmcache.config_sources import load_settings
from mmcache.errors import ConfigError, PoolExhausted
from mmcache.redaction import redacted
from mmcache.server.logs import MAX_KINDS, MAX_TEXT, ConsoleFormatter, JsonFormatter, Repeats
from tests.mmcache.support import SidecarProcess, image

SEED = "0123456789abcdef"
MEDIA = b"\x89PNG\r\n\x1a\n" + b"WHAT-IS-IN-THE-PICTURE" * 20


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Log:
    """A logger with a handler as the sidecar has it."""

    def __init__(self, formatter: logging.Formatter, repeats: Repeats | None = None) -> None:
        self._stream = io.StringIO()
        handler = logging.StreamHandler(self._stream)
        handler.setFormatter(formatter)
        if repeats is not None:
            handler.addFilter(repeats)
        self.logger = logging.Logger("mmcache.test")
        self.logger.addHandler(handler)

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def record(self) -> dict[str, Any]:
        (line,) = self.lines
        found = json.loads(line)
        assert isinstance(found, dict)
        return found


def test_a_json_record_has_all_that_there_is() -> None:
    log = Log(JsonFormatter())
    error = PoolExhausted("no room")
    log.logger.error("it failed: %s", error, extra={"fields": {"items": 3, "level": "never in the place of another"}})
    record = log.record()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record.pop("time"))
    assert record == {
        "level": "error", "logger": "mmcache.test", "message": "it failed: no room [MMC411]", "items": 3,
        "error": "MMC411",
    }  # fmt: skip


def test_a_traceback_is_part_of_its_record() -> None:
    for formatter in (JsonFormatter(), ConsoleFormatter()):
        log = Log(formatter)
        try:
            raise RuntimeError("redis://:hunter2@host is not there\nsecond line")
        except RuntimeError:
            log.logger.exception("internal error")
        assert "hunter2" not in log.text
        assert "RuntimeError: redis://:***@host" in log.text
        if isinstance(formatter, JsonFormatter):
            assert "second line" in log.record()["exception"]
        else:
            assert all(line.startswith("    ") for line in log.lines[1:]), log.text


def test_no_text_looks_like_a_record_of_its_own() -> None:
    """Names of clients and paths of files are others' choice."""
    name = "x\n2026-01-01 00:00:00,000 ERROR mmcache: all is lost\r\x1b[31m"
    log = Log(ConsoleFormatter())
    log.logger.warning("%s came", name)
    assert len(log.lines) == 2
    assert log.lines[1].startswith("    2026")
    assert "\x1b" not in log.text
    assert "\r" not in log.text
    assert "\\x1b[31m" in log.text
    as_json = Log(JsonFormatter())
    as_json.logger.warning("%s came", name)
    assert as_json.record()["message"].count("\n") == 1


def test_a_message_is_bounded() -> None:
    log = Log(JsonFormatter())
    log.logger.error("%s", "x" * 1_000_000)
    assert len(log.text) < MAX_TEXT + 300
    assert "(1000000 characters)" in log.text


def test_repeats_are_sampled_and_counted() -> None:
    clock = Clock()
    repeats = Repeats(num_alike=3, window_s=60, clock=clock)
    log = Log(JsonFormatter(), repeats)
    for number in range(10):
        log.logger.warning("client %d is gone", number)
    log.logger.warning("another kind")
    log.logger.error("client %d is gone", 11)
    assert [json.loads(line)["message"] for line in log.lines] == [
        "client 0 is gone", "client 1 is gone", "client 2 is gone", "another kind", "client 11 is gone",
    ]  # fmt: skip
    assert repeats.num_suppressed == 7
    clock.now = 60.0
    log.logger.warning("client %d is gone", 12)
    assert json.loads(log.lines[-1])["suppressed"] == 7
    log.logger.warning("client %d is gone", 13)
    assert "suppressed" not in json.loads(log.lines[-1])
    assert repeats.num_suppressed == 7


def test_the_console_says_how_many_were_not_shown() -> None:
    clock = Clock()
    log = Log(ConsoleFormatter(), Repeats(num_alike=1, window_s=1, clock=clock))
    for _ in range(3):
        log.logger.info("again")
    clock.now = 2.0
    log.logger.info("again")
    assert [line.partition("mmcache.test: ")[2] for line in log.lines] == [
        "again", "again (and 2 more like it were not shown)",
    ]  # fmt: skip


def test_debug_records_all_pass() -> None:
    log = Log(JsonFormatter(), Repeats(num_alike=1))
    for number in range(50):
        log.logger.debug("request %d", number)
    assert len(log.lines) == 50


def test_kinds_are_bounded() -> None:
    repeats = Repeats(num_alike=1)
    for number in range(3 * MAX_KINDS):
        assert repeats.filter(logging.LogRecord("x", logging.INFO, "", 0, f"kind {number}", (), None))
    assert len(repeats._kinds) == MAX_KINDS


def test_the_end_says_what_was_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    repeats = Repeats(num_alike=1)
    repeats.finish()
    assert caplog.records == []
    for _ in range(5):
        repeats.filter(logging.LogRecord("x", logging.INFO, "", 0, "again", (), None))
    with caplog.at_level(logging.INFO):
        repeats.finish()
    assert "4 log records were not shown" in caplog.text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:hunter2@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://me:hunter2@host", "rediss://me:***@host"),
        ("redis://me:hun@ter:2@host,redis://me:other@host2", "redis://me:***@host2"),
        ("store = 'redis+cluster://u:hunter2@h' is away", "store = 'redis+cluster://u:***@h' is away"),
        ("redis://h/0?password=hunter2&db=1", "redis://h/0?password=***&db=1"),
        ("file:///a/b:c@d", "file:///a/b:c@d"),
        ("at 12:30 me@host", "at 12:30 me@host"),
        ("http://127.0.0.1:9464/", "http://127.0.0.1:9464/"),
    ],
)
def test_passwords_of_urls_are_not_shown(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_a_wrong_setting_shows_no_password() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({"store": "ftp://me:hunter2@host/x"}, {"HOME": "/nonexistent"})
    assert "hunter2" not in str(caught.value)
    assert "ftp://me:***@host/x" in str(caught.value)


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """The records of a sidecar in which much went right and wrong."""
    folder = tmp_path_factory.mktemp("logs")
    (folder / "state").mkdir(mode=0o700)
    (folder / "state" / "seed").write_text(f"{SEED}\n")
    (folder / "state" / "seed").chmod(0o600)
    with (
        SidecarProcess(folder, log_format="json", log_level="debug", http="127.0.0.1:0") as sidecar,
        sidecar.connect(name="engine\nwith a strange name") as client,
    ):
        for _ in range(2):
            client.encode([image(1), image(2)])[0].release()
        with pytest.raises(mmcache.EncodeError):
            client.encode([MEDIA, image(3)])
    yield [json.loads(line) for line in sidecar.log().splitlines()]
    assert SEED not in (text := sidecar.log())
    assert str(int(SEED, 16)) not in text
    assert "WHAT-IS-IN" not in text
    assert "x89PNG" not in text


def test_every_line_of_a_sidecar_is_a_record(logged: list[dict[str, Any]]) -> None:
    assert all({"time", "level", "logger", "message"} <= record.keys() for record in logged)
    assert {"info", "debug"} <= {record["level"] for record in logged}


def test_a_request_is_one_line_at_debug(logged: list[dict[str, Any]]) -> None:
    requests = [record for record in logged if record["logger"] == "mmcache.server.settled"]
    assert [(each["outcome"], each["items"], each["failed"]) for each in requests] == [
        ("miss", 2, 0), ("hit", 2, 0), ("failed", 2, 1),
    ]  # fmt: skip
    assert all(each["client"] == "engine\nwith a strange name" for each in requests)
    assert all(0 < each["seconds"] < 600 for each in requests)
    assert all(each["message"].startswith(f"request {each['request']} of engine") for each in requests)


def test_a_sidecar_logs_to_people_unless_told_otherwise(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path) as sidecar:
        sidecar.stop()
    assert re.search(r"^\d{4}-\d\d-\d\d [\d:,]+ INFO mmcache\.server\.sidecar: stopping", sidecar.log(), re.MULTILINE)


def test_a_format_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"log_format = 'xml' .* must be console or json"):
        load_settings({"log_format": "xml"}, {"HOME": "/nonexistent"})
