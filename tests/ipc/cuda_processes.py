"""Processes for tests of device memory: they get descriptors over a Unix socket and do what they are told.

`python -m tests.ipc.cuda_processes ROLE FD` is the child; its role is a function of this module.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
ODD = 0x9E3779B1
SECONDS = 120.0


class Channel:
    """Messages and descriptors between two processes; a message is one packet."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def send(self, message: object, *fds: int) -> None:
        socket.send_fds(self.socket, [json.dumps(message).encode()], fds)

    def receive(self) -> tuple[Any, list[int]]:
        """A message and its descriptors, which are the caller's. None once the other end is closed."""
        packet, fds, _, _ = socket.recv_fds(self.socket, 1 << 16, 4)
        return (json.loads(packet) if packet else None), fds

    def ask(self, message: object, *fds: int) -> Any:
        """Send, and the answer."""
        self.send(message, *fds)
        answer, _ = self.receive()
        assert answer is not None, "the process ended"
        return answer


class Child(Channel):
    """A process of that role. Killed and awaited at the end of the `with` block."""

    def __init__(self, role: Callable[[Channel], None], visible: str | None = None) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.settimeout(SECONDS)
        super().__init__(mine)
        environment = dict(os.environ) if visible is None else {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
        command = [sys.executable, "-m", "tests.ipc.cuda_processes", role.__name__, str(theirs.fileno())]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True
        )
        theirs.close()

    def finish(self) -> tuple[int, str]:
        """Say goodbye; its exit status and what it wrote to its standard error."""
        self.socket.close()
        _, errors = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, errors

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()
        self.kill()
        assert self.process.stderr is not None
        self.process.stderr.close()


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether it became true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def fill(memory: torch.Tensor, seed: int) -> None:
    """Bytes that no other seed has anywhere; a multiple of 8 of them."""
    for values, expected in _blocks(memory, seed):
        values.copy_(expected)


def matches(memory: torch.Tensor, seed: int) -> bool:
    """Whether `fill` wrote them."""
    return all(bool((values == expected).all()) for values, expected in _blocks(memory, seed))


def _blocks(memory: torch.Tensor, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The memory in parts, with what belongs there: so that little else is allocated."""
    import torch

    values = memory.view(torch.int64)
    for start in range(0, len(values), MIB):
        part = values[start : start + MIB]
        yield part, torch.arange(start, start + len(part), device=memory.device) * ODD + seed


def maker(channel: Channel) -> None:
    """Makes a region of as many bytes as it is told, fills it, and passes it on."""
    from ipc.memory_cuda import DeviceRegion

    (nbytes, seed), _ = channel.receive()
    region = DeviceRegion.create(nbytes, 0)
    fill(region.tensor(0, region.nbytes), seed)
    assert matches(region.tensor(0, region.nbytes), seed)
    channel.send({"nbytes": region.nbytes, "uuid": region.uuid}, region.fd)
    channel.receive()


def keeper(channel: Channel) -> None:
    """Holds a descriptor, without CUDA and torch, and gives it back."""
    _, (fd,) = channel.receive()
    channel.send({"loaded": sorted({"torch", "cuda", "ctypes"} & sys.modules.keys())})
    channel.receive()
    channel.send({}, fd)
    channel.receive()


def reader(channel: Channel) -> None:
    """Maps the memory for reading; compares it with a seed, or writes to it, as it is told."""
    import torch

    from ipc.memory_cuda import DeviceReader

    memory, (fd,) = channel.receive()
    region = DeviceReader.attach(fd, memory["nbytes"], memory["uuid"])
    os.close(fd)
    view = region.tensor(0, region.nbytes)
    channel.send({"device": str(view.device), "contexts": torch.cuda.device_count()})
    while (message := channel.receive()[0]) is not None:
        if "seed" in message:
            channel.send(matches(view, message["seed"]))
        if "write" in message:
            view[:8].fill_(1)
            torch.cuda.synchronize()
            channel.send("it was written")


def writer(channel: Channel) -> None:
    """Maps the memory again for writing, as a restarted rank does: checks it and fills it anew."""
    from ipc.memory_cuda import DeviceRegion

    memory, (fd,) = channel.receive()
    region = DeviceRegion.attach(fd, memory["nbytes"], 0)
    view = region.tensor(0, region.nbytes)
    same = matches(view, memory["seed"])
    fill(view, memory["next"])
    channel.send({"same": same and matches(view, memory["next"]), "uuid": region.uuid})
    channel.receive()


def leaver(channel: Channel) -> None:
    """Ends as a program ends, with tensors alive everywhere: in a module, a cycle, a thread and a queued kernel."""
    import threading

    import torch

    from ipc.memory_cuda import DeviceReader

    memory, (fd,) = channel.receive()
    region = DeviceReader.attach(fd, memory["nbytes"], memory["uuid"])
    cycle: list[Any] = [region.tensor(0, 64)]
    cycle.append(cycle)
    torch.left_behind = region.tensor(0, 64)  # type: ignore[attr-defined]
    kept = region.tensor(64, 64)
    threading.Thread(target=lambda view: threading.Event().wait(), args=[region.tensor(0, 8)], daemon=True).start()
    torch.cuda._sleep(100_000_000)
    torch.left_behind_too = kept + 1  # type: ignore[attr-defined]
    channel.send("leaving")


ROLES = {role.__name__: role for role in (maker, keeper, reader, writer, leaver)}

if __name__ == "__main__":
    ROLES[sys.argv[1]](Channel(socket.socket(fileno=int(sys.argv[2]))))
