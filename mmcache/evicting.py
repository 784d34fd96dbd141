"""Removing what is cached: which embeddings a user means, asked part by part, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from mmcache.asks import Question, Start
from mmcache.core import ClientCore
from mmcache.errors import ITEM_ERRORS, SidecarError
from mmcache.framing import Frame, Kind, parse
from mmcache.keys import ContentKey, Fingerprint
from mmcache.parts import checked_keys
from mmcache.pending import Ask
from mmcache.protocol_upkeep import Evict, EvictReply
from mmcache.records import MAX_ITEMS


class Eviction(NamedTuple):
    """One call of `Client.evict`. `found`: what came of it so far."""

    keys: list[ContentKey]
    message: Evict
    found: dict[str, Any]

    @classmethod
    def of(
        cls,
        keys: Sequence[ContentKey],
        namespace: str | None,
        fingerprint: Fingerprint | None,
        stale: bool,
        everything: bool,
        dry_run: bool,
    ) -> Eviction:
        """Check what a user means. Raises ValueError if nothing does, or if two parts of it exclude each other."""
        wanted = checked_keys(keys, len(keys))
        others = [wanted, namespace is not None, fingerprint is not None, stale]
        if everything and any(others):
            raise ValueError("everything is evicted, or what keys, namespace, fingerprint and stale say")
        if not everything and not any(others):
            raise ValueError("say what to evict: keys, namespace, fingerprint, stale or everything")
        if wanted and (namespace is not None or stale):
            raise ValueError(
                "keys are of the client's own namespace, and of the model that is served or of fingerprint"
            )
        if stale and fingerprint is not None:
            raise ValueError("what is evicted is of one fingerprint, or stale")
        message = Evict(
            ask_id=0, namespace=namespace, fingerprint=fingerprint, stale=stale, everything=everything, dry_run=dry_run
        )
        return cls(wanted, message, {"dry_run": dry_run, "tiers": {}, "failed": {}})

    def parts(self) -> Iterator[Start[dict[str, Any]]]:
        """What is to be asked, one after the other."""
        for start in range(0, max(1, len(self.keys)), MAX_ITEMS):
            yield partial(_asked, self.message, b"".join(self.keys[start : start + MAX_ITEMS]))

    def add(self, answer: dict[str, Any]) -> None:
        """What one part came to."""
        for name, counts in answer["tiers"].items():
            sums = self.found["tiers"].setdefault(name, dict.fromkeys(counts, 0))
            for what, number in counts.items():
                sums[what] += number
        self.found["failed"].update(answer["failed"])


def _asked(message: Evict, keys: bytes, core: ClientCore, _: float) -> Question[dict[str, Any]]:
    ask = Ask(core.new_id())
    core.ask(Kind.EVICT, ask, message.model_copy(update={"ask_id": ask.ask_id}), keys)

    def read(frame: Frame) -> dict[str, Any]:
        reply = parse(EvictReply, frame)
        if reply.error:
            raise ITEM_ERRORS.get(reply.error, SidecarError)(reply.reason)
        found: dict[str, Any] = json.loads(frame.body)
        return found

    return Question(ask, read)
