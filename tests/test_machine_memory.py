"""How much memory may be taken: the machine's, and that of every control group
above.
"""

from pathlib import Path

import pytest

from infinistore.host import available_memory, free_huge_pages

GIB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc of a machine with 8 GiB available, in no control group."""
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(
        f"MemTotal: {16 << 20} kB\nMemAvailable:   {8 << 20} kB\nHugePages_Free:  3\nHugepagesize:  2048 kB\n"
    )
    return folder


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_without_groups_the_machine_decides(proc: Path, tmp_path: Path) -> None:
    limit = available_memory(proc, tmp_path / "nothing")
    assert limit.available_bytes == 8 * GIB
    assert "MemAvailable" in limit.source


def test_where_nothing_can_be_read_nothing_limits(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "a", tmp_path / "b").available_bytes > 1 << 60
    assert free_huge_pages(tmp_path) == (0, 2 << 20)


def test_free_huge_pages_are_counted(proc: Path) -> None:
    assert free_huge_pages(proc) == (3, 2 << 20)


@pytest.mark.parametrize("limited", ["a/b", "a", ""])
def test_version_2_the_tightest_group_up_to_the_root_decides(proc: Path, tmp_path: Path, limited: str) -> None:
    write(proc / "self", cgroup="0::/a/b")
    groups = tmp_path / "cgroup"
    for group in ("a/b", "a"):
        write(groups / group, memory__max="max", memory__current=5 * GIB)
    write(groups / limited, memory__max=3 * GIB, memory__current=2 * GIB, memory__stat=f"anon 1\ninactive_file {GIB}")
    limit = available_memory(proc, groups)
    assert limit.available_bytes == 2 * GIB
    assert limit.source == str(groups / limited / "memory.max")


def test_version_1_counts_too(proc: Path, tmp_path: Path) -> None:
    write(proc / "self", cgroup="12:cpu:/x\n4:memory:/docker/1\n0::/")
    groups = tmp_path / "cgroup"
    write(groups / "memory" / "docker", memory__limit_in_bytes=(1 << 63) - 4096, memory__usage_in_bytes=GIB)
    write(groups / "memory" / "docker" / "1", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB)
    assert available_memory(proc, groups).available_bytes == GIB


def test_a_group_that_is_not_mounted_here_falls_back_to_the_root_of_the_mount(proc: Path, tmp_path: Path) -> None:
    write(proc / "self", cgroup="0::/kubepods/pod1/container2")
    write(tmp_path / "cgroup", memory__max=GIB, memory__current=GIB // 2)
    assert available_memory(proc, tmp_path / "cgroup").available_bytes == GIB // 2


def test_a_group_above_its_bound_leaves_nothing(proc: Path, tmp_path: Path) -> None:
    write(proc / "self", cgroup="0::/")
    write(tmp_path / "cgroup", memory__max=GIB, memory__current=2 * GIB)
    assert available_memory(proc, tmp_path / "cgroup").available_bytes == 0
