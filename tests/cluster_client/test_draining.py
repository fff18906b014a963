"""Nodes that drain on request: real servers, a real etcd, and clients that read all the
while.
"""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from infinistore import blocking
from infinistore.cli.failures import UNAVAILABLE
from infinistore.cli.root import run
from infinistore.cluster.documents import Drain, write_drain
from infinistore.cluster.etcd.layout import Layout
from infinistore.sizes import MIB
from tests import warm
from tests.asking import until
from tests.cluster_client.clusters import Cluster, Member, running_cluster
from tests.cluster_io.etcd import Etcd, needs_etcd, own_cluster
from tests.events import heard_events

pytestmark = [needs_etcd, pytest.mark.process]
# Groups of three blocks, in which the block tells its key.
BLOCKS = {f"{{group {group}}}{block}": f"{group} {block}".encode() * 30 for group in range(60) for block in range(3)}
PATIENT: dict[str, Any] = {"lookup_deadline_s": 30.0}


class Nodes:
    """A cluster whose nodes register, and the command that drains them."""

    def __init__(self, etcd: Etcd, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
        self.etcd, self.cluster, self._capsys = etcd, cluster, capsys
        self.url = etcd.url

    def command(self, *words: str) -> tuple[int, str, str]:
        code = run(["cluster", *words])
        return code, *self._capsys.readouterr()

    def drain(self, member: Member, *words: str) -> tuple[int, str, str]:
        return self.command("drain", member.address, self.url, *words)

    def begin_drain(self, member: Member) -> None:
        """Ask it to drain; again, if a busy machine has kept etcd from answering."""
        while (code := self.drain(member, "--timeout", "0")[0]) == UNAVAILABLE:
            pass
        assert code == 0

    def add(self, member: Member, *words: str) -> tuple[int, str, str]:
        return self.command("add", member.address, self.url, *words)

    def states(self) -> dict[str, str]:
        nodes = json.loads(self.command("status", "--json", self.url)[1])["nodes"]
        return {node["id"]: node["state"] for node in nodes}

    def until_all_serve(self) -> None:
        until(lambda: list(self.states().values()) == ["serving"] * len(self.cluster.members))


NodesOf: TypeAlias = Callable[..., AbstractContextManager[Nodes]]


@pytest.fixture
def etcd(etcd_of_all: Etcd) -> Etcd:
    return own_cluster(etcd_of_all)


@pytest.fixture
def nodes_of(etcd: Etcd, capsys: pytest.CaptureFixture[str]) -> NodesOf:
    """Starts so many nodes, with settings of the test's own."""

    @contextmanager
    def start(count: int = 3, **settings: Any) -> Iterator[Nodes]:
        with running_cluster(count, cluster=etcd.url, **{"node_warm_up_s": 0.05, **settings}) as cluster:
            nodes = Nodes(etcd, cluster, capsys)
            nodes.until_all_serve()
            yield nodes

    return start


@contextmanager
def slow_drain(nodes_of: NodesOf, count: int = 3) -> Iterator[tuple[Nodes, Member, Any]]:
    """Nodes of which one drains, for longer than a test takes, and a store of them."""
    with nodes_of(count, node_drain_bytes_per_s=1024) as nodes:
        leaving = nodes.cluster.members[0]
        with blocking.open_store(nodes.url, **PATIENT) as store:
            store.put_many(dict.fromkeys(BLOCKS, bytes(10_000)))
            nodes.begin_drain(leaving)
            until(lambda: nodes.states().get(leaving.address) == "draining")
            yield nodes, leaving, store


def read(store: Any) -> list[bytes | None]:
    return [value and bytes(value) for value in store.get_many(list(BLOCKS))]


@contextmanager
def reading(store: Any) -> Iterator[list[str]]:
    """Read everything again and again; what was not there, or wrong, is on the list."""
    wrong: list[str] = []
    over = threading.Event()

    def read_on() -> None:
        while not over.wait(0.005):  # real time: a pause between two reads, however long
            for (key, wanted), found in zip(BLOCKS.items(), read(store), strict=True):
                if found != wanted:
                    wrong.append(key)

    reader = threading.Thread(target=read_on)
    reader.start()
    try:
        yield wrong
    finally:
        over.set()
        reader.join()


def test_what_a_drained_node_had_is_found_while_it_drains_and_afterwards(nodes_of: NodesOf) -> None:
    with (
        nodes_of(node_warm_up_s=0.5) as nodes,
        blocking.open_store(nodes.url, **PATIENT) as store,
    ):
        leaving, *others = nodes.cluster.members
        store.put_many(BLOCKS)
        had = leaving.keys()
        assert had
        with reading(store) as wrong:
            code, shown, errors = nodes.drain(leaving, "--json")
            assert (code, errors) == (0, "")
            assert read(store) == list(BLOCKS.values())
        assert wrong == []
        told = json.loads(shown)
        assert told["done"]
        assert (told["moved_blocks"], told["moved_groups"]) == (len(had), len(had) // 3)
        assert told["failed_groups"] == 0
        assert nodes.states() == dict.fromkeys((one.address for one in others), "serving")
        assert "stays out until it is added: " in nodes.command("status", nodes.url)[1]
        assert had <= others[0].keys() | others[1].keys()

        # It comes back, as a newcomer, and nothing is missing meanwhile.
        with reading(store) as wrong:
            code, shown, errors = nodes.add(leaving)
            assert (code, errors) == (0, "")
            assert shown == f"{leaving.address} serves again, with weight 20\n"
            nodes.until_all_serve()
        assert wrong == []
        assert nodes.add(leaving)[1].startswith(f"{leaving.address} was not asked to drain: it serves")


def test_two_nodes_that_drain_at_once_pass_everything_to_the_third(nodes_of: NodesOf) -> None:
    with nodes_of() as nodes, blocking.open_store(nodes.url, **PATIENT) as store:
        *leaving, last = nodes.cluster.members
        store.put_many(BLOCKS)
        with reading(store) as wrong:
            for one in leaving:
                nodes.begin_drain(one)
            for one in leaving:
                code, _, errors = nodes.drain(one)
                first, *steps = errors.splitlines()
                assert (code, first) == (0, f"infinistore: {one.address} was asked to drain before; this waits for it")
                assert all(line.startswith(f"infinistore: {one.address} drains: ") for line in steps)
        assert wrong == []
        assert last.keys() == set(BLOCKS)
        code, _, errors = nodes.drain(last)
        assert (code, errors.count("\n")) == (2, 1)
        assert f"is the last node of the cluster {nodes.etcd.cluster!r} that takes blocks" in errors
        assert nodes.drain(last, "--force")[0] == 0


def test_a_node_that_is_killed_while_it_drains_drains_on_when_it_is_back(nodes_of: NodesOf) -> None:
    slow = {"node_drain_bytes_per_s": 1024}
    with nodes_of(**slow) as nodes, blocking.open_store(nodes.url, **PATIENT) as store:
        store.put_many(dict.fromkeys(BLOCKS, bytes(10_000)))
        leaving = nodes.cluster.members[0]

        def goes_on() -> bool:  # a busy machine may lose the node's lease for a moment
            code, _, errors = nodes.drain(leaving, "--timeout", "0.5")
            return (code, f"{leaving.address} has not drained within 0.5 s, and goes on: " in errors) == (4, True)

        until(goes_on)
        until(lambda: nodes.states().get(leaving.address) == "draining")
        leaving.stop()  # and its lease runs on
        leaving.start()  # with nothing
        code, shown, _ = nodes.drain(leaving, "--json")
        assert code == 0
        assert json.loads(shown)["done"]
        leaving.stop()
        leaving.start()
        assert leaving.address not in nodes.states()
        store.put("key", b"x")
        assert store.get("key") == b"x"
        assert nodes.add(leaving)[0] == 0


def test_without_a_terminal_there_is_a_line_for_each_step_and_status_says_how_far_it_is(nodes_of: NodesOf) -> None:
    with nodes_of(count=2, node_drain_bytes_per_s=40_000) as nodes:
        leaving, _ = nodes.cluster.members
        with blocking.open_store(nodes.url, **PATIENT) as store:
            had = 6
            for number in itertools.count():  # ports decide who gets which
                if len(leaving.keys()) == had:
                    break
                store.put(f"{{{number}}}", bytes(10_000))
        nodes.begin_drain(leaving)
        told = re.compile(rf"{leaving.address} drains: \d+ of {had} groups moved \(.*\); .* of .* done")
        until(lambda: bool(told.search(nodes.command("status", nodes.url)[1])))
        code, shown, errors = nodes.drain(leaving)
        assert (code, shown.count("\n")) == (0, 1)
        assert all(told.search(line) for line in errors.splitlines()[1:])
        assert 2 <= errors.count("\n") <= 12
        assert f"{leaving.address} has drained" in nodes.command("status", nodes.url)[1]


def test_a_drain_that_is_taken_back_stops(nodes_of: NodesOf) -> None:
    with slow_drain(nodes_of) as (nodes, leaving, store):
        assert nodes.add(leaving)[0] == 0
        nodes.until_all_serve()
        assert read(store) == [bytes(10_000)] * len(BLOCKS)
        store.close()
        leaving.wait_until_quiet()


def test_while_etcd_is_away_a_node_drains_on(nodes_of: NodesOf, etcd: Etcd) -> None:
    slow = {"node_drain_bytes_per_s": 50_000}
    with (
        nodes_of(count=2, **slow) as nodes,
        blocking.open_store(nodes.url, **PATIENT) as store,
        heard_events() as heard,
    ):
        leaving, other = nodes.cluster.members
        store.put_many(BLOCKS)
        with reading(store) as wrong:
            # The node hears of it, and then etcd is gone.
            nodes.begin_drain(leaving)
            until(lambda: any(event["event"] == "node-drain" for event in heard))
            etcd.kill()
            code, _, errors = nodes.drain(leaving, "--timeout", "0.2")
            assert (code, errors.count("\n")) == (3, 1)
            assert "etcd: " in errors
            etcd.start()
            assert nodes.drain(leaving)[0] == 0
        assert wrong == []
        assert other.keys() == set(BLOCKS)


def test_a_purge_while_a_node_drains_purges(nodes_of: NodesOf) -> None:
    with slow_drain(nodes_of, count=2) as (nodes, leaving, _):
        assert nodes.command("purge", "--yes", nodes.url)[0] == 0
        assert nodes.drain(leaving)[0] == 0
        assert [member.keys() for member in nodes.cluster.members] == [set(), set()]


def test_bad_input_is_one_line(etcd: Etcd, capsys: pytest.CaptureFixture[str]) -> None:
    layout = Layout(etcd.cluster)
    etcd.put(layout.node("a"), '{"address": "a:1"}')
    etcd.put(layout.drain("b"), write_drain(Drain(done=True, groups=3, moved_groups=3)).decode())
    nodes = Nodes(etcd, Cluster([]), capsys)
    for words, code, told in [
        (("drain", "c", etcd.url), 2, f"the cluster {etcd.cluster!r} has no node 'c'; it has a, b"),
        (("add", "c", etcd.url), 2, f"the cluster {etcd.cluster!r} has no node 'c'; it has a, b"),
        (("drain", "a", etcd.url), 2, f"a is the last node of the cluster {etcd.cluster!r} that takes blocks"),
        (("drain", "a", f"{etcd.url}x"), 2, f"etcd knows no cluster '{etcd.cluster}x'"),
        (("drain", etcd.url, "a"), 2, f"first the node, then the URL: `infinistore cluster drain a {etcd.url}`"),
        (("drain", "a", "infinistore+static://a"), 2, "the nodes of infinistore+static://a stand in the URL"),
        (("drain", "a"), 2, "missing argument 'URL'"),
        (("add", "b", etcd.url, "--timeout", "0.1"), 1, "b may serve, but does not: no server is registered"),
    ]:
        ended, shown, errors = nodes.command(*words)
        assert (ended, shown, errors.count("\n")) == (code, "", 1), errors
        assert told in errors
    etcd.kill()
    for word in ("drain", "add"):
        code, shown, errors = nodes.command(word, "a", etcd.url)
        assert (code, shown, errors.count("\n")) == (3, "", 1)
        assert "cannot be reached" in errors


def test_a_node_in_a_file_drains_as_the_file_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "nodes.json"
    file.write_text('{"nodes": []}')
    with ExitStack() as stack:
        members = []
        for name in ("a", "b"):
            members.append(Member(cluster=f"infinistore+file://{file}", node_id=name))
            stack.callback(members[-1].stop)
        listed = [{"id": name, "address": one.address} for name, one in zip("ab", members, strict=True)]
        file.write_text(json.dumps({"nodes": listed}))
        url = f"infinistore+file://{file}"
        with blocking.open_store(url, **PATIENT) as store:
            store.put_many(BLOCKS)
            assert run(["cluster", "drain", "a", url]) == 0
            assert capsys.readouterr().out == f"a is draining in {file}\n"
            until(lambda: members[1].keys() == set(BLOCKS))
            assert read(store) == list(BLOCKS.values())
            assert run(["cluster", "add", "a", "--json", url]) == 0
            assert json.loads(capsys.readouterr().out)["state"] == "serving"


def test_sigterm_ends_a_drain_at_once(nodes_of: NodesOf) -> None:
    with slow_drain(nodes_of) as (nodes, leaving, _):
        assert leaving.server is not None
        leaving.look(leaving.server.server.drain)  # what the signal does
        until(lambda: leaving.address not in nodes.states())
        code, _, errors = nodes.drain(leaving, "--timeout", "0.5")
        assert code == 3
        assert f"{leaving.address} is no longer registered and has not said that it is done" in errors


def test_a_terminal_shows_how_far_it_is_and_ctrl_c_ends_only_the_waiting(etcd: Etcd) -> None:
    layout = Layout(etcd.cluster)
    for name in "ab":
        etcd.put(layout.node(name), json.dumps({"address": f"{name}:1"}))
    terminal, end = os.openpty()
    shown = b""
    with warm.Popen(
        [sys.executable, "-m", "infinistore", "cluster", "drain", "a", etcd.url], stderr=end, stdout=subprocess.PIPE
    ) as process:
        try:
            os.close(end)
            while b"0 of 0 groups" not in shown:
                shown += os.read(terminal, 4096)
            half = Drain(groups=9, moved_groups=4, size_bytes=2 * MIB, done_bytes=MIB, elapsed_s=5)
            etcd.put(layout.drain("a"), write_drain(half).decode())
            while b"[##########          ]  50% a drains: 4 of 9 groups moved" not in shown:
                shown += os.read(terminal, 4096)
            process.send_signal(signal.SIGINT)
            while b"ends that" not in shown:
                shown += os.read(terminal, 4096)
            assert process.wait() == 130
            assert process.stdout is not None
            assert process.stdout.read() == b""
        finally:
            process.kill()
            os.close(terminal)
    told = f"infinistore: a goes on; `infinistore cluster add a {etcd.url}` ends that"
    assert shown.decode().rstrip().endswith(told)
    assert etcd.keys(layout.drains) == [layout.drain("a")]
