"""`infinistore serve --numa-node` on this machine: what a server, its shards and the
memory that it takes later are kept on. The kernel says so itself, in /proc.
"""

import json
import os
import re
from pathlib import Path

import pytest

from infinistore import blocking
from infinistore.host import MOST_NODES, nodes_here
from infinistore.sizes import MIB
from tests.test_numa import for_real

from .conftest import Run, StartProcess

pytestmark = [for_real, pytest.mark.process]
NODE = min(nodes_here(), default=0)
POOL = ("--prealloc-size", "1MiB", "--minimal-allocate-size", "64", "--manage-port", "off")
ARENA = re.compile(r"^\S+ (\S+) file=/memfd:infinistore-arena-(\d+)", re.MULTILINE)


def cores_of(process: int) -> set[int]:
    """The cores that threads of a process may use, all of them together."""
    return {core for thread in os.listdir(f"/proc/{process}/task") for core in os.sched_getaffinity(int(thread))}


def policies(process: int) -> dict[int, str]:
    """The memory policy of each arena of a process."""
    text = Path(f"/proc/{process}/numa_maps").read_text()
    return {int(index): policy.replace("=relative", "") for policy, index in ARENA.findall(text)}


def test_a_server_its_pool_and_what_it_grows_by_are_on_the_node(running_process: StartProcess) -> None:
    grows = ("--auto-increase", "--max-pool-size", "3MiB")
    with running_process(*POOL, *grows, "--numa-node", str(NODE)) as server:
        assert f"with a pool of 1 MiB on NUMA node {NODE} (bitmap)" in server.ready_line
        with blocking.open_store(server.url) as store:
            store.put("large", bytes(2 * MIB - 65536))
        process = server.process.pid
        assert policies(process) == dict.fromkeys(range(len(policies(process))), f"prefer:{NODE}")
        assert len(policies(process)) > 1
        assert cores_of(process) <= nodes_here()[NODE]


def test_shards_are_on_the_node(running_process: StartProcess) -> None:
    with running_process(*POOL, "--shards", "2", "--numa-node", str(NODE), "--json") as server:
        assert json.loads(server.ready_line)["numa_node"] == NODE
        supervisor = server.process.pid
        threads = Path(f"/proc/{supervisor}/task").iterdir()
        children = [child for thread in threads for child in (thread / "children").read_text().split()]
        assert len(children) == 2
        for shard in map(int, children):
            assert policies(shard) == {0: f"prefer:{NODE}"}
            assert cores_of(shard) <= nodes_here()[NODE]


def test_a_node_that_is_not_there_is_one_line_that_names_those_that_are(command: Run) -> None:
    done = command("serve", *POOL, "--service-port", "0", "--numa-node", str(MOST_NODES - 1))
    listed = ", ".join(map(str, nodes_here()))
    problem = f"NUMA node {MOST_NODES - 1}: this machine has no such node; choose one of {listed}"
    assert (done.returncode, done.stderr.decode()) == (2, f"infinistore: {problem}\n")


def test_a_server_without_the_setting_is_on_any_node(running_process: StartProcess) -> None:
    with running_process(*POOL) as server:
        assert policies(server.process.pid) == {0: "default"}


def test_a_server_that_takes_memory_over_says_that_it_stays_where_it_is(
    running_process: StartProcess, tmp_path: Path
) -> None:
    here = ("--unix-socket", str(tmp_path / "s"))
    with running_process(*POOL, *here) as old:
        more = ("--prealloc-size", "2MiB", "--numa-node", str(NODE), "--take-over")
        with running_process(*POOL, *here, *more) as new:
            assert set(policies(new.process.pid)) == {0, 1}
            _, errors = new.stop()
        assert old.process.wait() == 0
    assert b"what is taken over stays on its NUMA nodes" in errors
