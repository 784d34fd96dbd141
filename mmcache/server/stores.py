"""Opens the store tiers that the settings name."""

from __future__ import annotations

import asyncio

from mmcache.config import Settings
from mmcache.errors import SidecarError
from mmcache.tiers.lmdb import LmdbTier
from mmcache.tiers.tiered import TieredStore

STORE_OPEN_TIMEOUT_S = 30.0


async def open_store(settings: Settings) -> TieredStore:
    """The store, maybe of no tier.

    Raises:
        ConfigError, SidecarError: it cannot be opened.
    """
    tiers = []
    if settings.store_path is not None:
        try:
            async with asyncio.timeout(STORE_OPEN_TIMEOUT_S):
                tiers.append(await LmdbTier.open(settings.store_path, settings.store_bytes))
        except TimeoutError:
            reason = f"could not be opened within {STORE_OPEN_TIMEOUT_S} s; another process may be writing to it"
            raise SidecarError(f"store = {settings.store}: {reason}") from None
    # What waits to be written is pinned in the pool: it must never fill it.
    share = settings.ranks * settings.pool_bytes // 4
    return TieredStore(tiers, settings.store_timeout_ms / 1000, min(settings.write_behind_bytes, share))
