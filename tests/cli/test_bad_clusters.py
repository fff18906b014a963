"""Clusters that cannot be used: one clear line, by the library and the command line."""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from infinistore import blocking
from infinistore.errors import InfiniStoreException
from tests import warm
from tests.cli.conftest import Run
from tests.cluster_client.clusters import Cluster, running_cluster
from tests.cluster_io.etcd import Etcd, needs_etcd

Tell = Callable[..., None]
MAY_MEND_S = 5
"""A view that cannot be used is waited for: it may become another one."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server."""
    with running_cluster(1) as cluster:
        yield cluster.members[0].address


def refuse(url: str, problem: str, deadline_s: int = 60) -> None:
    """See that the library refuses a URL with this problem."""
    with pytest.raises(InfiniStoreException) as caught, blocking.open_store(url, deadline_s=deadline_s) as store:
        store.put("key", b"x")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def refuse_by_command(command: Run) -> Tell:
    """See that the command line refuses a URL with this problem."""

    def check(url: str, problem: str, deadline_s: int = 60) -> None:
        ended = command("put", "key", __file__, "--url", url, "--deadline", str(deadline_s))
        assert ended.returncode in (2, 3, 4)
        assert (ended.stdout, ended.stderr.count(b"\n")) == (b"", 1), ended.stderr
        assert problem in ended.stderr.decode()

    return check


@pytest.fixture
def told(refuse_by_command: Tell) -> Tell:
    """See that a URL is refused with this problem, by both."""

    def check(url: str, problem: str) -> None:
        refuse(url, problem)
        refuse_by_command(url, problem)

    return check


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("infinistore+etcd://h:1", "names no cluster; write infinistore+etcd://HOST:PORT,HOST:PORT/CLUSTER"),
        ("infinistore+etc://h/c", "did you mean infinistore+etcd?"),
        ("infinistore+static://", "lacks a host; write infinistore+static://HOST:PORT"),
        ("infinistore+static://a,a:22345", "names a:22345 twice"),
        ("infinistore+file://nodes.json", "names no file"),
    ],
)
def test_a_url_that_names_no_cluster(told: Tell, url: str, problem: str) -> None:
    told(url, problem)


def node(name: str, address: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "address": address, **more}


def write(file: Path, document: Any, server: str) -> str:
    """Write a file of nodes; return the URL of its cluster."""
    file.write_text(json.dumps(document).replace("SERVER", server))
    return f"infinistore+file://{file}"


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"nodes": [node("a", "SERVER", instance="b" * 32)]}, "another server than the one that was named answers at"),
        ({"nodes": []}, "the cluster has no nodes; start one"),
        ({"nodes": [node("a", "SERVER", state="draining")]}, "no node of the cluster takes blocks"),
    ],
    ids=["a lie", "no node", "none that serves"],
)
def test_a_file_of_nodes(told: Tell, server: str, tmp_path: Path, document: Any, problem: str) -> None:
    told(write(tmp_path / "nodes.json", document, server), problem)


def test_a_file_that_can_never_be_used_is_waited_for_and_then_the_error(
    refuse_by_command: Tell, server: str, tmp_path: Path
) -> None:
    documents = [
        ({"nodes": [], "placement": 2}, "is of placement version 2, and this is 1: use one release of InfiniStore"),
        ({"nodes": [node("a", "SERVER"), node("a", "h")]}, "has the id 'a' of another node; give each its own"),
        ({"nodes": [node("a", "SERVER"), node("b", "SERVER")]}, "of another node; list each server once"),
    ]
    told = [
        (write(tmp_path / f"{number}.json", document, server), problem)
        for number, (document, problem) in enumerate(documents)
    ]
    with ThreadPoolExecutor() as threads:
        refused = [threads.submit(refuse, url, problem, MAY_MEND_S) for url, problem in told]
    for one in refused:
        one.result()
    refuse_by_command(*told[0], MAY_MEND_S)


@needs_etcd
@pytest.mark.process
def test_another_placement_version_in_etcd(etcd: Etcd) -> None:
    etcd.control("put", "/infinistore/newer/config", '{"placement": 2}')
    refuse(etcd.url.replace("/test", "/newer"), "is of placement version 2, and this is 1: use one release", MAY_MEND_S)


def test_a_token_that_one_node_refuses(told: Tell, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-its-own\n")
    with running_cluster(1) as plain, running_cluster(1, token_file=str(token)) as strict:
        both = Cluster([*plain.members, *strict.members])
        told(both.url(), f"(the node {strict.members[0].address} at")


@needs_etcd
@pytest.mark.process
def test_an_etcd_that_wants_a_password(tmp_path: Path) -> None:
    etcd = Etcd(tmp_path)
    try:
        etcd.control("user", "add", "root:secret")
        etcd.control("user", "grant-role", "root", "root")
        etcd.control("auth", "enable")
        refuse(etcd.url, "etcd wants a user and a password: set etcd_user and etcd_password_file", MAY_MEND_S)
        server = [sys.executable, "-W", "error", "-m", "infinistore", "--cluster", etcd.url, "--service-port", "0"]
        done = warm.run(
            [*server, "--manage-port", "off", "--prealloc-size", "64MiB"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        assert "etcd wants a user and a password" in done.stderr.splitlines()[-1]
    finally:
        etcd.close()
