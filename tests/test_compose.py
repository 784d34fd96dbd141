"""docker-compose.yml says what the sidecar understands."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from mmcache.cli.app import cli
from mmcache.config import Settings
from mmcache.config_sources import load_settings

ROOT = Path(__file__).parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SIDECARS = [name for name, service in COMPOSE["services"].items() if service["command"][0] == "mmcache"]


def _settings(name: str) -> Settings:
    service = COMPOSE["services"][name]
    program, command, *arguments = service["command"]
    assert (program, command) == ("mmcache", "serve")
    flags = dict(cli.commands["serve"].make_context(command, arguments).params)
    return load_settings(flags, {"HOME": "/nonexistent"} | service["environment"], flags.pop("config"))


def _mounts(name: str) -> dict[str, str]:
    return dict(reversed(mount.split(":")) for mount in COMPOSE["services"][name]["volumes"])


def test_there_is_a_sidecar() -> None:
    assert SIDECARS == ["sidecar"]


@pytest.mark.parametrize("name", SIDECARS)
def test_commands_pass_the_settings_parser(name: str) -> None:
    settings = _settings(name)
    assert settings.device == "cpu"
    assert settings.store_path is not None


@pytest.mark.parametrize("name", SIDECARS)
def test_what_must_outlive_a_container_lies_in_declared_volumes(name: str) -> None:
    settings, mounts = _settings(name), _mounts(name)
    assert set(mounts.values()) <= COMPOSE["volumes"].keys()
    for path, volume in ((settings.state, "state"), (settings.store_path, "state"), (settings.socket, "socket")):
        assert path is not None
        assert any(PurePosixPath(path).is_relative_to(mount) and mounts[mount] == volume for mount in mounts)


@pytest.mark.parametrize("name", SIDECARS)
def test_the_health_check_asks_the_sidecar_it_belongs_to(name: str) -> None:
    service = COMPOSE["services"][name]
    kind, program, command, *arguments = service["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "mmcache")
    params = cli.commands[command].make_context(command, arguments).params
    assert params["timeout"] < float(service["healthcheck"]["timeout"].removesuffix("s"))
    assert service["environment"]["MMCACHE_SOCKET"] == str(_settings(name).socket)


@pytest.mark.parametrize("name", SIDECARS)
def test_the_sidecar_may_drain_before_it_is_killed(name: str) -> None:
    grace_s = float(COMPOSE["services"][name]["stop_grace_period"].removesuffix("s"))
    assert grace_s > _settings(name).drain_timeout_s


def test_redis_is_declared_and_unused() -> None:
    redis = COMPOSE["services"]["redis"]
    assert redis["profiles"] == ["redis"]
    assert all("depends_on" not in COMPOSE["services"][name] for name in SIDECARS)


def test_the_image_makes_the_folders_for_the_user() -> None:
    text = (ROOT / "Dockerfile").read_text()
    uid = COMPOSE["services"]["sidecar"]["user"].split(":")[0]
    assert f"--uid {uid} " in text
    for mount in _mounts("sidecar"):
        assert f" {mount}" in text


def test_the_image_is_given_what_it_copies() -> None:
    shipped = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ")
        for source in line.split()[1:-1]
    }
    assert copied == shipped
    assert all((ROOT / source).exists() for source in copied)
