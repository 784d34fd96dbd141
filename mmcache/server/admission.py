"""How much one connection may have open at once, and what becomes of what is beyond it."""

from __future__ import annotations

from mmcache.errors import ProtocolError, TooManyRequests
from mmcache.records import MAX_REQUESTS

MAX_REFUSED = 3 * MAX_REQUESTS
"""Refusals in a row after which the connection is cut: its client does not wait for answers."""


class Admission:
    """Lets the requests and questions of one connection in. What is refused is answered at once."""

    def __init__(self) -> None:
        self._num_refused = 0

    def check(self, num_open: int) -> None:
        """Let one more in beside `num_open` of its kind.

        Raises:
            TooManyRequests: as many are open as may be. The answer is to say so.
            ProtocolError: and `MAX_REFUSED` others were refused since one was let in.
        """
        if num_open < MAX_REQUESTS:
            self._num_refused = 0
            return
        self._num_refused += 1
        if self._num_refused > MAX_REFUSED:
            raise ProtocolError(f"{MAX_REFUSED} frames came beyond the {MAX_REQUESTS} requests that may be open")
        raise TooManyRequests(f"{MAX_REQUESTS} requests of this connection are open; wait for their answers")
