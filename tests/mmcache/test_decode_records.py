"""What coordinator and decoders say to each other: all of it comes back, and nothing else is read."""

from __future__ import annotations

import pytest

from mmcache.errors import ProtocolError
from mmcache.framing import Frame, FrameReader, Kind, OutgoingFrame
from mmcache.server.decode_records import (
    MAX_FILLED,
    NOWHERE,
    Answer,
    Probe,
    pack_drop,
    pack_failed,
    pack_fill,
    pack_filled,
    pack_probed,
    pack_probes,
    parse_answers,
    parse_drop,
    parse_fill,
    parse_probes,
    probe_record,
)

PROBE = Probe(7, "tenant é", "array", b'{"shape":[1,1,3]}', 1 << 40, 3, NOWHERE, bytes(range(16)))


def received(sent: OutgoingFrame) -> Frame:
    reader = FrameReader()
    assert not reader.has_frame
    reader.feed(sent.data, list(sent.fds))
    assert reader.has_frame
    frame = reader.next_frame()
    assert frame is not None
    assert not reader.has_frame
    return frame


def test_what_is_packed_is_read() -> None:
    probes = [PROBE, PROBE._replace(namespace="", header=b"", target=0), PROBE]
    assert parse_probes(received(pack_probes([probe_record(probe) for probe in probes], 5))) == probes
    assert parse_fill(received(pack_fill(3, 1 << 33))) == (3, 1 << 33)
    assert parse_drop(received(pack_drop(9))) == 9
    assert parse_answers(received(pack_probed(1, 20, 30, 4))) == [Answer(1, False, 20, 30, 4)]
    assert parse_answers(received(pack_filled([4, 5]))) == [Answer(4, True), Answer(5, True)]
    for kind in (Kind.PROBED, Kind.FILLED):
        (failed,) = parse_answers(received(pack_failed(kind, 6, "UndecodableImage", "cut off")))
        assert failed == Answer(6, kind == Kind.FILLED, error="UndecodableImage", reason="cut off")


@pytest.mark.parametrize("change", [-1, 1])
def test_a_body_of_another_length_is_refused(change: int) -> None:
    def resized(sent: OutgoingFrame) -> Frame:
        frame = received(sent)
        return frame._replace(body=frame.body[:change] if change < 0 else frame.body + b"\0")

    for pack, read in (
        (pack_probes([probe_record(PROBE)] * 2, 5), parse_probes),
        (pack_fill(3, 4), parse_fill),
        (pack_drop(9), parse_drop),
        (pack_probed(1, 2, 3, 0), parse_answers),
        (pack_filled([4]), parse_answers),
    ):
        with pytest.raises(ProtocolError):
            read(resized(pack))


def test_answers_of_other_kinds_or_of_too_many_are_refused() -> None:
    for frame in (
        Frame(Kind.RAN, b"", b"", []),
        Frame(Kind.FILLED, b"", b"", []),
        Frame(Kind.FILLED, b"", bytes(4 * (MAX_FILLED + 1)), []),
        Frame(Kind.PROBED, b'{"job_id":-1,"error":"X","reason":""}', b"", []),
        Frame(Kind.PROBED, b"nothing", b"", []),
    ):
        with pytest.raises(ProtocolError):
            parse_answers(frame)
