"""`infinistore cluster`, against servers in this process, and a real etcd where there
is one.
"""

import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infinistore import blocking
from infinistore.cli.root import run
from tests.cluster_client.clusters import Cluster, running_cluster
from tests.cluster_io.etcd import Etcd, needs_etcd
from tests.transports.certificates import issue

Answer = Callable[..., tuple[int, str, str]]
COUNT = 40
"""So many keys that each node owns some, wherever it listens."""


@pytest.fixture(scope="module")
def servers() -> Iterator[Cluster]:
    with running_cluster(2) as cluster:
        yield cluster


@pytest.fixture
def cluster(servers: Cluster) -> Cluster:
    servers.clear()
    return servers


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Run `infinistore cluster` here; return the exit code, the output and the
    errors.
    """
    monkeypatch.delenv("INFINISTORE_URL", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(["cluster", *arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nobody listens, and nobody else can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def fill(cluster: Cluster) -> None:
    with blocking.open_store(cluster.url()) as store:
        store.put_many([(f"key {number}", b"x") for number in range(COUNT)])


@pytest.mark.parametrize("more", [[], ["--json"], ["--limit", "2"]], ids=str)
def test_a_listing_says_whose_keys_it_lacks(
    cluster: Cluster, nobody: str, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    fill(cluster)
    assert run(["ls", "--url", cluster.url(), *more]) == 0
    assert "is not listed" not in capsys.readouterr().err
    assert run(["ls", "--url", f"{cluster.url()},{nobody}", *more]) == 0
    printed, said = capsys.readouterr()
    assert "key 0" in printed
    assert f"infinistore: what {nobody} may have is not listed: no answer" in said


@pytest.mark.parametrize(("command", "done"), [("rm", "deleted"), ("pin", "pinned")])
def test_what_is_done_by_prefix_is_not_done_as_long_as_a_node_does_not_answer(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], command: str, done: str
) -> None:
    fill(cluster)
    ask = [command, "--prefix", "key ", "--deadline", "5", "--url", cluster.url()]
    silent = cluster.members[0]
    silent.silence()
    try:
        assert run(ask) == 3
    finally:
        silent.wake()
    printed, said = capsys.readouterr()
    assert 0 < int(printed.splitlines()[-1].removeprefix(f"{done} ").removesuffix(" keys")) < COUNT
    assert f"some keys may not be {done}: not everything was " in said
    assert f"the node {silent.address} at " in said
    assert "; start these nodes, or take them out of the cluster, and repeat" in said
    assert run(ask) == 0


def test_status_shows_each_node_as_it_answers(cluster: Cluster, ask: Answer) -> None:
    fill(cluster)
    code, shown, errors = ask("status", cluster.url())
    assert (code, errors) == (0, "")
    assert f"{cluster.url()}: 2 nodes, 1 copy of each block\nthe view cannot change\n" in shown
    for member in cluster.members:
        (line,) = (line for line in shown.splitlines() if line.startswith(f" {member.address} "))
        words = line.split()
        assert words[1:4] == [f"infinistore://{member.address}", "serving", "100"]
        assert str(len(member.keys())) in words
        assert words[-1] == "yes"


def test_status_as_json_has_what_the_table_has(cluster: Cluster, ask: Answer) -> None:
    fill(cluster)
    code, shown, _ = ask("status", "--json", cluster.url("copies=2"))
    document = json.loads(shown)
    assert code == 0
    assert (document["copies"], document["view_age_s"], len(document["nodes"])) == (2, 0.0, 2)
    assert sum(node["blocks"] for node in document["nodes"]) == COUNT
    for node, member in zip(document["nodes"], sorted(cluster.members, key=lambda one: one.address), strict=True):
        assert member.server is not None
        assert node["instance"] == member.server.server.telemetry.instance
        assert (node["capacity_bytes"], node["answers"], node["problem"]) == (member.core.pool.capacity_bytes, True, "")


def test_a_node_that_does_not_answer_is_a_row_and_exit_code_1(cluster: Cluster, ask: Answer, nobody: str) -> None:
    code, shown, errors = ask("status", f"{cluster.url()},{nobody}")
    assert code == 1
    (row,) = (line for line in shown.splitlines() if line.startswith(f" {nobody} "))
    assert row.split()[-1] == "no"
    assert errors.startswith(f"infinistore: {nobody} does not answer: cannot connect to {nobody}: ")
    assert errors.count("\n") == 1


def test_a_node_that_is_silent_is_not_waited_for_longer_than_the_deadline(cluster: Cluster, ask: Answer) -> None:
    silent = cluster.members[0]
    silent.silence()
    try:
        code, shown, _ = ask("status", cluster.url(), "--deadline", "5", "--json")
    finally:
        silent.wake()
    assert code == 1
    answers = {node["id"]: node["answers"] for node in json.loads(shown)["nodes"]}
    assert answers == {member.address: member is not silent for member in cluster.members}


def test_purge_empties_all_nodes(cluster: Cluster, ask: Answer) -> None:
    fill(cluster)
    names = sorted(member.address for member in cluster.members)
    assert ask("purge", "--yes", cluster.url()) == (0, f"purged 2 nodes: {', '.join(names)}\n", "")
    assert [member.keys() for member in cluster.members] == [set(), set()]


def test_purge_without_a_terminal_wants_to_be_told_that_it_is_meant(cluster: Cluster, ask: Answer) -> None:
    fill(cluster)
    code, shown, errors = ask("purge", cluster.url())
    assert (code, shown) == (2, "")
    assert "add --yes to say that you mean it" in errors
    assert sum(len(member.keys()) for member in cluster.members) == COUNT


def test_purge_names_the_nodes_that_it_did_not_reach(cluster: Cluster, ask: Answer, nobody: str) -> None:
    fill(cluster)
    code, shown, errors = ask("purge", "--yes", "--json", f"{cluster.url()},{nobody}")
    assert code == 3
    assert list(json.loads(shown)["not_purged"]) == [nobody]
    assert errors.startswith(f"infinistore: {nobody} is not purged: cannot connect to {nobody}: ")
    assert [member.keys() for member in cluster.members] == [set(), set()]


def test_a_file_names_the_nodes(cluster: Cluster, ask: Answer, tmp_path: Path) -> None:
    nodes = [{"id": "a", "address": cluster.members[0].address, "state": "draining", "weight": 7}]
    (tmp_path / "nodes.json").write_text(json.dumps({"nodes": nodes}))
    url = f"infinistore+file://{tmp_path}/nodes.json"
    code, shown, _ = ask("status", url)
    assert code == 0
    assert re.search(r"the view was confirmed \d+\.\d s ago", shown)
    (row,) = (line for line in shown.splitlines() if line.startswith(" a "))
    assert row.split()[2:4] == ["draining", "7"]
    fill(Cluster(cluster.members[:1]))
    assert ask("purge", "--yes", url)[:2] == (0, "purged 1 node: a\n")
    assert cluster.members[0].keys() == set()


def test_a_cluster_without_nodes_is_told(ask: Answer, tmp_path: Path) -> None:
    (tmp_path / "nodes.json").write_text('{"nodes": []}')
    code, _, errors = ask("status", f"infinistore+file://{tmp_path}/nodes.json")
    assert code == 1
    assert errors.startswith("infinistore: no node is in infinistore+file://")


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("status", "infinistore://h:1"), 2, "is a single store, no cluster; use `infinistore stat --url infinistore"),
        (("purge", "--yes", "tcp://h:1"), 2, "is a single store, no cluster; use `infinistore purge --url tcp://h:1`"),
        (("status", "infinistore+etc://h/c"), 2, "names no cluster; did you mean infinistore+etcd?"),
        (("status", "infinistore+static://h?nonsense=1"), 2, "unknown option 'nonsense'"),
        (("status", "infinistore+file:///no/such/file", "--deadline", "0.1"), 3, "No such file or directory"),
        (("status",), 2, "missing argument 'URL'"),
        (("state", "x"), 2, "no such command 'state'"),
    ],
)
def test_bad_input_is_one_line(ask: Answer, arguments: tuple[str, ...], code: int, error: str) -> None:
    ended, shown, errors = ask(*arguments)
    assert (ended, shown, errors.count("\n")) == (code, "", 1)
    assert error in errors


def test_an_etcd_that_does_not_answer_is_one_line(ask: Answer, nobody: str) -> None:
    code, _, errors = ask("status", f"infinistore+etcd://{nobody}/test", "--deadline", "0.2")
    assert (code, errors.count("\n")) == (3, 1)
    assert f"{nobody} cannot be reached" in errors
    code, _, errors = ask("purge", "--yes", f"infinistore+etcd://{nobody}/test")
    assert (code, errors.count("\n")) == (3, 1)
    assert f"the cluster may not be purged; etcd: {nobody} cannot be reached" in errors


@needs_etcd
@pytest.mark.process
def test_a_cluster_in_etcd_is_shown_and_purged(ask: Answer, tmp_path: Path) -> None:
    etcd = Etcd(tmp_path)
    try:
        code, _, errors = ask("purge", "--yes", etcd.url)
        assert (code, errors) == (2, "infinistore: etcd knows no cluster 'test': no server has registered there yet\n")
        with running_cluster(2, cluster=etcd.url, node_warm_up_s=0) as cluster:
            nodes = _until_there_are(2, ask, etcd.url)
            assert {node["id"] for node in nodes} == {member.address for member in cluster.members}
            assert {node["state"] for node in nodes} == {"serving"}
            assert all(node["answers"] and node["generation"] for node in nodes)
            fill(cluster)
            code, shown, _ = ask("purge", "--yes", "--json", etcd.url)
            assert code == 0
            assert json.loads(shown)["not_purged"] == {}
            assert sorted(json.loads(shown)["purged"]) == sorted(member.address for member in cluster.members)
            assert [member.keys() for member in cluster.members] == [set(), set()]
    finally:
        etcd.close()


def _until_there_are(count: int, ask: Answer, url: str) -> list[dict[str, Any]]:
    while True:
        nodes: list[dict[str, Any]] = json.loads(ask("status", "--json", url)[1])["nodes"]
        if len(nodes) == count:
            return nodes


@needs_etcd
@pytest.mark.process
def test_a_cluster_with_tls_and_tokens_under_a_private_authority(ask: Answer, tmp_path: Path) -> None:
    etcd = Etcd(tmp_path, tls=True)
    files = issue(tmp_path, "127.0.0.1")
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    registry = f"{etcd.url}?etcd_tls=on&etcd_ca_file={etcd.certificate()}"
    url = f"{registry}&ca={files.ca}"
    with_token = ("--token-file", str(token))
    tls = {"tls_cert": files.cert, "tls_key": files.key, "tls_peer_ca": files.ca, "token_file": token}
    try:
        with running_cluster(2, cluster=registry, node_warm_up_s=0, **tls) as cluster:
            while len(json.loads(ask("status", "--json", url, *with_token)[1] or "{}").get("nodes", ())) < 2:
                pass
            code, shown, errors = ask("status", url, *with_token)
            assert (code, errors) == (0, "")
            assert shown.count("infinistores://127.0.0.1:") == 2
            code, _, errors = ask("status", registry, *with_token)
            assert (code, errors.count("\n")) == (1, 1)
            assert "does not answer" in errors  # the system does not know the authority
            with blocking.open_store(url, token="secret") as store:
                store.put_many([(f"key {number}", b"x") for number in range(COUNT)])
            first, second = cluster.members
            lost, kept = first.keys(), second.keys()
            assert lost
            code, _, errors = ask("drain", first.address, url, *with_token, "--timeout", "60")
            assert code == 0
            assert all(f"{first.address} drains: " in line for line in errors.splitlines())
            assert second.keys() == lost | kept  # passed on over TLS
            code, shown, errors = ask("add", first.address, url, *with_token, "--timeout", "60")
            assert (code, errors) == (0, "")
            code, shown, errors = ask("purge", "--yes", url, *with_token)
            assert (code, errors) == (0, "")
            assert [member.keys() for member in cluster.members] == [set(), set()]
    finally:
        etcd.close()
