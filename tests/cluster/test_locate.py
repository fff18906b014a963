"""URLs of clusters, and the membership that is a list."""

from pathlib import Path

import pytest

from infinistore.cluster.locate import EtcdPlace, FilePlace, StaticPlace, is_cluster_url, parse_cluster_url
from infinistore.cluster.membership import Membership, Node, StaticMembership
from infinistore.errors import ConfigError


def test_a_static_list_names_its_nodes_by_host_and_port() -> None:
    url = parse_cluster_url("infinistore+static://b:1,a,[::1]:7?copies=2&deadline_s=5")

    assert isinstance(url.place, StaticPlace)
    assert [(node.id, node.address) for node in url.place.nodes] == [
        ("[::1]:7", "infinistore://[::1]:7"),
        ("a:22345", "infinistore://a:22345"),
        ("b:1", "infinistore://b:1"),
    ]
    assert (url.place.copies, url.options) == (2, {"deadline_s": "5"})


def test_a_file_is_named_by_its_path() -> None:
    url = parse_cluster_url("infinistore+file:///etc/infini%20store/nodes.json?token_file=/t")

    assert (url.place, url.options) == (FilePlace(Path("/etc/infini store/nodes.json")), {"token_file": "/t"})
    assert str(url) == "infinistore+file:///etc/infini%20store/nodes.json"


def test_etcd_is_named_by_its_members_and_the_cluster() -> None:
    assert parse_cluster_url("infinistore+etcd://h1,h2:99/prod").place == EtcdPlace(
        endpoints=(("h1", 2379), ("h2", 99)), cluster="prod"
    )
    url = parse_cluster_url(
        "infinistore+etcd://h1/prod?etcd_tls=on&etcd_ca_file=/ca&etcd_cert_file=/c&etcd_key_file=/k"
        "&etcd_user=u&etcd_password_file=/p&transport=inline"
    )
    assert url.place == EtcdPlace(
        endpoints=(("h1", 2379),),
        cluster="prod",
        user="u",
        password_file=Path("/p"),
        tls=True,
        ca_file=Path("/ca"),
        cert_file=Path("/c"),
        key_file=Path("/k"),
    )
    assert url.options == {"transport": "inline"}


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("infinistore://a:1", "names no cluster"),
        ("infinistore+statc://a:1", "did you mean infinistore[+]static"),
        ("etcd", "write infinistore[+]static://"),
        ("infinistore+static://", "lacks a host"),
        ("infinistore+static://a,,b", "lacks a host"),
        ("infinistore+static://a:x", "'a:x' in .* must be HOST:PORT"),
        ("infinistore+static://a:0", "must be HOST:PORT"),
        ("infinistore+static://user:secret@a", "no password before its host: give a token"),
        ("infinistore+static://a/b", "must be HOST:PORT"),
        ("infinistore+static://a,a:22345", "names a:22345 twice"),
        ("infinistore+static://a?copies=9", "copies=9 .* must be a whole number between 1 and 8"),
        ("infinistore+static://a?etcd_user=u", "'etcd_user' .* it is for infinistore[+]etcd"),
        ("infinistore+static://a?x", "options .* cannot be read"),
        ("infinistore+file://etc/nodes", "three slashes"),
        ("infinistore+file:///", "three slashes"),
        ("infinistore+etcd://h1:2379", "names no cluster"),
        ("infinistore+etcd://h1:2379/", "names no cluster"),
        ("infinistore+etcd://h1:2379/a/b", "'a/b' cannot name a cluster"),
        ("infinistore+etcd:///prod", "lacks a host"),
        ("infinistore+etcd://h/prod?etcd_usr=u", "did you mean etcd_user"),
        ("infinistore+etcd://h/prod?etcd_user=u", "both etcd_user and etcd_password_file"),
        ("infinistore+etcd://h/prod?etcd_tls=on&etcd_key_file=/k", "both etcd_cert_file and etcd_key_file"),
        ("infinistore+etcd://h/prod?etcd_ca_file=/k", "without etcd_tls=on"),
    ],
)
def test_a_url_that_names_no_cluster_is_refused_in_one_line(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        parse_cluster_url(url)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_the_scheme_tells_a_cluster_from_a_store() -> None:
    assert is_cluster_url("infinistore+etcd://")
    assert not is_cluster_url("infinistore://a")


def test_a_list_is_a_membership_that_never_changes() -> None:
    membership: Membership = StaticMembership([Node("b", "infinistore://b"), Node("a", "infinistore://a")], copies=2)

    assert ([node.id for node in membership.view.nodes], membership.view.copies) == (["a", "b"], 2)
    assert membership.age_s == 0
    membership.add_listener(lambda view: pytest.fail("nothing changed"))()
    membership.close()
