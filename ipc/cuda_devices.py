"""Which CUDA devices this process sees, matched across processes by UUID, and which of them may use a pool.

Ordinals differ between processes with `CUDA_VISIBLE_DEVICES`; a UUID names a physical device (or an instance of one).
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from ipc.errors import DeviceUnavailable


@dataclass(frozen=True, slots=True)
class VisibleDevice:
    """A device that this process may use.

    Attributes:
        ordinal: its number in this process, as in `cuda:0`.
        uuid: its name in every process, 36 characters.
        name: for people.
        has_virtual_memory: whether memory can be mapped on it at addresses of our choice.
        has_descriptors: whether such memory can be exported as a POSIX file descriptor.
        peers: UUIDs of the other visible devices whose memory it can read.
    """

    ordinal: int
    uuid: str
    name: str
    has_virtual_memory: bool
    has_descriptors: bool
    peers: frozenset[str]

    def __str__(self) -> str:
        return f"{self.name} {self.uuid}, here cuda:{self.ordinal}"


def visible_devices() -> tuple[VisibleDevice, ...]:
    """All of them, by ordinal. Makes no context. Raises `DeviceUnavailable` if there is none."""
    from ipc.cuda_driver import call, driver, initialise

    attributes = driver.CUdevice_attribute
    handles = [call(driver.cuDeviceGet, ordinal) for ordinal in range(initialise())]
    uuids = [str(uuid.UUID(bytes=bytes(call(driver.cuDeviceGetUuid, handle).bytes))) for handle in handles]
    return tuple(
        VisibleDevice(
            ordinal,
            uuids[ordinal],
            call(driver.cuDeviceGetName, 256, handle).partition(b"\0")[0].decode(),
            bool(
                call(
                    driver.cuDeviceGetAttribute,
                    attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                    handle,
                )
            ),
            bool(
                call(
                    driver.cuDeviceGetAttribute,
                    attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                    handle,
                )
            ),
            frozenset(
                uuids[other]
                for other, peer in enumerate(handles)
                if other != ordinal and call(driver.cuDeviceCanAccessPeer, handle, peer)
            ),
        )
        for ordinal, handle in enumerate(handles)
    )


def by_ordinal(ordinal: int, visible: Sequence[VisibleDevice]) -> VisibleDevice:
    """The device of that number, if memory of it can be shared. Raises `DeviceUnavailable` otherwise."""
    if not 0 <= ordinal < len(visible):
        raise DeviceUnavailable(f"cuda:{ordinal} is not one of the {len(visible)} devices visible to this process")
    return _checked(visible[ordinal])


def for_reader(owner: str, ordinal: int | None, visible: Sequence[VisibleDevice]) -> VisibleDevice:
    """The device that reads memory of the device with UUID `owner`: that of `ordinal`, or the owner itself if None.

    Raises `DeviceUnavailable` if the owner is not visible to this process, or the reader cannot access its memory. The
    bytes have to be copied through the host then.
    """
    at_owner = next((device for device in visible if device.uuid == owner), None)
    if at_owner is None:
        seen = ", ".join(device.uuid for device in visible)
        raise DeviceUnavailable(
            f"the memory is on device {owner}, which is not visible to this process (it sees {seen}): a reader needs "
            "the device itself among its CUDA_VISIBLE_DEVICES"
        )
    reader = _checked(at_owner) if ordinal is None else by_ordinal(ordinal, visible)
    if reader.uuid != owner and owner not in reader.peers:
        raise DeviceUnavailable(f"{reader} has no peer access to {at_owner}, where the memory is")
    return reader


def _checked(device: VisibleDevice) -> VisibleDevice:
    lacking = {
        "virtual memory management": not device.has_virtual_memory,
        "memory handles that are POSIX file descriptors": not device.has_descriptors,
    }
    if missing := [what for what, is_missing in lacking.items() if is_missing]:
        raise DeviceUnavailable(f"{device} cannot share memory: device or driver lacks {' and '.join(missing)}")
    return device
