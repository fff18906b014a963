"""Clusters that cannot be used: one clear line, by the library and the command line."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infinistore import blocking
from infinistore.cli.failures import run
from infinistore.errors import InfiniStoreException
from tests import warm
from tests.cluster_client.clusters import Cluster, running_cluster
from tests.cluster_io.etcd import Etcd, needs_etcd

Tell = Callable[[str, str], None]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server."""
    with running_cluster(1) as cluster:
        yield cluster.members[0].address


@pytest.fixture
def told(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tell:
    """See that a URL is refused with this problem."""
    monkeypatch.delenv("INFINISTORE_URL", raising=False)

    def check(url: str, problem: str) -> None:
        with pytest.raises(InfiniStoreException) as caught, blocking.open_store(url, deadline_s=2) as store:
            store.put("key", b"x")
        assert problem in str(caught.value)
        assert "\n" not in str(caught.value)
        capfd.readouterr()  # a library logs, too
        assert run(["put", "key", __file__, "--url", url, "--deadline", "2"]) in (2, 3, 4)
        shown, errors = capfd.readouterr()
        assert (shown, errors.count("\n")) == ("", 1), errors
        assert problem in errors

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


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"nodes": [], "placement": 2}, "is of placement version 2, and this is 1: use one release of InfiniStore"),
        ({"nodes": [node("a", "SERVER"), node("a", "h")]}, "has the id 'a' of another node; give each its own"),
        ({"nodes": [node("a", "SERVER"), node("b", "SERVER")]}, "of another node; list each server once"),
        ({"nodes": [node("a", "SERVER", instance="b" * 32)]}, "another server than the one that was named answers at"),
        ({"nodes": []}, "the cluster has no nodes; start one"),
        ({"nodes": [node("a", "SERVER", state="draining")]}, "no node of the cluster takes blocks"),
    ],
    ids=["another placement", "one id twice", "one server twice", "a lie", "no node", "none that serves"],
)
def test_a_file_of_nodes(told: Tell, server: str, tmp_path: Path, document: Any, problem: str) -> None:
    file = tmp_path / "nodes.json"
    file.write_text(json.dumps(document).replace("SERVER", server))
    told(f"infinistore+file://{file}", problem)


@needs_etcd
@pytest.mark.process
def test_another_placement_version_in_etcd(told: Tell, etcd: Etcd) -> None:
    etcd.control("put", "/infinistore/newer/config", '{"placement": 2}')
    told(etcd.url.replace("/test", "/newer"), "is of placement version 2, and this is 1: use one release")


def test_a_token_that_one_node_refuses(told: Tell, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a token of its own\n")
    with running_cluster(1) as plain, running_cluster(1, token_file=str(token)) as strict:
        both = Cluster([*plain.members, *strict.members])
        told(both.url(), f"(the node {strict.members[0].address} at")


@needs_etcd
@pytest.mark.process
def test_an_etcd_that_wants_a_password(told: Tell, tmp_path: Path) -> None:
    etcd = Etcd(tmp_path)
    try:
        etcd.control("user", "add", "root:secret")
        etcd.control("user", "grant-role", "root", "root")
        etcd.control("auth", "enable")
        told(etcd.url, "etcd wants a user and a password: set etcd_user and etcd_password_file")
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
