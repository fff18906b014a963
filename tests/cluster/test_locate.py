"""URLs of clusters, and the membership that is a list."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.cluster.locate import EtcdPlace, FilePlace, StaticPlace, is_cluster_url, parse_cluster_url
from infinistore.cluster.membership import Membership, Node, StaticMembership
from infinistore.errors import ConfigError


@given(
    st.sampled_from(["infinistore", "infinistores"]),
    st.dictionaries(st.sampled_from(["a", "b.example", "[::1]"]), st.none() | st.integers(1, 65535), min_size=1),
    st.sampled_from(["", "/"]),
    st.none() | st.integers(1, 8),
    st.dictionaries(st.sampled_from(["deadline_s", "token_file"]), st.sampled_from(["5", "/t", "a://b?c"])),
)
def test_a_static_list_names_its_nodes_by_host_and_port(
    scheme: str, ports: dict[str, int | None], end: str, copies: int | None, options: dict[str, str]
) -> None:
    hosts = ",".join(host if port is None else f"{host}:{port}" for host, port in ports.items())
    given = options if copies is None else {**options, "copies": str(copies)}
    text = f"{scheme}+static://{hosts}{end}?" + "&".join(f"{name}={value}" for name, value in given.items())
    url = parse_cluster_url(text)

    assert is_cluster_url(text)
    assert str(url) == f"{scheme}+static://{hosts}{end}"
    assert isinstance(url.place, StaticPlace)
    names = sorted(f"{host}:{port or 22345}" for host, port in ports.items())
    assert [(node.id, node.address) for node in url.place.nodes] == [(name, f"infinistore://{name}") for name in names]
    assert (url.place.copies, url.options) == (copies or 1, options)


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
        ("etcd", "write infinistore[+]static://HOST:PORT,HOST:PORT, or infinistore[+]file:///PATH, or "),
        ("infinistore+static://", "lacks a host"),
        ("infinistore+static://a,,b", "lacks a host"),
        ("infinistore+static://a:x", "'a:x' in .* must be HOST:PORT"),
        ("infinistore+static://a:0", "must be HOST:PORT"),
        ("infinistore+static://user:secret@a", "no password before its host: give a token"),
        ("infinistore+etc://user:secret@a/c", "did you mean infinistore[+]etcd"),
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
        ("infinistore+etcd://h/prod?etcd_qqqqqqqqqqqqqqqq=u", "known are etcd_user, etcd_password_file, "),
        ("infinistore+etcd://h/prod?etcd_tls=x", "etcd_tls=x in infinistore[+]etcd://h"),
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
    assert "None" not in str(refused.value)


def test_the_scheme_tells_a_cluster_from_a_store() -> None:
    assert is_cluster_url("infinistore+etcd://")
    assert not is_cluster_url("infinistore://a")


def test_a_list_is_a_membership_that_never_changes() -> None:
    membership: Membership = StaticMembership([Node("b", "infinistore://b"), Node("a", "infinistore://a")], copies=2)

    assert ([node.id for node in membership.view.nodes], membership.view.copies) == (["a", "b"], 2)
    assert membership.age_s == 0
    membership.add_listener(lambda view: pytest.fail("nothing changed"))()
    membership.close()
