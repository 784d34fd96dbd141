"""A lease: the right to read one embedding in the pool, in place."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from ipc.memory_shm import ReadOnlyRegion
from mmcache.device_memory import DeviceMemory, checked_streams
from mmcache.errors import LeaseReleased
from mmcache.foreign import VALUE_BYTES
from mmcache.keys import ContentKey, Fingerprint
from mmcache.records import ORIGINS, Grant
from mmcache.refs import SliceRef

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from mmcache.core import ClientCore
    from mmcache.device_memory import Streams


class Served(NamedTuple):
    """The model that grants are of: what the sidecar said last, or the client's own. `processor`: its preprocessing
    settings, JSON. `dim`: 0 if every embedding has a width of its own."""

    fingerprint: str
    dtype: str
    dim: int
    processor: str


class Share:
    """What views of an embedding keep alive. Acknowledges when the last of them dies, if nobody did before."""

    __slots__ = ("__weakref__", "_core", "_token")

    def __init__(self, core: ClientCore, token: int) -> None:
        self._core = core
        self._token = token

    def __del__(self) -> None:
        self._core.let_go(self._token)


class Lease:
    """One embedding, readable in place until its release. A context manager that releases on leaving.

    A view taken from a lease and used after its release may change under its reader. The memory is mapped read only:
    writing to a view ends the process. A lease that is dropped unreleased warns, and acknowledges when neither it nor
    a tensor from it is alive.

    Attributes:
        key: content key of the item; `str()` is 32 hex digits.
        offer: token of the shares that others may claim, 0 if there are none; `ref` says the rest.
        is_given: whether it was handed to the user; one that was not ends without a warning.
    """

    __slots__ = ("_core", "_held", "_record", "_region", "_served", "_share", "_token", "is_given", "key", "offer")

    def __init__(
        self, core: ClientCore, token: int, key: ContentKey, region: ReadOnlyRegion | DeviceMemory, served: Served,
        record: tuple[int, ...],
    ) -> None:  # fmt: skip
        self._core: ClientCore | None = core
        self._token = token
        self.key = key
        self.offer = 0
        self.is_given = False
        self._served = served
        self._region: ReadOnlyRegion | DeviceMemory | None = region
        self._record = record  # a `Grant` when it is looked at: most leases are asked for little, and there are many
        self._share: Share | None = None  # made with the first view
        self._held: weakref.ref[Share] | None = None

    @property
    def _grant(self) -> Grant:
        return Grant._make(self._record)

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the model that the embedding is of; another one than the client's after a reload."""
        return Fingerprint.from_hex(self._served.fingerprint)

    @property
    def dtype(self) -> str:
        """Of the embedding: "float32" or "bfloat16"; of a foreign model also "float16"."""
        return self._served.dtype

    @property
    def num_tokens(self) -> int:
        """Rows of the embedding."""
        return self._grant.num_tokens

    @property
    def dim(self) -> int:
        """Width of a row."""
        return self.nbytes // (self.num_tokens * VALUE_BYTES[self.dtype])

    @property
    def nbytes(self) -> int:
        """Bytes of the embedding."""
        return self._grant.nbytes

    @property
    def grid_thw(self) -> tuple[int, int, int]:
        """Patches in time, height and width, before merging."""
        return self._grant[-3:]

    @property
    def ref(self) -> SliceRef:
        """What other processes `open` to claim a share, if it was encoded for `consumers`.

        Good until all shares are claimed, they are cancelled (`client.cancel`) or older than the sidecar's
        `lease_limit_s`, this process or its client ends, or the embedding goes with its rank or by a reload; the
        release of this lease changes nothing about them.

        Raises:
            ValueError: it has no shares for others.
        """
        if not self.offer:
            raise ValueError("the lease has no shares for others: encode(..., consumers=N) offers N")
        served, grant = self._served, self._grant
        return SliceRef(
            self.offer, str(self.key), served.fingerprint, served.dtype, grant.num_tokens, self.dim, grant.nbytes,
            self.grid_thw,
        )  # fmt: skip

    @property
    def origin(self) -> str:
        """Where the embedding came from: "encoded", "pool", "host" or "store"."""
        return ORIGINS[self._grant.origin]

    @property
    def is_on_device(self) -> bool:
        """Whether its memory is that of a CUDA device. Raises `LeaseReleased` after the release."""
        self._live_core()
        return not isinstance(self._region, ReadOnlyRegion)

    @property
    def is_released(self) -> bool:
        """Whether the lease was released, by itself or by the client's close."""
        return self._core is None or self._token not in self._core.live

    @property
    def tensor(self) -> torch.Tensor:
        """The embedding as a tensor `[num_tokens, dim]` of `dtype`, without a copy. Do not write to it.

        It is on the CPU, or on a CUDA device: the one whose memory the pool is, or the client's `device` if it has one.

        Raises:
            LeaseReleased: after the release.
            DeviceUnavailable: this process cannot map that device's memory; `client.fetch` copies it.
        """
        return self._view()

    def _view(self, named: Sequence[torch.cuda.Stream] = ()) -> torch.Tensor:
        owner = self._owner()
        if isinstance(self._region, DeviceMemory):
            self._live_core().in_streams.viewed(self._token, self._region, named)
            return self._region.tensor(self._grant.offset, (self.num_tokens, self.dim), self.dtype, owner)
        import torch

        assert self._region is not None, "it was not released"
        flat = torch.from_numpy(self._region.view(self._grant.offset, self.nbytes, owner, writable_flag=True))
        return flat.view(getattr(torch, self.dtype)).view(self.num_tokens, self.dim)

    def numpy(self) -> np.ndarray[Any, Any]:
        """The embedding as a read-only array `[num_tokens, dim]`; of bfloat16 a float32 copy, else without a copy.

        Raises:
            LeaseReleased: after the release.
            TypeError: it is on a CUDA device.
        """
        owner = self._owner()
        if not isinstance(self._region, ReadOnlyRegion):
            raise TypeError("the embedding is on a CUDA device: use `.tensor.cpu()`, or `client.fetch` without one")
        view = self._region.view(self._grant.offset, self.nbytes, owner)
        if self.dtype == "bfloat16":
            wide = view.view(np.uint16).astype(np.uint32)
            wide <<= 16
            array: np.ndarray[Any, Any] = wide.view(np.float32)
            array.flags.writeable = False
        else:
            array = view.view(self.dtype)
        return array.reshape(self.num_tokens, self.dim)

    def hold(self, stream: Streams = None) -> torch.Tensor:
        """The embedding as a tensor whose storage's death does the acknowledging, also after `client.close()`.

        From now on the lease keeps nothing: releasing or dropping it changes nothing, and it can be read for as long
        as the tensor, or a view of it, is alive.

        Args:
            stream: CUDA streams that read it, besides those that were current when views were taken, and the one that
                is current in the thread in which it dies.

        Raises:
            LeaseReleased: after the release.
            DeviceUnavailable: as for `tensor`.
            TypeError: `stream` is none.
        """
        tensor = self._view(checked_streams(stream))
        if self._share is not None:
            self._live_core().held.add(self._token)
            self._held, self._share = weakref.ref(self._share), None
        return tensor

    def word(self, core: ClientCore) -> tuple[int, int]:
        """Slot and generation of its share in the control memory of a connection (called by the client).

        Raises:
            LeaseReleased: after the release.
            ValueError: it is of another client, or of a connection that was lost.
        """
        if self._live_core() is not core:
            raise ValueError("the lease is of another client, or of a connection that was lost since")
        return self._token >> 32, self._token & 0xFFFFFFFF

    def is_of(self, served: Served) -> None:
        """Say of which model it is, if not of the one that is served (called by the client)."""
        self._served = served

    def release(self, stream: Streams = None) -> None:
        """The last read is done, or queued: the extent may be reused after it. Twice is harmless. Never waits.

        Args:
            stream: the CUDA stream, or several, on which it is read; by default those that were current when `tensor`
                was asked for, and the one that is current now. The extent may be reused once all of them have done what
                is queued on them by now.

        Raises:
            CapturingError: a stream is being captured into a CUDA graph; the lease goes on.
            DeviceUnavailable: the device failed; likewise.
            TypeError: `stream` is none; likewise.
        """
        streams = checked_streams(stream)
        core = self._core
        if core is not None and self._token not in core.held:
            core.acknowledge(self._token, streams)
        self._core = self._share = self._region = None  # a pool that is gone is unmapped with its last lease

    def _live_core(self) -> ClientCore:
        if self._core is None or self._token not in self._core.live:
            raise LeaseReleased(f"the lease on {str(self.key)[:12]} was released; take views before, or hold() one")
        return self._core

    def _owner(self) -> Share:
        core = self._live_core()
        share = self._share if self._held is None else self._held()
        if share is None:
            share = self._share = Share(core, self._token)
        return share

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = " released" if self.is_released else ""
        return f"<Lease {str(self.key)[:12]} [{self.num_tokens}, {self.dim}] {self.dtype} {self.origin}{state}>"

    def __del__(self, _warn: Any = warnings.warn) -> None:
        core: ClientCore | None = getattr(self, "_core", None)
        if core is None or self._token not in core.live or self._token in core.held or not core.is_mine:
            return
        try:
            if self.is_given:
                _warn(f"{self!r} was dropped unreleased", ResourceWarning, source=self, stacklevel=1)
        finally:  # also where warnings are errors
            if self._share is None:
                core.acknowledge(self._token)
