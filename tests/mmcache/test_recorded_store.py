"""What a release has stored, this one reads, or refuses cleanly."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from mmcache.tiers.base import Purged, Selection
from mmcache.tiers.codec import FORMAT_VERSION, READ_VERSIONS
from tests.mmcache.lmdb_store import open_store
from tests.mmcache.recorded_store import DATA, recorded_entries, recorded_file
from tests.mmcache.tier_contract import read_back

pytestmark = pytest.mark.skipif(sys.byteorder != "little", reason="LMDB files have the byte order of their machine")


def test_every_version_that_is_read_is_recorded() -> None:
    assert FORMAT_VERSION in READ_VERSIONS
    assert {path.name for path in DATA.glob("store-format-*.lmdb")} == {
        recorded_file(version).name for version in READ_VERSIONS
    }


@pytest.mark.parametrize("version", READ_VERSIONS)
def test_a_recorded_file_is_read(tmp_path: Path, version: int) -> None:
    shutil.copy(recorded_file(version), tmp_path / "store.lmdb")
    expected = recorded_entries()
    with open_store(tmp_path) as (tier, runner):
        assert tier.counters["entries"] == len(expected)
        found = runner.run(tier.find([entry.key for entry, _ in expected]))
        assert found == [entry for entry, _ in expected]
        for entry, payload in expected:
            assert runner.run(read_back(tier, entry)) == payload
        (first, payload), _ = expected
        runner.run(tier.put(first, memoryview(payload)))
        assert runner.run(tier.purge(Selection(namespace=first.namespace))) == Purged(1, first.nbytes)
        assert tier.counters["damaged"] == 0
