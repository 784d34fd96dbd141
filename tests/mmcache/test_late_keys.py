"""Pixels that are hashed only where they were put, as those that come from a device are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import mmcache
from mmcache.framing import Kind
from mmcache.protocol import Staged
from mmcache.records import NO_KEY, STAGED_KEY
from mmcache.staging import StageCall
from tests.mmcache.support import SidecarProcess, image


class Late:
    """Pixels in place that have no key yet."""

    def __init__(self, client: mmcache.Client, seed: int, consumers: int = 1) -> None:
        self._client = client
        self.key = client.key(image(seed))
        call = StageCall(client._core, [image(seed)], consumers, None, {})
        call._keys = [mmcache.ContentKey(NO_KEY)]
        deadline = time.monotonic() + 10
        for start in call.questions():
            client._wait(client._pump, client._begin(client._pump, start, deadline), deadline)
        call.write()
        ((self.token, _),) = call._places

    def ref(self, key: mmcache.ContentKey | None = None) -> mmcache.StagedRef:
        return mmcache.StagedRef(self.token, str(key or self.key), (56, 84, 3), 56 * 84 * 3)

    def say(self, key: bytes | None = None) -> None:
        said = STAGED_KEY.pack(self.token, key or self.key)
        self._client._pump.turn(lambda core: core.tell(Kind.STAGED, Staged(has_keys=True), said))


@pytest.fixture
def other(shared_sidecar: SidecarProcess) -> Iterator[mmcache.Client]:
    with shared_sidecar.connect() as other:
        yield other


def test_named_after_its_key_was_said(client: mmcache.Client) -> None:
    late = Late(client, 801)
    late.say()
    staged, plain = client.encode([late.ref(), image(801)])
    np.testing.assert_array_equal(staged.numpy(), plain.numpy())
    for lease in (staged, plain):
        lease.release()


def test_named_before(client: mmcache.Client, other: mmcache.Client) -> None:
    """A reference may come faster than the word of who made it."""
    late = Late(client, 802, consumers=2)
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(one.encode, [late.ref()]) for one in (client, other)]
        time.sleep(0.1)
        late.say()
        leases = [lease for call in calls for lease in call.result()]
    with client.encode([image(802)])[0] as plain:
        for lease in leases:
            np.testing.assert_array_equal(lease.numpy(), plain.numpy())
            lease.release()


def test_named_with_another_key_before(client: mmcache.Client, other: mmcache.Client) -> None:
    """Who lies is told; who does not is served, and nothing is cached under the lie."""
    late = Late(client, 803, consumers=2)
    lie = client.key(image(804))
    with ThreadPoolExecutor(2) as threads:
        lying = threads.submit(other.encode, [late.ref(lie)], "return")
        honest = threads.submit(client.encode, [late.ref()])
        time.sleep(0.1)
        late.say()
        (error,) = lying.result()
        assert isinstance(error, mmcache.ContentMismatch)
        honest.result()[0].release()
    assert client.lookup([lie]) == [None]


def test_named_with_a_key_that_is_cached_before(client: mmcache.Client, other: mmcache.Client) -> None:
    """Another's embedding does not end the pixels."""
    other.encode([image(805)])[0].release()
    late = Late(client, 806, consumers=2)
    other.encode([late.ref(client.key(image(805)))])[0].release()  # a hit, of what was asked for
    late.say()
    with client.encode([late.ref()])[0] as staged, client.encode([image(806)])[0] as plain:
        assert staged.key == plain.key
        np.testing.assert_array_equal(staged.numpy(), plain.numpy())


def test_a_key_that_is_not_that_of_the_pixels(client: mmcache.Client) -> None:
    late = Late(client, 807)
    false = client.key(image(808))
    late.say(false)
    (error,) = client.encode([late.ref(false)], errors="return")
    assert isinstance(error, mmcache.ContentMismatch)
    assert client.lookup([false, late.key]) == [None, None]


def test_a_key_that_never_comes(client: mmcache.Client) -> None:
    late = Late(client, 809)
    client._pump.turn(lambda core: core.tell_tokens(Kind.STAGED, Staged(), [late.token]))
    (error,) = client.encode([late.ref()], errors="return")
    assert isinstance(error, mmcache.ContentMismatch)
