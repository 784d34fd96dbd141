"""Limits of memory as the kernel tells of them."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from mmcache.server.host_memory import free_host_bytes

MIB = 1 << 20


def process(folder: Path, cgroup: str) -> Path:
    folder.mkdir()
    (folder / "cgroup").write_text(cgroup)
    (folder / "status").write_text("Name:\tpython\nVmSize:\t  1024 kB\nVmData:\t  512 kB\n")
    return folder


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)


def test_no_limit_is_none(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
    group(tmp_path / "groups" / "a", max="max\n", current="5\n")
    group(tmp_path / "groups" / "memory" / "a", limit_in_bytes="9223372036854771712\n", usage_in_bytes="5\n")
    mine = process(tmp_path / "self", "0::/a\n4:memory:/a\n3:cpu,cpuacct:/a\n")
    assert free_host_bytes(1, mine, tmp_path / "groups") is None


def test_the_tightest_group_counts_and_is_shared(tmp_path: Path) -> None:
    stat = f"anon 5\nactive_file {3 * MIB}\ninactive_file {MIB}\n"
    group(tmp_path / "groups" / "a", max=f"{64 * MIB}\n", current=f"{32 * MIB}\n", stat=stat)
    group(tmp_path / "groups" / "a" / "b", max=f"{512 * MIB}\n", current=f"{30 * MIB}\n", stat=stat)
    mine = process(tmp_path / "self", "0::/a/b\n")
    assert free_host_bytes(1, mine, tmp_path / "groups") == 36 * MIB
    assert free_host_bytes(4, mine, tmp_path / "groups") == 9 * MIB


def test_older_groups(tmp_path: Path) -> None:
    stat = f"total_active_file 0\ntotal_inactive_file {MIB}\n"
    limits = {"limit_in_bytes": f"{16 * MIB}\n", "usage_in_bytes": f"{20 * MIB}\n", "stat": stat}
    group(tmp_path / "groups" / "memory" / "x", **limits)
    mine = process(tmp_path / "self", "4:memory:/x\n0::/\n")
    assert free_host_bytes(1, mine, tmp_path / "groups") == 0, "more is taken than is allowed"


def test_a_container_does_not_see_the_groups_around_it(tmp_path: Path) -> None:
    group(tmp_path / "groups", max=f"{8 * MIB}\n", current="0\n", stat="active_file 0\ninactive_file 0\n")
    mine = process(tmp_path / "self", "0::/system.slice/some.scope\n")
    assert free_host_bytes(2, mine, tmp_path / "groups") == 4 * MIB


def test_a_kernel_without_groups(tmp_path: Path) -> None:
    mine = process(tmp_path / "self", "")
    (mine / "cgroup").unlink()
    assert free_host_bytes(1, mine, tmp_path / "groups") is None


def test_limits_of_the_process() -> None:
    code = (
        "import resource, sys\n"
        "from mmcache.server.host_memory import free_host_bytes\n"
        "resource.setrlimit(getattr(resource, sys.argv[1]), (1 << 32, 1 << 32))\n"
        "print(free_host_bytes(8))\n"
    )
    for name in ("RLIMIT_AS", "RLIMIT_DATA"):
        done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=True)
        assert 3 << 30 < int(done.stdout) < 1 << 32, "a limit of a process is its own"
