"""A pool on a device under churn: one process owns pool and leases, others read on side streams and are killed.

`torture(seconds, num_consumers)` is the owner. `python -m tests.ipc.cuda_torture FD` is a consumer: it compares every
byte of every lease on the device, acknowledges in stream order, and looks at the result every 2,000 leases only.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from ipc.control import ControlMemory
from ipc.leases import Holder
from ipc.pool import Extent, Pool
from tests.ipc.cuda_processes import MIB, ODD, ROOT, SECONDS, Channel, fill

POOL_BYTES = 24 * MIB
MAX_EXTENT_BYTES = MIB // 2
NUM_WORDS = 512
IN_FLIGHT = 96
REPORT_EVERY = 2000


class Outcome(NamedTuple):
    """What happened, over all consumers, the killed ones included."""

    num_granted: int
    num_acknowledged: int
    num_died: int
    num_strays: int
    num_compared: int
    num_mismatches: int
    num_kills: int
    num_evictions: int


class Consumer(Channel):
    """A process that reads, as its owner sees it."""

    def __init__(self, region: Any) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(mine)
        command = [sys.executable, "-m", "tests.ipc.cuda_torture", str(theirs.fileno())]
        self.process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
        theirs.close()
        self.control = ControlMemory.create(NUM_WORDS)
        self.holder = Holder(self.control, "consumer", self.process.pid)
        self.is_ready = False
        self.compared = self.mismatches = 0
        self.send({"nbytes": region.nbytes, "uuid": region.uuid}, region.fd, self.control.fd)

    def look(self) -> None:
        """Take in what it reported, without waiting."""
        while select.select([self.socket], [], [], 0)[0]:
            message, _ = self.receive()
            if message is None:
                return
            self.is_ready = True
            self.compared, self.mismatches = message["compared"], message["mismatches"]

    def end(self) -> None:
        """After its death: its leases end, and not before."""
        self.process.wait(SECONDS)
        with contextlib.suppress(ConnectionResetError):
            self.look()
        self.holder.sweep()
        self.holder.end_all()
        self.holder.check()
        self.control.close()
        self.socket.close()


class Owner:
    """Writes extents, leases them to whoever has room, and evicts what is in the way."""

    def __init__(self, region: Any, num_consumers: int, seed: int) -> None:
        self.region = region
        self.chance = random.Random(seed)
        self.pool = Pool(1, POOL_BYTES, on_evict=lambda extent: self.cached.pop(extent.offset))
        self.cached: dict[int, Extent] = {}
        self.consumers = [Consumer(region) for _ in range(num_consumers)]
        self.ended: list[Consumer] = []
        self.num_seeds = 0

    def publish(self) -> None:
        """A new extent, complete before anybody hears of it. Nothing if leases leave no room."""
        import torch

        extent = self.pool.reserve(self.chance.randrange(4096, MAX_EXTENT_BYTES, 8))
        if extent is None:
            return
        self.num_seeds += 1
        fill(self.region.tensor(extent.offset, extent.nbytes), self.num_seeds << 20)
        torch.cuda.current_stream().synchronize()
        self.pool.publish(extent, self.num_seeds.to_bytes(8, "little"), 0.003, self.num_seeds << 20)
        self.cached[extent.offset] = extent

    def serve(self, consumer: Consumer) -> None:
        """A few leases on anything cached."""
        consumer.look()
        consumer.holder.sweep()
        if not consumer.is_ready or consumer.holder.num_active > IN_FLIGHT or not self.cached:
            return
        extents = self.chance.choices(list(self.cached.values()), k=16)
        shares = [(self.pool.grant(extent, consumer.holder), extent) for extent in extents]
        consumer.send([(s.slot, s.generation, e.offset, e.nbytes, e.info) for s, e in shares])

    def kill_one(self) -> bool:
        """A consumer that reads is killed and another started. False if none reads yet."""
        ready = [consumer for consumer in self.consumers if consumer.is_ready]
        if not ready:
            return False
        victim = self.chance.choice(ready)
        victim.process.kill()
        victim.end()
        self.ended.append(victim)
        self.consumers[self.consumers.index(victim)] = Consumer(self.region)
        return True

    def finish(self) -> None:
        """All consumers report, acknowledge everything and end."""
        for consumer in self.consumers:
            while not consumer.is_ready:
                consumer.look()
            consumer.send([])
            while (message := consumer.receive()[0]) is not None:
                consumer.compared, consumer.mismatches = message["compared"], message["mismatches"]
            assert consumer.process.wait(SECONDS) == 0, "a consumer failed"
            consumer.holder.sweep()
            assert not consumer.holder.num_active, "an acknowledgement was lost"
            consumer.end()
            self.ended.append(consumer)


def torture(seconds: float, num_consumers: int, seed: int = 0, kill_every: float = 2.0) -> Outcome:
    """Churn for so long, killing a consumer about every `kill_every` seconds. Asserts that the books are whole."""
    from ipc.memory_cuda import DeviceRegion

    with DeviceRegion.create(POOL_BYTES, 0) as region:
        owner = Owner(region, num_consumers, seed)
        num_kills = 0
        begin = next_kill = None
        while begin is None or time.monotonic() < begin + seconds:
            for consumer in owner.consumers:
                owner.publish()
                owner.serve(consumer)
            if begin is None and all(consumer.is_ready for consumer in owner.consumers):
                begin = time.monotonic()
                next_kill = begin + kill_every
            if next_kill is not None and time.monotonic() > next_kill and owner.kill_one():
                num_kills += 1
                next_kill += kill_every * owner.chance.uniform(0.5, 1.5)
        owner.finish()
        owner.pool.check()
        assert owner.pool.bytes_leased == 0, "a lease was lost"
        return outcome(owner, num_kills)


def outcome(owner: Owner, num_kills: int) -> Outcome:
    holders = [consumer.holder for consumer in owner.ended]
    return Outcome(
        sum(holder.num_granted for holder in holders),
        sum(holder.num_acknowledged for holder in holders),
        sum(holder.num_died for holder in holders),
        sum(holder.num_strays for holder in holders),
        sum(consumer.compared for consumer in owner.ended),
        sum(consumer.mismatches for consumer in owner.ended),
        num_kills,
        owner.pool.num_evictions,
    )


def grants(channel: Channel) -> Iterator[list[int]]:
    """Leases until an empty message."""
    while batch := channel.receive()[0]:
        yield from batch


def consume(channel: Channel) -> None:
    """The consumer. Its host waits for the device only to report."""
    import torch

    from ipc.control_cuda import StreamAcknowledger
    from ipc.memory_cuda import DeviceReader

    memory, (fd, control_fd) = channel.receive()
    region = DeviceReader.attach(fd, memory["nbytes"], memory["uuid"])
    acknowledger = StreamAcknowledger(ControlMemory.attach(control_fd), region.device)
    os.close(fd)
    os.close(control_fd)
    chance = random.Random(os.getpid())
    streams = [torch.cuda.Stream() for _ in range(4)]
    base = torch.arange(MAX_EXTENT_BYTES // 8, device="cuda") * ODD
    bad = torch.zeros(len(streams), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    compared = 0
    channel.send({"compared": 0, "mismatches": 0})
    for slot, generation, offset, nbytes, seed in grants(channel):
        index = compared % len(streams)
        with torch.cuda.stream(streams[index]):
            values = region.tensor(offset, nbytes).view(torch.int64)
            torch.cuda._sleep(chance.randrange(1, 200_000))
            bad[index] += ((values - base[: len(values)]) != seed).sum()
            also = [streams[index - 1]] if chance.random() < 0.1 else []
            acknowledger.acknowledge(slot, generation, [*also, streams[index]])
        compared += 1
        if compared % REPORT_EVERY == 0:
            torch.cuda.synchronize()
            channel.send({"compared": compared, "mismatches": int(bad.sum())})
    torch.cuda.synchronize()
    acknowledger.close()
    channel.send({"compared": compared, "mismatches": int(bad.sum())})


if __name__ == "__main__":
    consume(Channel(socket.socket(fileno=int(sys.argv[1]))))
