"""The same client without a sidecar: everything that one does is done inside the engine's own process."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmcache.client import Client
from mmcache.duplex import DuplexChannel
from mmcache.errors import ConfigError
from mmcache.handshake import DEFAULT_TIMEOUT_S
from mmcache.link import greeted
from mmcache.pump import Pump

if TYPE_CHECKING:
    from mmcache.config import Settings
    from mmcache.server.inside import Inside

PLACE = Path("(inside this process)")
"""Where its messages say that the sidecar is."""

OF_A_PROCESS = {
    "ranks": "there is one",
    "socket": "there is none",
    "device_bytes": "the device's memory is the engine's to bound",
    "stream_priority": "the engine's own streams are beside it",
    "lease_limit_action": "it would be the engine that is killed",
    "http": "whose metrics it would be is the engine's to say",
    "log_format": "the engine's handlers say how it is written",
    "log_level": "it logs to the loggers below `mmcache.server`, as the engine sets them",
}
"""Settings of a sidecar that a process of another's must not be given, and why."""


def local(
    model: str | os.PathLike[str] = "moonvit-tiny",
    device: str = "auto",
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
    namespace: str = "",
    name: str | None = None,
    retry_overloaded: int = 0,
    **settings: object,
) -> Client:
    """A client that is served inside this process: no sidecar, no socket, one rank on a thread. A context manager.

    Returns when the model is loaded and warm. Calls, leases and errors are those of any client, and so are the keys, as
    long as the state folder (`state`) is the same. Other processes cannot connect. The process's own settings (torch's
    threads, limits, signals) stay as they are; a fault of the encoder ends its rank, which is started again, and never
    the process. Files are decoded in processes of their own, as ever.

    `close` ends its threads and processes and gives its memory back; so does the interpreter's exit. Leases that are
    held stay readable. A client that is dropped unclosed warns and ends by itself.

    Args:
        model: a checkpoint folder or a preset.
        device: auto, cpu or cuda (the process's current choice of visible devices; the first).
        timeout: bound of each call in seconds; starting has none.
        namespace, name, retry_overloaded: as of `Client`.
        settings: what `mmcache serve --help` lists, by name, such as `pool_bytes="1GiB"`. `store` is "none" unless it
            is given. Variables and files of a sidecar's settings are not read, but for MMCACHE_STATE.

    Raises:
        ConfigError: a setting is wrong, or of no use here.
        CheckpointError, SidecarError: it cannot start.
        ModuleNotFoundError: `pip install 'mmcache[server]'` is missing.
    """
    inside = started(model, device, settings)
    try:
        return LocalClient(inside, timeout=timeout, namespace=namespace, name=name, retry_overloaded=retry_overloaded)
    except BaseException:
        inside.close()
        raise


def started(model: str | os.PathLike[str], device: str, settings: dict[str, object]) -> Inside:
    """What serves it, warm. Raises what `local` does."""
    from mmcache.server.inside import Inside

    return Inside(_settled({"model": os.fspath(model), "device": device, **settings}))


def _settled(arguments: dict[str, object]) -> Settings:
    from mmcache.config_sources import settings_of

    for setting, why in OF_A_PROCESS.items():
        if setting in arguments:
            raise ConfigError(
                f"{setting} = {arguments[setting]!r} (argument): not for a client without a sidecar: {why}"
            )
    settled = settings_of({"store": "none"} | arguments, {"ranks": 1, "socket": PLACE}, os.environ)
    if settled.deterministic and settled.device == "cuda":
        raise ConfigError(
            "deterministic = True (argument): on CUDA that is a setting of the whole process; run a sidecar"
        )
    return settled


class LocalClient(Client):
    """A client of what is `inside` its own process, which ends with it."""

    def __init__(self, inside: Inside, **options: Any) -> None:
        self._inside = inside
        super().__init__(PLACE, **options)

    def close(self) -> None:
        """End what serves it too. See `Client.close`."""
        super().close()
        self._inside.close()

    def __del__(self, _warn: Any = warnings.warn) -> None:
        super().__del__(_warn)
        if not getattr(self, "_is_closed", True):
            self._inside.stop()

    def _connected(self, deadline: float) -> Pump:
        # Neither end polls: each would keep the interpreter from the other.
        channel = DuplexChannel(self._inside.connect())
        return greeted(channel, self._target, deadline)
