"""What is a secret in a text that people get to see: the passwords of URLs."""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"([a-z][a-z0-9+.-]*://[^\s:/@'\"]*):[^\s'\"]*@", re.IGNORECASE)
_PARAMETER = re.compile(r"([?&](?:password|passwd|secret|token)=)[^&\s'\"]*", re.IGNORECASE)


def redacted(text: str) -> str:
    """`text` with *** for every password of a URL in it."""
    return _PARAMETER.sub(r"\1***", _PASSWORD.sub(r"\1:***@", text)) if "://" in text else text
