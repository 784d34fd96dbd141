"""A rank's half of staging: items are read out of the regions of clients once, and hashed as they are read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch

from encoder.model import Item
from encoder.patches import PatchRows
from ipc.allocator import ALIGNMENT
from ipc.errors import OutOfBounds
from ipc.materialize import Observer, Slice, materialize
from ipc.memory_shm import ReadOnlyRegion, round_up
from mmcache.keys import KeyHasher
from mmcache.media import ARRAY, ArrayHeader
from mmcache.patches import PatchHeader
from mmcache.server.messages import Claim

Place: TypeAlias = int
"""Of an item in its batch."""


class LockedCopy:
    """Rows on their way to a device: copied once into locked memory of this process, so that what is hashed there is
    what the device reads over its bus, in the launch that converts them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._is_read: torch.cuda.Event | None = None

    def materialize(self, slices: Sequence[Slice], out: torch.Tensor, observe: Sequence[Observer]) -> None:
        """As `ipc.materialize`, with `out` on a device, on whose current stream it is made.

        Waits until the device has read what the call before brought.
        """
        from ipc.materialize_cuda import DeviceSlice
        from ipc.materialize_cuda import materialize as materialize_there

        if self._is_read is not None:
            self._is_read.synchronize()
        starts = list(accumulate((round_up(one.data.nbytes, ALIGNMENT) for one in slices), initial=0))
        if starts[-1] > self._memory.numel():
            self._memory = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
        parts = [self._memory[start : start + one.data.nbytes] for start, one in zip(starts, slices, strict=False)]
        for one, part, show in zip(slices, parts, observe, strict=True):
            here = part.numpy()
            np.copyto(here, one.data)
            show(here.data)
        there = [DeviceSlice(part, one.dtype, one.num_rows) for one, part in zip(slices, parts, strict=True)]
        materialize_there(there, out)
        self._is_read = torch.cuda.current_stream(out.device).record_event()


class StagedReader:
    """The staging regions that this rank maps, all read only."""

    def __init__(self, seed: int, device: torch.device) -> None:
        """`device`: where rows are wanted."""
        self._seed = seed
        self._device = device
        self._locked = LockedCopy()
        self._regions: dict[int, ReadOnlyRegion] = {}

    def map(self, region: int, fd: int) -> None:
        """A region that claims will speak of. `fd` is closed."""
        try:
            self._regions[region] = ReadOnlyRegion.attach(fd)
        finally:
            os.close(fd)

    def unmap(self, region: int) -> None:
        """No claim will."""
        self._regions.pop(region, None)

    def read(self, claims: Mapping[Place, Claim], offsets: Sequence[int], dtype: torch.dtype) -> dict[Place, Item]:
        """Read the items that are claimed; those whose bytes are not those of their key are left out.

        Rows that are normalised already come as parts of one tensor, end to end in the order of their places. On a
        device they are made on the current stream.
        """
        items: dict[Place, Item] = {}
        rows: list[tuple[Place, Claim, PatchHeader]] = []
        for place, claim in sorted(claims.items()):
            if claim.kind != ARRAY:
                rows.append((place, claim, PatchHeader.model_validate_json(claim.header)))
            elif (pixels := self._pixels(claim, offsets[place])) is not None:
                items[place] = pixels
        width_of = {header.shape[1] for _, _, header in rows}
        for width in sorted(width_of):
            group = [row for row in rows if row[2].shape[1] == width]
            items |= self._rows(group, offsets, width, dtype)
        return items

    def _pixels(self, claim: Claim, offset: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]] | None:
        """RGB pixels in private memory, so that what is hashed is what is encoded."""
        shape = ArrayHeader.model_validate_json(claim.header).shape
        raw = np.empty(shape, np.uint8)
        np.copyto(raw.reshape(-1), self._view(claim, offset, raw.nbytes))
        if self._hasher(claim).key(claim.kind, claim.header, raw.data) != claim.key:
            return None
        return np.repeat(raw[..., None], 3, axis=2) if len(shape) == 2 else raw

    def _rows(
        self, group: Sequence[tuple[Place, Claim, PatchHeader]], offsets: Sequence[int], width: int, dtype: torch.dtype
    ) -> dict[Place, Item]:
        counts = [header.shape[0] for _, _, header in group]
        out = torch.empty(sum(counts), width, dtype=dtype, device=self._device)
        states = [self._hasher(claim).begin(claim.kind, claim.header, header.nbytes) for _, claim, header in group]
        slices = [
            Slice(self._view(claim, offsets[place], header.nbytes), header.dtype, header.shape[0])
            for place, claim, header in group
        ]
        make = materialize if self._device.type == "cpu" else self._locked.materialize
        make(slices, out, [state.update for state in states])
        parts = torch.split(out, counts)
        return {
            place: PatchRows(part, header.grid)
            for (place, claim, header), part, state in zip(group, parts, states, strict=True)
            if state.key() == claim.key
        }

    def _hasher(self, claim: Claim) -> KeyHasher:
        return KeyHasher(self._seed, claim.namespace)

    def _view(self, claim: Claim, offset: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        region = self._regions.get(claim.region)
        if region is None:
            raise OutOfBounds(f"staging region {claim.region} is gone")
        return region.view(offset, nbytes)
