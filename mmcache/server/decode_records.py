"""What the coordinator and a decoder say to each other about every item: packed records, every length checked."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from mmcache.errors import ProtocolError
from mmcache.framing import Frame, Kind, Message, OutgoingFrame, pack_frame, parse
from mmcache.records import KEY_BYTES

_PROBE = struct.Struct(f"<IHHHxxQQQ{KEY_BYTES}s")
"""Job id, bytes of namespace, kind and header, offset and bytes of the item in its memory, where its pixels go, key."""
_FILL = struct.Struct("<IQ")
_PROBED = struct.Struct("<IIII")
_JOB = struct.Struct("<I")

NOWHERE = (1 << 64) - 1
"""As a target: the item is probed, and filled later."""
MAX_PROBES = 32
"""Items that one PROBE names."""
MAX_FILLED = 64
"""Jobs that one FILLED names."""


class Probe(NamedTuple):
    """Hash an item, compare with its key, read its header; answered by PROBED.

    `target`: where in the ingest region its pixels go at once, then answered by FILLED; or `NOWHERE`. A frame has one
    or several, and carries the memfd that they are in.
    """

    job_id: int
    namespace: str
    kind: str
    header: bytes
    offset: int
    nbytes: int
    target: int
    key: bytes


class Answer(NamedTuple):
    """What a decoder says of a job: sizes of its pixels, that they are in place (`is_filled`), or why neither.

    `num_frames`: of a video chunk; 0 for a picture. `error`: empty unless it failed; `reason`, then, is for people.
    """

    job_id: int
    is_filled: bool
    height: int = 0
    width: int = 0
    num_frames: int = 0
    error: str = ""
    reason: str = ""


class Failed(Message):
    """The header of a PROBED or FILLED that says why there is none; the error ended the job."""

    job_id: Annotated[int, Field(ge=0, lt=1 << 32)]
    error: str
    reason: str


def probe_record(probe: Probe) -> bytes:
    """One probe in a PROBE."""
    namespace, kind = probe.namespace.encode(), probe.kind.encode()
    head = _PROBE.pack(
        probe.job_id, len(namespace), len(kind), len(probe.header), probe.offset, probe.nbytes, probe.target, probe.key
    )
    return b"".join((head, namespace, kind, probe.header))


def pack_probes(records: Sequence[bytes], fd: int) -> OutgoingFrame:
    """The frame of probes in one memfd, at most `MAX_PROBES`. `fd` stays the caller's."""
    return pack_frame(Kind.PROBE, None, b"".join(records), (fd,))


def parse_probes(frame: Frame) -> list[Probe]:
    """Read a PROBE. Raises `ProtocolError` if its lengths do not add up."""
    body, probes, start = frame.body, list[Probe](), 0
    while start < len(body):
        namespace_at = start + _PROBE.size
        if namespace_at > len(body):
            raise ProtocolError(f"PROBE has {len(body)} bytes of body, not {namespace_at} or more")
        job_id, namespace_bytes, kind_bytes, header_bytes, offset, nbytes, target, key = _PROBE.unpack_from(body, start)
        kind_at = namespace_at + namespace_bytes
        header_at = kind_at + kind_bytes
        start = header_at + header_bytes
        if start > len(body):
            raise ProtocolError(f"PROBE has {len(body)} bytes of body, not {start} or more")
        namespace, kind = body[namespace_at:kind_at].decode(), body[kind_at:header_at].decode()
        probes.append(Probe(job_id, namespace, kind, body[header_at:start], offset, nbytes, target, key))
    return probes


def pack_fill(job_id: int, target: int) -> OutgoingFrame:
    """Decode a probed item into the ingest region; answered by FILLED."""
    return pack_frame(Kind.FILL, None, _FILL.pack(job_id, target))


def parse_fill(frame: Frame) -> tuple[int, int]:
    """Job id and target of a FILL. Raises `ProtocolError`."""
    job_id, target = _FILL.unpack(_exactly(frame, _FILL.size))
    return job_id, target


def pack_drop(job_id: int) -> OutgoingFrame:
    """Forget a probed item."""
    return pack_frame(Kind.DROP, None, _JOB.pack(job_id))


def parse_drop(frame: Frame) -> int:
    """Job id of a DROP. Raises `ProtocolError`."""
    (job_id,) = _JOB.unpack(_exactly(frame, _JOB.size))
    return int(job_id)


def pack_probed(job_id: int, height: int, width: int, num_frames: int) -> OutgoingFrame:
    """The size of an item's pixels."""
    return pack_frame(Kind.PROBED, None, _PROBED.pack(job_id, height, width, num_frames))


def pack_filled(job_ids: Sequence[int]) -> OutgoingFrame:
    """The pixels of these, in the order in which they were asked for, are in place; at most `MAX_FILLED`."""
    return pack_frame(Kind.FILLED, None, b"".join(map(_JOB.pack, job_ids)))


def pack_failed(kind: Kind, job_id: int, error: str, reason: str) -> OutgoingFrame:
    """Instead of a PROBED or FILLED."""
    return pack_frame(kind, Failed(job_id=job_id, error=error, reason=reason))


def parse_answers(frame: Frame) -> list[Answer]:
    """The answers in a PROBED or FILLED. The process that sent it reads files of strangers, and may not be itself.

    Raises:
        ProtocolError: it is neither, or its lengths do not add up.
    """
    if frame.kind not in (Kind.PROBED, Kind.FILLED):
        raise ProtocolError(f"a decoder sent a frame of kind {frame.kind}")
    is_filled = frame.kind == Kind.FILLED
    if frame.header:
        failed = parse(Failed, frame)
        return [Answer(failed.job_id, is_filled, error=failed.error, reason=failed.reason)]
    body = frame.body
    if not is_filled:
        job_id, height, width, num_frames = _PROBED.unpack(_exactly(frame, _PROBED.size))
        return [Answer(job_id, False, height, width, num_frames)]
    if not body or len(body) % _JOB.size or len(body) > MAX_FILLED * _JOB.size:
        raise ProtocolError(f"FILLED has {len(body)} bytes of body")
    return [Answer(job_id, True) for (job_id,) in _JOB.iter_unpack(body)]


def _exactly(frame: Frame, nbytes: int) -> bytes:
    if len(frame.body) != nbytes:
        raise ProtocolError(f"frame of kind {frame.kind} has {len(frame.body)} bytes of body, not {nbytes}")
    return frame.body
