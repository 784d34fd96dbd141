"""Any order of reserving, publishing, leasing, acknowledging, dying and retiring, against a simple model.

Each extent's bytes in a real shared memory carry its own tag from the moment it is published. As long as anybody may
read them, in this pool or in one that was retired, the tag must be there: an extent reused too early would show.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from ipc.control import ControlMemory
from ipc.errors import BadTransition, ControlExhausted, ExtentTooLarge
from ipc.leases import Holder, HolderState, Share, ShareState
from ipc.memory_shm import ReadOnlyRegion, SharedRegion
from ipc.pool import Extent, ExtentState, Pool

CAPACITY = 16 * 1024
NUM_WORDS = 5


@dataclass(eq=False)
class Memory:
    """A pool with its memory as the writer and as a reader see it."""

    pool: Pool
    region: SharedRegion
    reader: ReadOnlyRegion


@dataclass(eq=False)
class Client:
    """A holder, the client's end of its control memory, and what the model knows of it."""

    holder: Holder
    words: ControlMemory
    written: dict[int, int] = field(default_factory=dict)  # words not yet looked at
    held: list[Share] = field(default_factory=list)
    num_strays: int = 0


class PoolMachine(RuleBasedStateMachine):
    writing = Bundle("writing")
    cached = Bundle("cached")
    pinned = Bundle("pinned")
    clients = Bundle("clients")
    shares = Bundle("shares")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.num_tags = 0
        self.memories: list[Memory] = []
        self.tags: dict[Extent, int] = {}
        self.live: set[Extent] = set()  # whose bytes may be read or written by somebody
        self.evicted: list[Extent] = []
        self.everyone: list[Client] = []
        self.new_memory()

    def new_memory(self) -> None:
        region = SharedRegion.create("stateful", CAPACITY)
        region.seal_for_readers()
        reader = ReadOnlyRegion.attach(region.fd)
        pool = Pool(len(self.memories), CAPACITY, clock=self.tick, on_evict=self.evicted.append)
        self.memories.append(Memory(pool, region, reader))

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    @property
    def pool(self) -> Pool:
        return self.memories[-1].pool

    def fits(self, nbytes: int) -> bool:
        """Whether some contiguous run of bytes has no extent that must stay."""
        stay = [extent for extent in self.live if extent.pool is self.pool]
        stay = [extent for extent in stay if extent.state is not ExtentState.CACHED or self.readers(extent)]
        position, largest = 0, 0
        for extent in sorted(stay, key=lambda extent: extent.offset):
            largest = max(largest, extent.offset - position)
            position = extent.offset + -(-extent.nbytes // 256) * 256
        return nbytes <= max(largest, CAPACITY - position)

    def readers(self, extent: Extent) -> int:
        leased = sum(share.extent is extent for client in self.everyone for share in client.held)
        return leased + extent.num_pins

    def forget_unread(self) -> None:
        """The model's view of what became of extents after an operation."""
        for extent in list(self.live):
            if extent.state is ExtentState.GONE:
                assert self.readers(extent) == 0, f"{extent!r} went while somebody may read it"
                self.live.discard(extent)

    def ended(self, client: Client, shares: list[Share], state: ShareState) -> None:
        for share in shares:
            assert share.state is state
            client.held.remove(share)
        self.forget_unread()

    @rule(target=writing, nbytes=st.integers(1, 6000))
    def reserve(self, nbytes: int) -> object:
        before = len(self.evicted)
        fits = self.fits(nbytes)
        extent = self.pool.reserve(nbytes)
        assert (extent is not None) == fits
        assert fits or len(self.evicted) == before
        self.forget_unread()
        if extent is None:
            return multiple()
        self.num_tags = self.num_tags % 250 + 1
        self.tags[extent] = self.num_tags
        self.live.add(extent)
        self.memories[-1].region.array(extent.offset, nbytes)[:] = self.num_tags
        return extent

    @rule(nbytes=st.integers(CAPACITY + 1, 2 * CAPACITY))
    def reserve_too_large(self, nbytes: int) -> None:
        before = len(self.evicted)
        with pytest.raises(ExtentTooLarge):
            self.pool.reserve(nbytes)
        assert len(self.evicted) == before

    @rule(target=cached, extent=consumes(writing), seconds=st.floats(0.001, 10.0))
    def publish(self, extent: Extent, seconds: float) -> object:
        if extent.state is ExtentState.GONE:
            with pytest.raises(BadTransition):
                extent.pool.publish(extent, b"key", seconds, None)
            return multiple()
        extent.pool.publish(extent, b"key", seconds, None)
        return extent

    @rule(extent=consumes(writing))
    def abandon(self, extent: Extent) -> None:
        extent.pool.abandon(extent)
        assert extent.state is ExtentState.GONE
        self.forget_unread()

    @rule(extent=consumes(cached))
    def discard(self, extent: Extent) -> None:
        if extent.state is ExtentState.CACHED:
            extent.pool.discard(extent)
            assert extent.state is (ExtentState.DEAD if self.readers(extent) else ExtentState.GONE)
        self.forget_unread()

    @rule(target=pinned, extent=cached)
    def pin(self, extent: Extent) -> object:
        if extent.state is not ExtentState.CACHED:
            with pytest.raises(BadTransition):
                extent.pool.pin(extent)
            return multiple()
        extent.pool.pin(extent)
        return extent

    @rule(extent=consumes(pinned))
    def unpin(self, extent: Extent) -> None:
        extent.pool.unpin(extent)
        self.forget_unread()

    @rule(extent=cached)
    def touch(self, extent: Extent) -> None:
        extent.pool.touch(extent)

    @rule(target=clients)
    def connect(self) -> Client:
        control = ControlMemory.create(NUM_WORDS)
        client = Client(
            Holder(control, "client", len(self.everyone), clock=self.tick), ControlMemory.attach(control.fd)
        )
        self.everyone.append(client)
        return client

    @rule(target=shares, client=clients, extent=cached)
    def grant(self, client: Client, extent: Extent) -> object:
        connected = client.holder.state is HolderState.CONNECTED
        if not connected or extent.state is not ExtentState.CACHED:
            with pytest.raises((BadTransition, ControlExhausted)):
                extent.pool.grant(extent, client.holder)
            return multiple()
        if len(client.held) == NUM_WORDS - 1:
            with pytest.raises(ControlExhausted):
                extent.pool.grant(extent, client.holder)
            return multiple()
        share = extent.pool.grant(extent, client.holder)
        client.written.pop(share.slot, None)
        client.held.append(share)
        return client, share

    @rule(which=shares)
    def acknowledge_by_word(self, which: tuple[Client, Share]) -> None:
        """Also late and doubled: the share may have ended and its slot may belong to another."""
        client, share = which
        client.words.acknowledge(share.slot, share.generation)
        client.written[share.slot] = share.generation

    @rule(client=clients, slot=st.integers(1, NUM_WORDS - 1), generation=st.integers(0, 9))
    def write_any_word(self, client: Client, slot: int, generation: int) -> None:
        client.words.acknowledge(slot, generation)
        client.written[slot] = generation

    @rule(client=clients)
    def sweep(self, client: Client) -> None:
        expected = [share for share in client.held if client.written.get(share.slot) == share.generation]
        ended = client.holder.sweep()
        assert sorted(share.slot for share in ended) == sorted(share.slot for share in expected)
        self.ended(client, ended, ShareState.ACKNOWLEDGED)

    @rule(which=shares)
    def acknowledge_by_message(self, which: tuple[Client, Share]) -> None:
        client, share = which
        is_held = share in client.held
        assert client.holder.acknowledge(share.slot, share.generation) is is_held
        self.ended(client, [share] if is_held else [], ShareState.ACKNOWLEDGED)
        client.num_strays += not is_held

    @rule(client=clients)
    def quarantine(self, client: Client) -> None:
        if client.holder.state is HolderState.CONNECTED:
            client.holder.quarantine()

    @rule(client=consumes(clients))
    def die(self, client: Client) -> None:
        assert client.holder.end_all() == len(client.held)
        self.ended(client, list(client.held), ShareState.DIED)

    @precondition(lambda self: len(self.memories) < 4)
    @rule()
    def retire(self) -> None:
        before = len(self.evicted)
        gone = {extent for extent in self.live if extent.pool is self.pool and extent.state is ExtentState.CACHED}
        self.pool.retire()
        assert set(self.evicted[before:]) == gone
        with pytest.raises(BadTransition):
            self.pool.reserve(1)
        self.forget_unread()
        self.new_memory()

    @invariant()
    def everything_agrees(self) -> None:
        for memory in self.memories:
            memory.pool.check()
            live = {extent for extent in self.live if extent.pool is memory.pool}
            assert set(memory.pool.extents()) == live
        for client in self.everyone:
            client.holder.check()
            assert set(client.holder.shares()) == set(client.held)
            assert client.holder.num_strays >= client.num_strays

    @invariant()
    def nobody_reads_another_extents_bytes(self) -> None:
        for extent in self.live:
            assert extent.num_shares == sum(share.extent is extent for c in self.everyone for share in c.held)
            view = self.memories[extent.pool_id].reader.view(extent.offset, extent.nbytes)
            assert (view == self.tags[extent]).all(), f"{extent!r} was overwritten"

    def teardown(self) -> None:
        for memory in self.memories:
            memory.region.close()
        for client in self.everyone:
            client.words.close()
            client.holder.control.close()


IS_SOAK = bool(os.environ.get("MMCACHE_SOAK"))
TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=1000 if IS_SOAK else 120, stateful_step_count=200 if IS_SOAK else 60, deadline=None
)
