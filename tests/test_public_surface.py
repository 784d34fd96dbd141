"""What `import mmcache` offers: nothing comes or goes unnoticed."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

import mmcache
import mmcache.errors

ERRORS = {
    name: value
    for name, value in vars(mmcache.errors).items()
    if isinstance(value, type) and issubclass(value, mmcache.MMCacheError)
}
SECTIONS = re.findall(
    r"^## (MMC\d{3}) (\w+)\n\n(.+?)(?=\n## |\Z)",
    (Path(__file__).parent.parent / "docs" / "errors.md").read_text(), re.MULTILINE | re.DOTALL,
)  # fmt: skip

PUBLIC_SURFACE = [
    "AsyncClient",
    "CapturingError",
    "CheckpointError",
    "Client",
    "ClientClosed",
    "ConfigError",
    "ConnectionLost",
    "ContentKey",
    "ContentMismatch",
    "DeadlineExceeded",
    "DeviceUnavailable",
    "EncodeError",
    "EncodeFailed",
    "Fingerprint",
    "ForeignModel",
    "Handle",
    "ImageTooLarge",
    "ItemError",
    "Lease",
    "LeaseReleased",
    "MMCacheError",
    "NoRanks",
    "NonFiniteEmbedding",
    "NotCached",
    "Overloaded",
    "Plan",
    "PoolExhausted",
    "ProtocolError",
    "ProtocolMismatch",
    "RequestCancelled",
    "RequestTimeout",
    "SidecarError",
    "SidecarRunning",
    "SidecarUnavailable",
    "SliceGone",
    "SliceRef",
    "StagedRef",
    "StagingExhausted",
    "TooManyLeases",
    "TooManyRequests",
    "UndecodableImage",
    "UnreadableItem",
    "UnsupportedItem",
    "UnsupportedMode",
    "WrongEmbedding",
    "__version__",
    "connect",
    "local",
]


def test_the_public_surface() -> None:
    assert sorted(mmcache.__all__) == sorted(PUBLIC_SURFACE)
    assert all(hasattr(mmcache, name) for name in mmcache.__all__)


def test_nothing_public_is_missing_from_the_surface() -> None:
    public = {name for name, value in vars(mmcache).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert public <= set(mmcache.__all__)


def test_every_error_is_public() -> None:
    assert ERRORS.keys() <= set(mmcache.__all__)


def test_every_error_has_an_id_of_its_own() -> None:
    codes = [error.code for error in ERRORS.values()]
    assert len(set(codes)) == len(codes), "class NewError(ItemError, code=...): a number that no other has"
    assert all(re.fullmatch(r"MMC[1-4]\d\d", code) for code in codes)
    for name, error in ERRORS.items():
        assert (error.code >= "MMC400") == issubclass(error, mmcache.ItemError), name
        assert (error.code[:4] == "MMC2") == issubclass(error, mmcache.SidecarError), name


def test_every_error_has_one_section_of_the_docs_that_says_what_to_do() -> None:
    assert sorted((code, name) for code, name, _ in SECTIONS) == sorted(
        (error.code, name) for name, error in ERRORS.items()
    ), "docs/errors.md: one section `## CODE Name` for each error"
    for code, name, text in SECTIONS:
        assert len(text) > 60, name
        assert code == "MMC100" or "**Do:** " in text, name


@pytest.mark.parametrize("error", [error for error in ERRORS.values() if error is not mmcache.EncodeError])
def test_a_message_ends_with_the_id_once(error: type[mmcache.MMCacheError]) -> None:
    raised = error("what was wrong")
    assert str(raised) == f"what was wrong [{error.code}]"
    assert str(error(str(raised))) == str(raised), "over the wire and back"


def test_a_calls_error_has_its_items_ids_and_its_own() -> None:
    items = [mmcache.NotCached("it is nowhere", index=3), mmcache.Overloaded("full", 0.5)]
    assert str(mmcache.EncodeError(items)) == (
        "2 of 2 items failed: item 3: it is nowhere [MMC414]; full [MMC410] [MMC307]"
    )
