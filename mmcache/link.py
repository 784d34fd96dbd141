"""From a socket's path to a connection that is greeted."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

from mmcache.core import ClientCore
from mmcache.duplex import DuplexChannel
from mmcache.errors import SidecarUnavailable
from mmcache.handshake import Target, connected, shake_hands
from mmcache.pump import Pump

SPIN_S = 300e-6
"""A call polls this long for its answer before it sleeps; an answer from the pool comes sooner."""
FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 1.0


def connect_pump(target: Target, deadline: float) -> Pump:
    """Connect and say who this is.

    Raises:
        SidecarUnavailable, ProtocolMismatch, RequestTimeout: as `shake_hands` does.
    """
    return greeted(DuplexChannel(connected(target.path, deadline), spin_s=SPIN_S), target, deadline)


def greeted(channel: DuplexChannel, target: Target, deadline: float) -> Pump:
    """Say who this is, on a new connection. It is closed if that fails; raises as `shake_hands` does."""
    path, name, namespace, ordinal, foreign = target
    try:
        welcome, control_fd = shake_hands(channel, path, name, namespace, deadline, foreign)
    except BaseException:
        channel.close()
        raise
    return Pump(ClientCore(welcome, control_fd, namespace, ordinal, foreign), channel, path)


def connect_again(target: Target, deadline: float, pause: Callable[[float], None] = time.sleep) -> Pump:
    """Connect to a sidecar that may not be back yet: at once, then after pauses that double, until the deadline.

    Raises:
        SidecarUnavailable: it did not come back.
        ProtocolMismatch, RequestTimeout: as `shake_hands` does.
    """
    for pause_s in pauses():
        try:
            return connect_pump(target, deadline)
        except SidecarUnavailable:
            if time.monotonic() + pause_s >= deadline:
                raise
            pause(pause_s)
    raise AssertionError("pauses do not end")


def pauses() -> Iterator[float]:
    """Seconds to wait between attempts to connect, without end; random, so that clients do not come all at once."""
    longest_s = FIRST_PAUSE_S
    while True:
        yield longest_s * random.uniform(0.5, 1.0)  # noqa: S311
        longest_s = min(2 * longest_s, LONGEST_PAUSE_S)
