"""Who may import whom, held over the whole tree, and what a bare import loads."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("mmcache", "encoder", "ipc")

LEAVES = {"_version", "histograms", "paths", "redaction", "sizes"}
"""Modules of mmcache that import nothing of ours and that any of its parts may import."""

# A part of mmcache is a subpackage, or a group of modules. Every part may import itself, errors and the leaves.
GROUPS = {
    "protocol": {"foreign", "framing", "protocol", "protocol_upkeep", "records", "transport"},
    "config": {"config", "config_rules", "config_sources"},
    "media": {"media", "patches", "array_checks"},
    "client": {
        "__init__",
        "aio",
        "aio_asking",
        "aio_link",
        "aio_pump",
        "asking",
        "asks",
        "client",
        "core",
        "device_memory",
        "device_staging",
        "duplex",
        "encode_call",
        "evicting",
        "handle",
        "handshake",
        "lease",
        "link",
        "parts",
        "pending",
        "planning",
        "pump",
        "refs",
        "retries",
        "shares",
        "staging",
        "stream_shares",
        "supplying",
        "turns",
    },
    "local": {"local", "local_aio"},
    "cli": {"__main__"},
}
TORCH_FREE_ENCODER = {
    "encoder.config", "encoder.device_options", "encoder.errors", "encoder.sizing", "encoder.sharding",
}  # fmt: skip
TORCH_FREE = [
    *PACKAGES,
    *sorted(TORCH_FREE_ENCODER),
    "ipc.pool",
    "mmcache.cli.app",
    "mmcache.client",
    "mmcache.config",
    "mmcache.server.coordinator",
    "mmcache.server.decoder_process",
    "mmcache.server.sidecar",
    "mmcache.tiers.lmdb",
]
ALLOWED = {
    "errors": {"encoder.errors", "ipc.errors"},
    "keys": set(),
    "config": {"encoder.device_options"},
    "media": set(),
    "images": {"media"},
    "protocol": {"keys", "ipc"},
    "client": {"protocol", "keys", "config", "media", "images", "ipc"} | TORCH_FREE_ENCODER,
    "tiers": {"keys"},
    "server": {"protocol", "keys", "config", "media", "images", "tiers", "encoder", "ipc"},
    "integrations": {"client"},
    "local": {"client", "config", "server"},
    "cli": {"client", "server", "config"},
}

EXCEPTIONS = {("mmcache.config_rules", name) for name in ("encoder.source", "encoder.errors", "ipc.devices")} | {
    ("mmcache", "mmcache.local"),
    ("mmcache.aio", "mmcache.local_aio"),
}
"""(importer, imported): a wrong `model` or `device` is a wrong setting; the checks are free of torch. `mmcache.local`
loads a server when it is called."""

# One home for each heavy dependency; a name maps to the only files that may import it.
HOMES = {
    "xxhash": {"mmcache/keys.py"},
    "redis": {"mmcache/tiers/redis.py"},
    "lmdb": {"mmcache/tiers/lmdb.py"},
    "flash_attn": {"encoder/attention.py"},
    "flash_attn_interface": {"encoder/attention.py"},
    "cuda": {"ipc/cuda_driver.py"},
    "uvloop": {"mmcache/server/sidecar.py"},
    "h11": {"mmcache/server/http.py"},
    "prometheus_client": {"mmcache/server/metrics.py"},
}
FORBIDDEN = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "transformers", "skimage"}
HEAVY = {
    "torch",
    "PIL",
    "redis",
    "lmdb",
    "uvloop",
    "h11",
    "prometheus_client",
    "click",
    "rich",
    "safetensors",
    "cuda",
    "flash_attn",
    "transformers",
    "triton",
}


@dataclass
class Imports:
    """Names that a module imports: `at_import` when it is loaded, `later` in functions, `typing` only for types."""

    at_import: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)
    typing: set[str] = field(default_factory=set)

    @property
    def run(self) -> set[str]:
        return self.at_import | self.later

    @property
    def every(self) -> set[str]:
        return self.run | self.typing


class _Visitor(ast.NodeVisitor):
    def __init__(self, module: str, is_package: bool) -> None:
        self.found = Imports()
        self._target = self.found.at_import
        self._package = module if is_package else module.rpartition(".")[0]

    def visit_Import(self, node: ast.Import) -> None:
        self._target.update(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parents = self._package.split(".")
            base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
        for alias in node.names:
            name = f"{base}.{alias.name}"
            self._target.add(name if name in _files() else base)

    def _visit_later(self, node: ast.AST) -> None:
        before, self._target = self._target, self.found.later if self._target is self.found.at_import else self._target
        self.generic_visit(node)
        self._target = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_later(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_later(node)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) not in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            self.generic_visit(node)
            return
        before, self._target = self._target, self.found.typing
        for statement in node.body:
            self.visit(statement)
        self._target = before
        for statement in node.orelse:
            self.visit(statement)


def _root(module: str) -> str:
    return module.partition(".")[0]


@cache
def _files() -> dict[str, Path]:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files)
    return dict(zip(names, files, strict=True))


@cache
def _imports(module: str) -> Imports:
    path = _files()[module]
    visitor = _Visitor(module, path.name == "__init__.py")
    visitor.visit(ast.parse(path.read_text(), str(path)))
    return visitor.found


def _ours(names: set[str]) -> set[str]:
    return {name for name in names if _root(name) in PACKAGES}


def _part(module: str) -> str:
    """The part of mmcache that a module belongs to; modules of encoder and ipc keep their names."""
    package, _, rest = module.partition(".")
    if package != "mmcache":
        return module
    head = _root(rest) or "__init__"
    return next((part for part, heads in GROUPS.items() if head in heads), head)


def _may_import(importer: str, imported: str) -> bool:
    mine, theirs = _part(importer), _part(imported)
    if (importer, imported) in EXCEPTIONS:
        return True
    if theirs in {mine, *LEAVES} or (theirs == "errors" and mine not in LEAVES):
        return True
    allowed = ALLOWED.get(mine, set())
    return theirs in allowed or _root(theirs) in allowed


def _loaded_with(module: str) -> set[str]:
    """Everything that importing a module imports, by the text of the tree alone."""
    loaded: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        parts = name.split(".")
        for whole in {".".join(parts[: length + 1]) for length in range(len(parts))} - loaded:
            loaded.add(whole)
            if whole in _files():
                waiting.extend(_imports(whole).at_import)
    return loaded


def test_the_tree_is_seen() -> None:
    assert {"mmcache", "mmcache.keys", "mmcache.server.coordinator", "encoder", "ipc.pool"} <= _files().keys()
    assert "xxhash" in _imports("mmcache.keys").at_import
    assert "mmcache.client" in _imports("mmcache.errors").typing
    assert "torch" in _imports("mmcache.lease").later


@pytest.mark.parametrize("module", sorted(name for name in _files() if _root(name) != "mmcache"))
def test_encoder_and_ipc_stand_alone(module: str) -> None:
    assert {name for name in _ours(_imports(module).every) if _root(name) != _root(module)} == set()


@pytest.mark.parametrize("module", sorted(name for name in _files() if _root(name) == "mmcache"))
def test_parts_of_mmcache_import_only_what_they_may(module: str) -> None:
    assert {name for name in _ours(_imports(module).run) if not _may_import(module, name)} == set()


def test_exceptions_are_still_needed() -> None:
    assert all(imported in _imports(importer).run for importer, imported in EXCEPTIONS)


def test_every_part_is_ruled() -> None:
    parts = {_part(name) for name in _files() if _root(name) == "mmcache"}
    assert parts <= ALLOWED.keys() | LEAVES


@pytest.mark.parametrize("module", sorted(_files()))
def test_heavy_dependencies_have_one_home(module: str) -> None:
    path = _files()[module].relative_to(ROOT).as_posix()
    roots = {_root(name) for name in _imports(module).every}
    assert {root for root in roots & HOMES.keys() if path not in HOMES[root]} == set()
    assert roots & FORBIDDEN == set()


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_is_loaded_by_ranks_alone(module: str) -> None:
    assert module in _files()
    assert {name for name in _loaded_with(module) if _root(name) == "torch"} == set()


def test_the_client_reaches_no_server() -> None:
    parts = {_part(name) for name in _ours(_loaded_with("mmcache.client"))}
    assert "protocol" in parts
    assert parts & {"server", "tiers", "cli", "integrations"} == set()


def _loaded_in_fact(statement: str) -> set[str]:
    code = f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("statement", ["import mmcache", "import mmcache.client, mmcache.config, mmcache.errors"])
def test_a_clients_import_loads_nothing_heavy(statement: str) -> None:
    loaded = _loaded_in_fact(statement)
    assert "mmcache.client" in loaded
    assert loaded & HEAVY == set()
    light = {"encoder", "encoder.errors", "encoder.config"} | TORCH_FREE_ENCODER
    assert {name for name in loaded if _root(name) == "encoder"} <= light


def test_the_coordinator_loads_no_torch() -> None:
    loaded = _loaded_in_fact("import mmcache.server.sidecar")
    assert "mmcache.server.coordinator" in loaded
    assert loaded & {"torch", "PIL", "encoder.moonvit", "redis"} == set()
