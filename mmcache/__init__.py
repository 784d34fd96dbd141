"""mmcache: a caching multimodal feature store beside a serving engine.

with mmcache.connect() as client:
    for lease in client.encode(["photo.jpg"]):
        with lease:
            use(lease.tensor)
"""

import typing

from mmcache._version import __version__
from mmcache.client import Client, connect
from mmcache.errors import (
    CapturingError,
    CheckpointError,
    ClientClosed,
    ConfigError,
    ConnectionLost,
    ContentMismatch,
    DeadlineExceeded,
    DeviceUnavailable,
    EncodeError,
    EncodeFailed,
    ImageTooLarge,
    ItemError,
    LeaseReleased,
    MMCacheError,
    NonFiniteEmbedding,
    NoRanks,
    NotCached,
    Overloaded,
    PoolExhausted,
    ProtocolError,
    ProtocolMismatch,
    RequestCancelled,
    RequestTimeout,
    SidecarError,
    SidecarRunning,
    SidecarUnavailable,
    SliceGone,
    StagingExhausted,
    TooManyLeases,
    TooManyRequests,
    UndecodableImage,
    UnreadableItem,
    UnsupportedItem,
    UnsupportedMode,
    WrongEmbedding,
)
from mmcache.foreign import ForeignModel
from mmcache.handle import Handle
from mmcache.keys import ContentKey, Fingerprint
from mmcache.lease import Lease
from mmcache.local import local
from mmcache.planning import Plan
from mmcache.refs import SliceRef, StagedRef

if typing.TYPE_CHECKING:
    from mmcache.aio import AsyncClient

__all__ = [
    "AsyncClient",
    "CapturingError",
    "CheckpointError",
    "Client",
    "ClientClosed",
    "ConfigError",
    "ConnectionLost",
    "ContentKey",
    "ContentMismatch",
    "DeadlineExceeded",
    "DeviceUnavailable",
    "EncodeError",
    "EncodeFailed",
    "Fingerprint",
    "ForeignModel",
    "Handle",
    "ImageTooLarge",
    "ItemError",
    "Lease",
    "LeaseReleased",
    "MMCacheError",
    "NoRanks",
    "NonFiniteEmbedding",
    "NotCached",
    "Overloaded",
    "Plan",
    "PoolExhausted",
    "ProtocolError",
    "ProtocolMismatch",
    "RequestCancelled",
    "RequestTimeout",
    "SidecarError",
    "SidecarRunning",
    "SidecarUnavailable",
    "SliceGone",
    "SliceRef",
    "StagedRef",
    "StagingExhausted",
    "TooManyLeases",
    "TooManyRequests",
    "UndecodableImage",
    "UnreadableItem",
    "UnsupportedItem",
    "UnsupportedMode",
    "WrongEmbedding",
    "__version__",
    "connect",
    "local",
]


def __getattr__(name: str) -> typing.Any:
    """asyncio is imported by those who use it, and costs others nothing."""
    if name != "AsyncClient":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mmcache.aio import AsyncClient

    return AsyncClient
