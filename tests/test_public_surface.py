"""What `import mmcache` offers: nothing comes or goes unnoticed."""

from __future__ import annotations

from types import ModuleType

import mmcache

PUBLIC_SURFACE = [
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


def test_the_public_surface() -> None:
    assert sorted(mmcache.__all__) == sorted(PUBLIC_SURFACE)
    assert all(hasattr(mmcache, name) for name in mmcache.__all__)


def test_nothing_public_is_missing_from_the_surface() -> None:
    public = {name for name, value in vars(mmcache).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert public <= set(mmcache.__all__)


def test_every_error_is_public() -> None:
    errors = {
        name
        for name, value in vars(mmcache.errors).items()
        if isinstance(value, type) and issubclass(value, mmcache.MMCacheError)
    }
    assert errors <= set(mmcache.__all__)
