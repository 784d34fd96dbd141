"""What a client asks besides embeddings: one question and one answer each."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from mmcache import asks
from mmcache.core import ClientCore
from mmcache.errors import ItemError
from mmcache.evicting import Eviction
from mmcache.keys import ContentKey, Fingerprint
from mmcache.parts import checked_keys, content_key
from mmcache.planning import Plan, plan_item
from mmcache.pump import Pump
from mmcache.records import MAX_ITEMS

if TYPE_CHECKING:
    import numpy as np
    import torch

    from mmcache.lease import Lease

T = TypeVar("T")
Item = Any
"""bytes, a path (str or Path), a PIL image, a uint8 numpy array or CPU tensor of any memory layout: H×W×3 (RGB), H×W
(gray: the same in each channel) or T×H×W×3 (a video chunk, of up to 4 frames for Kimi-K2.5); or the `StagedRef` of
pixels that were staged; `stage` takes tensors of CUDA devices too."""


class Informed(ABC):
    """What a client knows of the model that is served, without asking. `_core`: of its connection."""

    @property
    @abstractmethod
    def _core(self) -> ClientCore: ...

    @property
    def fingerprint(self) -> Fingerprint:
        """What decides an embedding besides its content: weights, config, processor settings, dtype, numerics.

        As the sidecar said last: of another client's reload this one hears with its next call. What an embedding in
        hand is of, its lease says.
        """
        return Fingerprint.from_hex(self._core.served.fingerprint)

    @property
    def dim(self) -> int:
        """Width of an embedding row; 0 of a foreign model, whose embeddings have widths of their own."""
        return self._core.served.dim

    @property
    def dtype(self) -> str:
        """Of the embeddings: "float32" or "bfloat16"; of a foreign model also "float16"."""
        return self._core.served.dtype

    @property
    def device_counters(self) -> dict[str, int]:
        """How device memory was used on this connection.

        `stream_writes`: leases that a stream ended. `fallbacks`: that a thread ended after waiting for an event, where
        the device has no stream memory operations. `fetched`: embeddings that were copied through the host.
        `unlocked_bytes`: of the staging region, where its pages could not be locked; copies to it are slower.
        """
        return self._core.device_counters


class Asking(Informed):
    """The part of a client that is no embedding's way. `_usable` gives a connection, or raises."""

    _pump: Pump
    _timeout_s: float

    def key(self, item: Item) -> ContentKey:
        """The content key of one item. No round trip. Raises the ItemError of a bad item."""
        return content_key(item, self._core.hasher.key, self._core.welcome.max_item_bytes)

    def named_key(self, kind: str, name: str, header: bytes = b"") -> ContentKey:
        """The content key of what is known by a name instead of by its bytes. No round trip.

        Whoever gives the name answers for it: one name is one content, for as long as anything is cached under it.

        Args:
            kind: whose names they are, as "vllm": the same name of another kind has another key.
            name: of the content.
            header: what else belongs to it.
        """
        return self._core.hasher.key(kind, header, name.encode())

    def plan(self, items: Sequence[Item]) -> list[Plan | ItemError]:
        """What each item will be: grid, tokens and bytes, without encoding or sending it. No round trip.

        Of files only headers are looked at, with the settings of the sidecar. A bad item has its ItemError in its
        place; an item that passes can still turn out to be damaged. Files need Pillow here.
        """
        core = self._core
        return [plan_item(item, index, core.welcome, core.served) for index, item in enumerate(items)]

    def lookup(self, keys: Sequence[ContentKey]) -> list[str | None]:
        """Where the embedding of each key is: "pool", "host", "store" or None. It may be gone by the time of a call.

        One round trip for up to 1,024 keys.
        """
        wanted = checked_keys(keys, len(keys))
        found: list[str | None] = []
        for start in range(0, len(wanted), MAX_ITEMS):
            part = wanted[start : start + MAX_ITEMS]
            answer: list[str | None] = self._ask(partial(asks.lookup, part))
            found += answer
        return found

    def put(
        self,
        key: ContentKey,
        embedding: np.ndarray[Any, Any] | torch.Tensor,
        grid: tuple[int, int, int],
        *,
        cost_seconds: float = 0.0,
    ) -> bool:
        """Cache an embedding that was made elsewhere. True if it is new, False if the key has one, which stays.

        One round trip. It passes the guards of an encoded one: finite, and as wide as the model that is served (a
        foreign model has any width, and any grid). That it is the embedding of that key's content is not checked:
        clients of a namespace trust each other.

        Args:
            key: of the item that it is the embedding of.
            embedding: `[num_tokens, dim]` in the client's dtype; a bfloat16 one is a tensor.
            grid: patches in time, height and width.
            cost_seconds: what making it again would take; decides how soon it is evicted. 0 for what the sidecar's
                own encoder would take.

        Raises:
            WrongEmbedding: shape, dtype or grid do not fit, or another model is served by now.
            NonFiniteEmbedding, PoolExhausted, ItemError: it is not cached.
            RequestTimeout, ConnectionLost, ClientClosed: the call failed.
        """
        (checked,) = checked_keys([key], 1)
        return self._ask(
            lambda core, timeout_s: asks.put(
                core, asks.PutItem.of(checked, embedding, core.served), grid, cost_seconds, timeout_s
            )
        )

    def fetch(self, lease: Lease) -> torch.Tensor:
        """A copy of a lease's embedding as a CPU tensor `[num_tokens, dim]`. The lease goes on.

        One round trip. For a process that cannot map the memory which the embedding is in, because it has no CUDA, or
        not that device; the sidecar counts such copies.

        Raises:
            LeaseReleased: it was released, by another thread perhaps.
            ValueError: the lease is of another client.
            EncodeFailed: it was not copied in time.
            RequestTimeout, ConnectionLost, ClientClosed: the call failed.
        """
        return self._ask(partial(asks.fetch, lease))

    def stats(self) -> dict[str, Any]:
        """The sidecar's counters, nested. One round trip."""
        return self._ask(lambda core, _: asks.stats(core))

    def leases(self, limit: int = 1000, *, pid: int | None = None, check: bool = False) -> dict[str, Any]:
        """Who holds what since when, and what is quarantined and why, nested. One round trip.

        Args:
            limit: leases that are listed at most, the oldest first; they are counted all the same.
            pid: list only what this process holds.
            check: look whether the sidecar's books agree with each other; what is wrong is in `problems`.
        """
        return self._ask(lambda core, _: asks.leases(core, limit, pid, check))

    def evict(
        self,
        keys: Sequence[ContentKey] = (),
        *,
        namespace: str | None = None,
        fingerprint: Fingerprint | None = None,
        stale: bool = False,
        everything: bool = False,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Remove embeddings from every tier, or only count them; leases on them stay valid.

        At least one of the arguments says which; what several say has to hold together. After the call none of what
        was cached before it is served; what is encoded meanwhile may be. One round trip, for each 1,024 keys. A call
        that times out leaves it going on.

        Args:
            keys: of this client's namespace.
            namespace: all that belongs to it; not with `keys`.
            fingerprint: all of that model; of `keys` those that are of it, instead of the model that is served.
            stale: all of any other model than the one that is served. Where sidecars of several models share a store,
                the others' are among them.
            everything: all there is; not with anything else.
            dry_run: change nothing, and count.

        Returns:
            `{"dry_run": bool, "tiers": {name: {"entries": int, "bytes": int}}, "failed": {name: reason}}`: what each
            tier had, "pool" first, and in which tiers some may still be.

        Raises:
            ValueError: nothing says which, or what is said excludes each other.
            TooManyRequests, RequestTimeout, ConnectionLost, ClientClosed: the call failed.
        """
        eviction = Eviction.of(keys, namespace, fingerprint, stale, everything, dry_run)
        for part in eviction.parts():
            eviction.add(self._ask(part))
        return eviction.found

    def reload(self, model: str | os.PathLike[str] | None = None) -> Fingerprint:
        """Serve new weights, without losing a request; returns their fingerprint.

        The ranks load them beside the old ones, which are served until then: each has both in memory for a while. After
        the call every embedding is of the new weights. Entries of the old ones are no longer found; leases on them stay
        valid. With the same weights nothing changes. dtype and settings stay as the sidecar was started. A call that
        times out leaves the reload going on.

        Args:
            model: a preset or a checkpoint folder; by default the one that is served, read anew.

        Raises:
            ConfigError, CheckpointError, SidecarError: why it cannot be served; all is as it was before.
            RequestTimeout, ConnectionLost, ClientClosed: the call failed.
        """
        return self._ask(lambda core, _: asks.reload(core, model))

    @property
    def _core(self) -> ClientCore:
        return self._pump.core

    @abstractmethod
    def _usable(self, deadline: float) -> Pump: ...

    def _ask(self, start: asks.Start[T]) -> T:
        deadline = time.monotonic() + self._timeout_s
        pump = self._usable(deadline)
        return self._wait(pump, self._begin(pump, start, deadline), deadline)

    def _begin(self, pump: Pump, start: asks.Start[T], deadline: float) -> asks.Question[T]:
        return pump.begin(lambda core: start(core, deadline - time.monotonic()), deadline, self._timeout_s)

    def _wait(self, pump: Pump, question: asks.Question[T], deadline: float) -> T:
        try:
            pump.wait(lambda: question.ask.is_done, deadline, self._timeout_s)
        except BaseException:
            pump.tell(lambda core: core.give_up(question.ask))
            raise
        return question.result()
