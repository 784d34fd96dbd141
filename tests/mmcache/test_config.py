"""Settings: precedence, what is refused and how it is said."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from pydantic import ValidationError

from mmcache.config import Settings
from mmcache.config_sources import load_settings
from mmcache.errors import ConfigError
from mmcache.paths import default_socket, default_state
from mmcache.sizes import parse_size

HOME = {"HOME": "/users/someone"}


def _config(folder: Path, text: str) -> Path:
    file = folder / "mmcache.toml"
    file.write_text(text)
    return file


def test_defaults_are_resolved() -> None:
    settings = load_settings({}, HOME)
    assert (settings.device, settings.ranks, settings.dtype) == ("cpu", 2, "float32")
    assert settings.state == Path("/users/someone/.local/state/mmcache")
    assert settings.store_path == settings.state / "embeddings.lmdb"
    assert settings.socket == settings.state / "mmcache.sock"
    assert settings.pool_bytes == 256 << 20


def test_flags_win_over_variables_over_the_file(tmp_path: Path) -> None:
    file = _config(tmp_path, 'ranks = 3\nmodel = "kimi-k2.5"\ndtype = "bfloat16"\n')
    environ = HOME | {"MMCACHE_RANKS": "4", "MMCACHE_MODEL": "moonvit-tiny"}
    settings = load_settings({"ranks": 5, "model": None}, environ, file)
    assert (settings.ranks, settings.model, settings.dtype) == (5, "moonvit-tiny", "bfloat16")
    by_variable = load_settings({}, HOME | {"MMCACHE_CONFIG": str(file), "MMCACHE_MODEL": ""})
    assert (by_variable.ranks, by_variable.model) == (3, "kimi-k2.5")


def test_the_result_is_frozen_and_every_setting_is_described() -> None:
    settings = load_settings({}, HOME)
    with pytest.raises(ValidationError, match="frozen"):
        settings.ranks = 3  # type: ignore[misc]
    assert all(field.description for field in Settings.model_fields.values())


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 512 << 20), ("4 GiB", 4 << 30), ("1.5kib", 1536), ("2GB", 2 * 10**9), ("77", 77), (12, 12), ("3B", 3)],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5", "12XB", "0x10", "1e9", "512M", True, None, 1.5, "1 2"])
def test_wrong_sizes(text: object) -> None:
    with pytest.raises(ValueError, match="512MiB"):
        parse_size(text)


def test_pool_is_rounded_up_to_the_page() -> None:
    assert load_settings({"pool_bytes": (1 << 20) + 1}, HOME).pool_bytes == (1 << 20) + mmap.PAGESIZE


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"pool_bytes": "12XB"}, r"pool_bytes = '12XB' \(flag --pool-bytes\): must be a size such as 512MiB"),
        ({"pool_bytes": "1KiB"}, r"pool_bytes = '1KiB' \(flag --pool-bytes\): must be auto or a size from 1MiB"),
        ({"ranks": "0"}, r"ranks = '0' \(flag --ranks\): must be auto or a whole number, 1 to 64"),
        ({"ranks": "many"}, "must be auto or a whole number"),
        ({"ranks": True}, "not a truth value"),
        ({"decoders": "65"}, r"decoders = '65' \(flag --decoders\): must be auto or a whole number, 1 to 64"),
        ({"decoders": False}, "not a truth value"),
        ({"device": "cuda"}, r"device = 'cuda' \(flag --device\): no CUDA device is visible"),
        ({"device": "tpu"}, "must be auto, cpu or cuda"),
        ({"dtype": "float16"}, "must be auto, float32 or bfloat16"),
        ({"store": "redis://host:1"}, "redis:// is not available yet"),
        ({"store": "rediss://host"}, "not available yet"),
        ({"store": "s3://bucket"}, "unknown kind of store"),
        ({"store": "/a/path"}, "unknown kind of store"),
        ({"store": "file://host/path"}, "three slashes"),
        ({"store": "file:///"}, "absolute path of a file"),
        ({"store": "file://"}, "unknown kind of store"),
        ({"store": "file:///a/folder/"}, "absolute path of a file"),
        ({"store_timeout_ms": 0}, "1 to 60000"),
        ({"drain_timeout_s": "nan"}, "must be a number, 0 to 3600"),
        ({"log_level": "loud"}, "debug, info, warning or error"),
        ({"model": ""}, "must be a preset's name or a folder"),
    ],
)
def test_a_wrong_flag_names_setting_source_and_rule(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(flags, HOME)


def test_all_wrong_settings_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({"ranks": "x"}, HOME | {"MMCACHE_DTYPE": "int8"})
    assert "flag --ranks" in str(caught.value)
    assert "variable MMCACHE_DTYPE" in str(caught.value)


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mmcache\.toml key ranks\): must be auto"):
        load_settings({}, HOME, _config(tmp_path, 'ranks = "x"'))
    with pytest.raises(ConfigError, match=r"key pool_byte: not a setting; did you mean pool_bytes\?"):
        load_settings({}, HOME, _config(tmp_path, "pool_byte = 1"))
    with pytest.raises(ConfigError, match="key serve: not a setting"):
        load_settings({}, HOME, _config(tmp_path, "[serve]\nranks = 1"))
    with pytest.raises(ConfigError, match=r"flag --config\): must be a TOML file"):
        load_settings({}, HOME, _config(tmp_path, "ranks = "))
    with pytest.raises(ConfigError, match=r"variable MMCACHE_CONFIG\): must be a readable TOML file: No such file"):
        load_settings({}, HOME | {"MMCACHE_CONFIG": str(tmp_path / "absent")})


def test_a_slip_in_a_variable_is_refused_and_a_stranger_ignored() -> None:
    with pytest.raises(ConfigError, match=r"MMCACHE_POOL_BYTE: not a setting; did you mean MMCACHE_POOL_BYTES\?"):
        load_settings({}, HOME | {"MMCACHE_POOL_BYTE": "1GiB"})
    assert load_settings({}, HOME | {"MMCACHE_SOAK": "1", "OTHER_RANKS": "9"}).ranks == 2


def test_the_default_socket_is_one_rule_for_all() -> None:
    assert default_socket(HOME | {"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7/mmcache.sock")
    assert default_socket(HOME | {"XDG_RUNTIME_DIR": "relative"}) == default_state(HOME) / "mmcache.sock"
    environ = HOME | {"MMCACHE_STATE": "/srv/state", "XDG_STATE_HOME": "/x"}
    assert default_socket(environ) == Path("/srv/state/mmcache.sock") == load_settings({}, environ).socket
    named = HOME | {"MMCACHE_SOCKET": "/s/a.sock", "XDG_RUNTIME_DIR": "/run/user/7"}
    assert default_socket(named) == Path("/s/a.sock") == load_settings({"state": "/elsewhere"}, named).socket
    assert default_state(HOME | {"XDG_STATE_HOME": "/x"}) == Path("/x/mmcache")


def test_a_socket_path_has_a_longest_length() -> None:
    longest = "/" + "s" * 106
    assert load_settings({"socket": longest}, HOME).socket == Path(longest)
    with pytest.raises(ConfigError, match=r"socket = .* \(flag --socket\): .* at most 107 bytes, this one has 108"):
        load_settings({"socket": longest + "s"}, HOME)


def test_paths_are_absolute_and_stores_decoded() -> None:
    settings = load_settings({"state": "here", "store": "file:///srv/my%20store.lmdb"}, HOME)
    assert settings.state == Path.cwd() / "here"
    assert settings.store_path == Path("/srv/my store.lmdb")
    assert load_settings({"state": "/with space"}, HOME).store_path == Path("/with space/embeddings.lmdb")
    assert load_settings({"store": "none"}, HOME).store_path is None


@pytest.mark.parametrize(("num_cores", "num_decoders"), [(1, 1), (2, 1), (3, 1), (8, 4), (16, 8), (192, 8)])
def test_decoders_by_the_cores_that_the_sidecar_may_use(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, num_decoders: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(num_cores)))
    assert load_settings({}, HOME).decoders == num_decoders
    assert load_settings({"decoders": "64"}, HOME).decoders == 64
