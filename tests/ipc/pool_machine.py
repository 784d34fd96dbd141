"""A machine of hypothesis: reserving, publishing, leasing, acknowledging, dying and retiring, with a simple model.

Each extent's bytes in a real shared memory carry its own tag from the moment it is published. As long as anybody may
read them, in this pool or in one that was retired, the tag must be there: an extent reused too early would show.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ipc.control import ControlMemory
from ipc.errors import BadTransition, ControlExhausted, ExtentTooLarge
from ipc.leases import Holder
from ipc.memory_shm import ReadOnlyRegion, SharedRegion
from ipc.pool import Extent, ExtentState, Pool
from ipc.shares import HolderState, Share, ShareState
from tests.ipc.model import NUM_WORDS, PICKS, Client, Memory, pick

CAPACITY = 16 * 1024


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.num_tags = 0
        self.memories: list[Memory] = []
        self.tags: dict[Extent, int] = {}
        self.live: dict[Extent, None] = {}  # whose bytes may be read or written by somebody
        self.evicted: list[Extent] = []
        self.retired_writing: list[Extent] = []
        self.pinned: list[Extent] = []
        self.clients: list[Client] = []
        self.dead: list[Client] = []
        self.new_memory()
        self.connect()
        self.connect()
        for nbytes in (2000, 1000, 6000):
            self.reserve(nbytes, publish=True)

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

    def in_state(self, state: ExtentState) -> list[Extent]:
        return [extent for extent in self.live if extent.state is state]

    def readers(self, extent: Extent) -> int:
        leased = sum(share.extent is extent for client in self.clients for share in client.held)
        offered = sum(offer.extent is extent for client in self.clients for offer in client.offers)
        return leased + offered + self.pinned.count(extent)

    def fits(self, nbytes: int) -> bool:
        """Whether some contiguous run of bytes has no extent that must stay."""
        stay = [extent for extent in self.live if extent.pool is self.pool]
        stay = [extent for extent in stay if extent.state is not ExtentState.CACHED or self.readers(extent)]
        position, largest = 0, 0
        for extent in sorted(stay, key=lambda extent: extent.offset):
            largest = max(largest, extent.offset - position)
            position = extent.offset + -(-extent.nbytes // 256) * 256
        return nbytes <= max(largest, CAPACITY - position)

    def settle(self) -> None:
        """Drop from the model what the pool gave up, which must have had no reader."""
        for extent in [extent for extent in self.live if extent.state is ExtentState.GONE]:
            assert self.readers(extent) == 0, f"{extent!r} went while somebody may read it"
            del self.live[extent]

    def ended(self, client: Client, shares: list[Share], state: ShareState) -> None:
        for share in shares:
            assert share.state is state
            client.held.remove(share)
        self.settle()

    @rule(nbytes=st.integers(1, 6000), publish=st.sampled_from([True, True, False]))
    def reserve(self, nbytes: int, publish: bool) -> None:
        before = len(self.evicted)
        fits = self.fits(nbytes)
        extent = self.pool.reserve(nbytes)
        assert (extent is not None) == fits
        assert fits or len(self.evicted) == before
        self.settle()
        if extent is not None:
            self.num_tags = self.num_tags % 250 + 1
            self.tags[extent] = self.num_tags
            self.live[extent] = None
            self.memories[-1].region.array(extent.offset, nbytes)[:] = self.num_tags
            if publish:
                self.pool.publish(extent, b"key", 1.0, None)

    @rule(nbytes=st.integers(CAPACITY + 1, 2 * CAPACITY))
    def reserve_too_large(self, nbytes: int) -> None:
        before = len(self.evicted)
        with pytest.raises(ExtentTooLarge):
            self.pool.reserve(nbytes)
        assert len(self.evicted) == before

    @precondition(lambda self: self.in_state(ExtentState.WRITING))
    @rule(index=PICKS, seconds=st.none() | st.floats(0.001, 10.0))
    def finish(self, index: int, seconds: float | None) -> None:
        extent = pick(self.in_state(ExtentState.WRITING), index)
        if seconds is None:
            extent.pool.abandon(extent)
            assert extent.state is ExtentState.GONE
            self.settle()
        else:
            extent.pool.publish(extent, b"key", seconds, None)
            assert extent.state is ExtentState.CACHED

    @precondition(lambda self: self.retired_writing)
    @rule()
    def finish_after_retirement(self) -> None:
        extent = self.retired_writing.pop()
        with pytest.raises(BadTransition):
            extent.pool.publish(extent, b"key", 1.0, None)
        extent.pool.abandon(extent)

    @precondition(lambda self: self.in_state(ExtentState.CACHED))
    @rule(index=PICKS, operation=st.sampled_from(["pin", "pin", "touch", "discard"]))
    def use(self, index: int, operation: str) -> None:
        extent = pick(self.in_state(ExtentState.CACHED), index)
        getattr(extent.pool, operation)(extent)
        if operation == "pin":
            self.pinned.append(extent)
        elif operation == "discard":
            assert extent.state is (ExtentState.DEAD if self.readers(extent) else ExtentState.GONE)
            self.settle()

    @precondition(lambda self: self.pinned)
    @rule(index=PICKS)
    def unpin(self, index: int) -> None:
        extent = self.pinned.pop(index % len(self.pinned))
        extent.pool.unpin(extent)
        self.settle()

    @precondition(lambda self: self.live)
    @rule(client_index=PICKS, index=PICKS)
    def grant(self, client_index: int, index: int) -> None:
        client = pick(self.clients, client_index)
        extent = pick(self.in_state(ExtentState.CACHED) or list(self.live), index)
        if (error := self.refusal(client, extent)) is not None:
            with pytest.raises(error):
                extent.pool.grant(extent, client.holder)
        else:
            client.granted_share(extent.pool.grant(extent, client.holder))

    def refusal(self, client: Client, extent: Extent) -> type[Exception] | None:
        """Why the client cannot get a share on the extent."""
        if client.holder.state is not HolderState.CONNECTED:
            return BadTransition
        if len(client.held) == NUM_WORDS - 1:
            return ControlExhausted
        return None if extent.state is ExtentState.CACHED else BadTransition

    @precondition(lambda self: any(client.granted for client in self.clients))
    @rule(client_index=PICKS, index=PICKS, held=st.booleans(), by_word=st.booleans(), then_sweep=st.booleans())
    def acknowledge(self, client_index: int, index: int, held: bool, by_word: bool, then_sweep: bool) -> None:
        """Unless `held`, also late and doubled: the share may have ended and its slot may belong to another."""
        client = pick([client for client in self.clients if client.granted], client_index)
        share = pick((client.held if held else None) or client.granted, index)
        if by_word:
            client.write(share.slot, share.generation)
        else:
            is_held = share in client.held
            assert client.holder.acknowledge(share.slot, share.generation) is is_held
            self.ended(client, [share] if is_held else [], ShareState.ACKNOWLEDGED)
            client.num_strays += not is_held
        if then_sweep:
            self.sweep(client)

    @rule(client_index=PICKS, slot=st.integers(1, NUM_WORDS - 1), ahead=st.integers(0, 2), then_sweep=st.booleans())
    def write_a_word_ahead_of_its_grant(self, client_index: int, slot: int, ahead: int, then_sweep: bool) -> None:
        client = pick(self.clients, client_index)
        last = max((share.generation for share in client.granted if share.slot == slot), default=0)
        client.write(slot, last + ahead)
        if then_sweep:
            self.sweep(client)

    @rule()
    def sweep_all(self) -> None:
        for client in self.clients:
            self.sweep(client)

    def sweep(self, client: Client) -> None:
        expected = []
        for slot in client.changed():
            share = client.share_in(slot)
            if share is not None and share.generation == client.written[slot]:
                expected.append(share)
            else:
                client.num_strays += 1
            client.seen[slot] = client.written[slot]
        assert client.holder.sweep() == expected
        self.ended(client, expected, ShareState.ACKNOWLEDGED)

    @precondition(lambda self: len(self.clients) + len(self.dead) < 8)
    @rule(client_index=PICKS, dies=st.booleans())
    def disconnect(self, client_index: int, dies: bool) -> None:
        client = pick(self.clients, client_index)
        if dies:
            held = list(client.held)
            assert client.holder.end_all() == len(held)
            client.offers.clear()
            self.ended(client, held, ShareState.DIED)
            self.clients.remove(client)
            self.dead.append(client)
            self.connect()
        elif client.holder.state is HolderState.CONNECTED:
            client.holder.quarantine()
            client.offers.clear()
            self.settle()
            self.connect()

    def connect(self) -> None:
        control = ControlMemory.create(NUM_WORDS)
        holder = Holder(control, "client", len(self.clients), clock=self.tick)
        self.clients.append(Client(holder, ControlMemory.attach(control.fd)))

    @precondition(lambda self: len(self.memories) < 4)
    @rule()
    def retire(self) -> None:
        before = len(self.evicted)
        cached = {extent for extent in self.in_state(ExtentState.CACHED) if extent.pool is self.pool}
        self.retired_writing += self.in_state(ExtentState.WRITING)
        self.pool.retire()
        assert set(self.evicted[before:]) == cached
        assert all(extent.state is ExtentState.GONE for extent in self.retired_writing)
        with pytest.raises(BadTransition):
            self.pool.reserve(1)
        self.settle()
        self.new_memory()

    @invariant()
    def everything_agrees(self) -> None:
        for memory in self.memories:
            memory.pool.check()
            live = {extent for extent in self.live if extent.pool is memory.pool}
            assert set(memory.pool.extents()) == live
            if memory.pool.is_retired:
                assert memory.pool.is_idle == (not live)
        for client in self.clients + self.dead:
            client.holder.check()
            assert list(client.holder.shares()) == client.held
            assert list(client.holder.offers.open()) == client.offers
            assert client.holder.num_strays == client.num_strays

    @invariant()
    def nobody_reads_another_extents_bytes(self) -> None:
        for extent in self.live:
            assert extent.num_shares + extent.num_pins == self.readers(extent)
            view = self.memories[extent.pool_id].reader.view(extent.offset, extent.nbytes)
            assert (view == self.tags[extent]).all(), f"{extent!r} was overwritten"

    def teardown(self) -> None:
        for memory in self.memories:
            memory.region.close()
        for client in self.clients + self.dead:
            client.words.close()
            client.holder.control.close()
