"""docker-compose.yml and Dockerfile say what the sidecar, Prometheus and Grafana understand. Nothing is built here."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from mmcache.cli.app import cli
from mmcache.config import Settings
from mmcache.config_sources import load_settings
from tests.mmcache.support import SidecarProcess, clean_environ

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", TEXT))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
SIDECARS = ["sidecar", "sidecar-gpu"]


def instructions(name: str) -> list[str]:
    return re.findall(rf"^ *{name} +(.*)$", DOCKERFILE, re.MULTILINE)


def environ_of_the_image() -> dict[str, str]:
    return dict(pair.split("=", 1) for line in instructions("ENV") for pair in shlex.split(line))


def settings_of(name: str) -> Settings:
    service = SERVICES[name]
    (entrypoint,) = set(instructions("ENTRYPOINT"))
    assert json.loads(entrypoint) == ["mmcache"]
    command, *arguments = service["command"]
    assert command == "serve"
    flags = dict(cli.commands[command].make_context(command, arguments).params)
    environ = {"HOME": "/nonexistent"} | environ_of_the_image() | service.get("environment", {})
    return load_settings(flags, environ, flags.pop("config"))


def mounts_of(name: str) -> dict[str, str]:
    """What lies where in a container."""
    found = {}
    for mount in SERVICES[name]["volumes"]:
        source, target, *_ = mount.split(":")
        found[target] = source
    return found


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of a sidecar for GPUs are looked at as a machine would that has one."""
    monkeypatch.setattr("mmcache.config_rules.num_devices", lambda: 1)
    monkeypatch.setattr("mmcache.config_rules.has_driver_api", lambda: True)


@pytest.mark.parametrize("name", SIDECARS)
def test_commands_pass_the_settings_parser(name: str) -> None:
    settings = settings_of(name)
    assert settings.device == ("cuda" if name.endswith("gpu") else "cpu")
    assert settings.store_path is not None
    assert SERVICES[name]["profiles"] == ["gpu" if name.endswith("gpu") else "cpu"]


@pytest.mark.parametrize("name", SIDECARS)
def test_what_must_outlive_a_container_lies_in_declared_volumes(name: str) -> None:
    settings, mounts = settings_of(name), mounts_of(name)
    assert {source for source in mounts.values() if source[:1] not in "./"} <= COMPOSE["volumes"].keys()
    for path, volume in ((settings.state, "state"), (settings.store_path, "state"), (settings.socket, "socket")):
        assert path is not None
        assert any(
            PurePosixPath(path).is_relative_to(mount) and source.startswith(volume) for mount, source in mounts.items()
        )


def test_no_two_sidecars_share_a_folder() -> None:
    writable = [mounts_of(name)[mount] for name in SIDECARS for mount in ("/var/lib/mmcache", "/run/mmcache")]
    assert len(set(writable)) == len(writable)


@pytest.mark.parametrize("name", SIDECARS)
def test_the_sidecar_may_drain_before_it_is_killed(name: str) -> None:
    grace_s = float(SERVICES[name]["stop_grace_period"].removesuffix("s"))
    assert grace_s > settings_of(name).drain_timeout_s


@pytest.mark.parametrize("name", SIDECARS)
def test_no_sidecar_has_more_rights_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    uid = service["user"].split(":")[0]
    assert f"--uid {uid} " in DOCKERFILE
    assert instructions("USER") == [service["user"]] * 2, "nor without the compose file"
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert "no-new-privileges:true" in service["security_opt"]
    assert "privileged" not in service
    assert service["ulimits"]["memlock"] == -1, "pages of pools and staging regions are locked for a device"


def test_the_image_makes_the_folders_for_the_user() -> None:
    for mount in ("/run/mmcache", "/var/lib/mmcache"):
        assert all(mount in mounts_of(name) for name in SIDECARS)
        assert f" {mount}" in DOCKERFILE


def test_the_image_alone_is_a_sidecar_too() -> None:
    for command in instructions("CMD"):
        arguments = json.loads(command)
        if arguments[0] != "serve":
            continue
        flags = dict(cli.commands["serve"].make_context("serve", arguments[1:]).params)
        settings = load_settings(flags, environ_of_the_image(), flags.pop("config"))
        assert settings.http_address == ("0.0.0.0", int(instructions("EXPOSE")[0]))
        assert settings.log_format == "json"


def test_the_image_is_given_what_it_copies() -> None:
    shipped = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {source for line in instructions("COPY") if "--from" not in line for source in line.split()[:-1]}
    assert copied == shipped
    assert all((ROOT / source).exists() for source in copied)


def test_build_targets_are_stages() -> None:
    stages = re.findall(r"^FROM .* AS (\w+)$", DOCKERFILE, re.MULTILINE)
    arguments = {line.partition("=")[0] for line in instructions("ARG")}
    for name in SIDECARS:
        build = SERVICES[name]["build"]
        assert build["target"] in stages
        assert build.get("args", {}).keys() <= arguments
    assert stages[-1] == "cpu", "what is built without a target"


def test_extras_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    chosen = [line.partition("=")[2] for line in instructions("ARG") if line.startswith("EXTRAS=")]
    chosen += [SERVICES[name]["build"].get("args", {}).get("EXTRAS", "server") for name in SIDECARS]
    assert all(set(extra.split(",")) <= extras.keys() for extra in chosen)
    assert any("gpu" in extra for extra in chosen)


def test_hadolint_has_nothing_to_say() -> None:
    program = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([str(program), str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_health_check_tells_a_sidecar_that_is_ready_from_none(tmp_path: Path) -> None:
    (health,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    program, *arguments = json.loads(health)
    assert program == "python"
    port = str(settings_of("sidecar").http_address[1])  # type: ignore[index]
    assert f":{port}/readyz" in arguments[-1]

    def is_healthy(address: str) -> bool:
        code = arguments[-1].replace(f"127.0.0.1:{port}", address)
        command = [sys.executable, *arguments[:-1], code]
        return subprocess.run(command, env=clean_environ(), capture_output=True, check=False).returncode == 0

    with SidecarProcess(tmp_path, http="127.0.0.1:0") as sidecar:
        address = sidecar.stats()["http"]
        assert is_healthy(address)
    assert not is_healthy(address)


def test_prometheus_scrapes_every_sidecar() -> None:
    mounts = mounts_of("prometheus")
    (config_file,) = [flag.partition("=")[2] for flag in SERVICES["prometheus"]["command"] if "config.file" in flag]
    folder = ROOT / mounts[str(PurePosixPath(config_file).parent)]
    config = yaml.safe_load((folder / PurePosixPath(config_file).name).read_text())
    assert all((folder / rules).exists() for rules in config["rule_files"])
    (scraped,) = [entry for job in config["scrape_configs"] for entry in job["dns_sd_configs"]]
    assert scraped["names"] == SIDECARS
    for name in SIDECARS:
        address = settings_of(name).http_address
        assert address == ("0.0.0.0", scraped["port"])
        assert str(scraped["port"]) in SERVICES[name]["expose"]


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    mounts = mounts_of("grafana")
    provisioning = ROOT / mounts["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "mmcache.yml").read_text())["providers"]
    assert source["url"] == "http://prometheus:9090"
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert PurePosixPath(home).is_relative_to(provider["options"]["path"])
    assert json.loads((ROOT / mounts[home]).read_text())["uid"] == "mmcache"
    assert mounts["/var/lib/grafana"] in COMPOSE["volumes"]


def test_services_are_pinned_watched_and_on_loopback() -> None:
    for name, service in SERVICES.items():
        assert ":" in service["image"], name
        assert not service["image"].endswith(":latest"), name
        assert name in SIDECARS or "healthcheck" in service, "sidecars have that of their image"
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert service["restart"] == "unless-stopped"
        assert set(service.get("depends_on", [])) <= SERVICES.keys()


def test_redis_is_declared_and_unused() -> None:
    assert SERVICES["redis"]["profiles"] == ["redis"]
    assert all("depends_on" not in SERVICES[name] for name in SIDECARS)
