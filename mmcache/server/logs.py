"""The sidecar's log: one record a line for machines, or for people; repeats sampled; no password in it.

No line has media, keys' seeds or bytes of embeddings: nothing is logged but names, counts, sizes and reasons.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mmcache.config import Settings
from mmcache.redaction import redacted

NUM_ALIKE = 10
WINDOW_S = 60.0
"""Of records that are alike, so many are shown in so many seconds."""
MAX_KINDS = 1024
MAX_TEXT = 8000
"""Characters of a message; the end of what is longer is left out."""
_ERROR_ID = re.compile(r"\[(MMC\d{3})\]")
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}

log = logging.getLogger(__name__)


def configure(settings: Settings) -> Repeats:
    """Log to standard error as the settings say, and nowhere else. Returns the filter that samples repeats."""
    repeats = Repeats()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else ConsoleFormatter())
    handler.addFilter(repeats)
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    return repeats


def num_suppressed() -> int:
    """Records that were not shown, as there were too many like them."""
    filters = [each for handler in logging.getLogger().handlers for each in handler.filters]
    return sum(each.num_suppressed for each in filters if isinstance(each, Repeats))


@dataclass(slots=True)
class _Alike:
    """Records of one kind since `since_s`."""

    since_s: float
    num_shown: int = 0
    num_suppressed: int = 0


class Repeats(logging.Filter):
    """Lets `num_alike` records of a kind pass in a window, and says with the next one how many there were beside.

    A kind is a place in the code: its logger, level and words, whatever is filled in. Of debug records all pass: who
    asks for them wants each.

    Attributes:
        num_suppressed: records that did not pass.
    """

    def __init__(
        self, num_alike: int = NUM_ALIKE, window_s: float = WINDOW_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self.num_suppressed = 0
        self._num_alike = num_alike
        self._window_s = window_s
        self._clock = clock
        self._kinds: OrderedDict[tuple[str, int, str], _Alike] = OrderedDict()
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is shown. What is counted of its kind is noted in it."""
        if record.levelno <= logging.DEBUG:
            return True
        with self._lock:
            return self._passes(record, (record.name, record.levelno, str(record.msg)))

    def _passes(self, record: logging.LogRecord, kind: tuple[str, int, str]) -> bool:
        now = self._clock()
        alike = self._kinds.get(kind)
        if alike is None or now - alike.since_s >= self._window_s:
            if alike is not None and alike.num_suppressed:
                record.suppressed = alike.num_suppressed
            alike = self._kinds[kind] = _Alike(now)
            self._kinds.move_to_end(kind)
            if len(self._kinds) > MAX_KINDS:
                self._kinds.popitem(last=False)
        if alike.num_shown < self._num_alike:
            alike.num_shown += 1
            return True
        alike.num_suppressed += 1
        self.num_suppressed += 1
        return False

    def finish(self) -> None:
        """Say at the end how many records were not shown."""
        if self.num_suppressed:
            log.info("%d log records were not shown: too many like them came at once", self.num_suppressed)


class ConsoleFormatter(logging.Formatter):
    """Time, level, logger, message; further lines are indented, so that no text looks like a record of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # what logging calls it
        """The first line, and what else belongs to the message."""
        record.message = _message(record).replace("\n", "\n    ")
        if suppressed := getattr(record, "suppressed", 0):
            record.message += f" (and {suppressed} more like it were not shown)"
        return super().formatMessage(record)

    def formatException(self, ei: logging._SysExcInfoType) -> str:  # noqa: N802
        """A traceback, without passwords."""
        return f"    {_clean(super().formatException(ei))}".replace("\n", "\n    ")


class JsonFormatter(logging.Formatter):
    """One JSON object a line.

    Always `time` (UTC), `level`, `logger`, `message`; if there is one, `error` (its id) and `exception` (a traceback);
    `suppressed` (how many like it were not shown), and what the record has in `fields`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """A line."""
        message = _message(record)
        whole, milliseconds = time.gmtime(record.created), int(record.msecs)
        shown: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', whole)}.{milliseconds:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, Mapping):
            shown |= {name: value for name, value in fields.items() if name not in shown}
        if ids := _ERROR_ID.findall(message):
            shown["error"] = ids[-1]
        if suppressed := getattr(record, "suppressed", 0):
            shown["suppressed"] = suppressed
        if record.exc_info:
            shown["exception"] = _clean(self.formatException(record.exc_info))
        return json.dumps(shown, default=str)


def _message(record: logging.LogRecord) -> str:
    return _clean(record.getMessage())


def _clean(text: str) -> str:
    shown = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text)} characters)"
    return redacted(shown).translate(_CONTROLS)
