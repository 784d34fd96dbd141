"""Which device reads a pool: the rules, on made-up machines. Needs no device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ipc.cuda_devices import VisibleDevice, by_ordinal, for_reader
from ipc.errors import DeviceUnavailable


def device(ordinal: int, uuid: str, *peers: str) -> VisibleDevice:
    return VisibleDevice(ordinal, uuid, "NVIDIA X", True, True, frozenset(peers))


MACHINE = (device(0, "aaaa", "bbbb"), device(1, "bbbb", "aaaa"), device(2, "cccc"))


@pytest.mark.parametrize(("owner", "ordinal"), [("aaaa", 0), ("bbbb", 1), ("cccc", 2)])
def test_a_device_reads_its_own_memory_by_uuid(owner: str, ordinal: int) -> None:
    assert for_reader(owner, None, MACHINE).ordinal == ordinal
    turned = tuple(replace(each, ordinal=2 - each.ordinal) for each in reversed(MACHINE))
    assert for_reader(owner, None, turned).ordinal == 2 - ordinal


def test_a_named_device_reads_with_peer_access_alone() -> None:
    assert for_reader("aaaa", 1, MACHINE).uuid == "bbbb"
    assert for_reader("cccc", 2, MACHINE).uuid == "cccc"
    with pytest.raises(DeviceUnavailable, match=r"cccc, here cuda:2 has no peer access to .* aaaa, here cuda:0"):
        for_reader("aaaa", 2, MACHINE)


def test_an_owner_that_is_hidden_is_named_with_the_rule() -> None:
    with pytest.raises(DeviceUnavailable, match=r"dddd, which is not visible .* aaaa, bbbb.*CUDA_VISIBLE"):
        for_reader("dddd", None, MACHINE)
    with pytest.raises(DeviceUnavailable, match="dddd"):
        for_reader("dddd", 0, MACHINE)


@pytest.mark.parametrize("ordinal", [-1, 3])
def test_a_number_that_no_device_has_is_refused(ordinal: int) -> None:
    with pytest.raises(DeviceUnavailable, match=f"cuda:{ordinal} is not one of the 3"):
        by_ordinal(ordinal, MACHINE)


def test_what_a_device_lacks_is_named() -> None:
    lacking = replace(MACHINE[0], has_virtual_memory=False)
    with pytest.raises(DeviceUnavailable, match=r"aaaa, here cuda:0 cannot share memory: .* lacks virtual memory"):
        by_ordinal(0, (lacking,))
    both = replace(lacking, has_descriptors=False)
    with pytest.raises(DeviceUnavailable, match="management and memory handles that are POSIX file descriptors"):
        for_reader("aaaa", None, (both,))
