"""Control memory: words that two processes share."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from ipc.control import GENERATION_MAX, ControlMemory
from ipc.errors import MemorySealError, OutOfBounds
from ipc.memory_shm import SEALS_RESIZE, check_sealed


def test_a_clients_store_is_seen_by_the_coordinator() -> None:
    control = ControlMemory.create(16)
    client = ControlMemory.attach(control.fd)
    assert control.num_words == 16
    assert control.read(3) == 0
    client.acknowledge(3, GENERATION_MAX)
    assert control.read(3) == GENERATION_MAX
    control.scalars[3] = 0
    assert client.read(3) == 0


def test_words_that_changed_are_found_among_thousands() -> None:
    control = ControlMemory.create(16_384)
    client = ControlMemory.attach(control.fd)
    seen = np.zeros(10_000, np.uint32)
    assert control.acknowledged(seen) == []
    for slot in (1, 77, 9_999, 12_000):
        client.acknowledge(slot, 5)
    assert control.acknowledged(seen) == [1, 77, 9_999]
    seen[77] = 5
    assert control.acknowledged(seen) == [1, 9_999]


@pytest.mark.parametrize("slot", [-1, 0, 4096])
def test_word_0_and_words_outside_are_refused(slot: int) -> None:
    control = ControlMemory.create(4096)
    client = ControlMemory.attach(control.fd)
    with pytest.raises(OutOfBounds, match="slot"):
        client.acknowledge(slot, 1)


def test_the_memory_keeps_its_size_and_needs_a_word() -> None:
    control = ControlMemory.create(2)
    check_sealed(control.fd, SEALS_RESIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(control.fd, 0)
    with pytest.raises(OutOfBounds, match="num_words"):
        ControlMemory.create(1)


def test_a_memory_that_could_be_resized_is_not_attached() -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(MemorySealError):
        ControlMemory.attach(fd)
    os.close(fd)


def test_another_process_acknowledges() -> None:
    control = ControlMemory.create(8)
    script = f"from ipc.control import ControlMemory; ControlMemory.attach({control.fd}).acknowledge(5, 41)"
    subprocess.run([sys.executable, "-c", script], pass_fds=[control.fd], check=True, timeout=30)
    assert control.read(5) == 41


def test_close_returns_the_descriptor_and_the_other_side_lives_on() -> None:
    control = ControlMemory.create(8)
    client = ControlMemory.attach(control.fd)
    fd = control.fd
    control.close()
    control.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    client.acknowledge(1, 1)
    assert client.read(1) == 1
    client.close()
