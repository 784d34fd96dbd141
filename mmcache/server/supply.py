"""What a SUPPLY frame has to be before anything in it is used."""

from __future__ import annotations

from ipc.errors import MemorySealError
from ipc.memory_shm import SEALS_FROZEN, check_sealed
from mmcache.errors import ProtocolError
from mmcache.protocol import Supply


def check_supply(supply: Supply, fd: int, max_item_bytes: int) -> None:
    """Check the columns against each other and against the memory behind `fd`, which has to be sealed.

    Raises:
        ProtocolError: names the rule that was broken.
    """
    columns = (supply.kinds, supply.headers, supply.offsets, supply.sizes)
    if any(len(column) != len(supply.positions) for column in columns):
        raise ProtocolError("the columns of a SUPPLY differ in length")
    try:
        limit = check_sealed(fd, SEALS_FROZEN)
    except MemorySealError as error:
        raise ProtocolError(f"SUPPLY: {error}") from error
    if any(offset + size > limit for offset, size in zip(supply.offsets, supply.sizes, strict=True)):
        raise ProtocolError(f"SUPPLY: an item reaches beyond the {limit} bytes of its memory")
    if any(size > max_item_bytes for size in supply.sizes):
        raise ProtocolError(f"SUPPLY: an item is larger than {max_item_bytes} bytes (max_item_bytes)")
