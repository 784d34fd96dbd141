"""Failures of a rank's work as text for a message: whatever a checkpoint holds, it travels and ends no process."""

from __future__ import annotations

from encoder.errors import EncoderError
from ipc.errors import IpcError

MAX_REASON = 4000
FAILURES: tuple[type[Exception], ...] = (
    EncoderError,
    IpcError,
    ArithmeticError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What is raised on purpose, and what torch and Python raise of values that nobody foresaw: work has failed, and the
process goes on."""


def reason_of(error: Exception) -> str:
    """Return what to tell of an error: at most `MAX_REASON` characters, all of which can be encoded."""
    is_foreseen = isinstance(error, EncoderError | IpcError)  # its text is made for users
    text = str(error) if is_foreseen else f"{type(error).__name__}: {error}"
    text = text[: MAX_REASON + 1].encode(errors="backslashreplace").decode()
    return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 3]}..."
