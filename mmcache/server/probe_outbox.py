"""Probes on their way to a decoder process: in one frame, if they lie in one memfd and come in one turn of the loop."""

from __future__ import annotations

import asyncio

from mmcache.server.children import Child
from mmcache.server.decode_job import SharedDescriptor
from mmcache.server.decode_records import MAX_PROBES, pack_probes


class ProbeOutbox:
    """What one process is to be sent; its order stays as it was added."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._records: list[bytes] = []
        self._memory: SharedDescriptor | None = None
        self._child: Child | None = None
        self._is_due = False

    def add(self, child: Child, record: bytes, memory: SharedDescriptor) -> None:
        """One more, which lies in `memory`. What is sent to the process besides is to be preceded by `flush`."""
        if memory is not self._memory or child is not self._child or len(self._records) == MAX_PROBES:
            self.flush()
            memory.share()  # its item may be given up before it is sent
            self._memory, self._child = memory, child
        self._records.append(record)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._flush)

    def flush(self) -> None:
        """Send what was added."""
        if self._memory is not None and self._child is not None:
            self._child.send(pack_probes(self._records, self._memory.fd))
            self._memory.release()
            self._records, self._memory, self._child = [], None, None

    def _flush(self) -> None:
        self._is_due = False
        self.flush()
