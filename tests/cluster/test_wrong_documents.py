"""Any field of any document of a cluster may be wrong. What is not refused can be used:
it is placed, written again, and connected to.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import pytest

from infinistore.cluster.documents import (
    ClusterConfig,
    Drain,
    WrongDocument,
    read_config,
    read_drain,
    read_file,
    read_node,
    read_purged,
    write_config,
    write_drain,
    write_node,
)
from infinistore.cluster.etcd import gateway as messages
from infinistore.cluster.etcd.gateway import Answer, EtcdMisbehaved, EtcdRefused
from infinistore.cluster.locate import parse_cluster_url
from infinistore.cluster.membership import Node, View
from infinistore.cluster.placement import Placement
from infinistore.config import ServerConfig
from infinistore.errors import ConfigError
from tests.tables import for_each

WRONG: Final = [
    *("null", "true", "0", "-1", "1.5", "1e999", "Infinity", "-Infinity", "NaN", "9" * 30, "9" * 5000),
    *('""', '"text"', r'"\ud800"', r'"\u0000"', '"a..b"', '"' + "x" * 300 + '"'),
    *("[]", "{}", "[[]]", "[" * 700 + "]" * 700, "[" * 5000, ""),
]
"""JSON of each type, and what is none."""
NODE: Final = json.loads(write_node(Node("a", "infinistore://a:1", "i", zone="z", host="h"))) | {"id": "a"}
CONFIG: Final = json.loads(write_config(ClusterConfig()))


def use_view(view: View) -> None:
    Placement(view).places(["key"])
    for node in view.nodes:
        node.address.partition("://")[2].partition(":")[0].encode("idna")
        assert read_node(write_node(node), id=node.id, generation=node.generation) == node


def use_node(text: str) -> None:
    use_view(View(0, (read_node(text.encode()),)))


def use_config(text: str) -> None:
    use_view(View(0, (Node("a", "infinistore://a:1"),), copies=read_config(text.encode()).copies))


def use_drain(text: str) -> None:
    drain = read_drain(text.encode())
    assert read_drain(write_drain(drain)) == drain
    assert 0 <= drain.ratio <= 1 and str(drain)


def use_answer(text: str) -> None:
    for read in (messages.read_range, messages.read_outcome, messages.read_ttl, messages.read_lease):
        with suppress(EtcdMisbehaved):
            read(text.encode())
    for read_refusal in (messages.read_watch, lambda body: messages.read_error(Answer(500, body))):
        with suppress(EtcdMisbehaved, EtcdRefused):
            str(read_refusal(text.encode()))


ITEM: Final = {"key": "YQ==", "value": "", "create_revision": "1", "mod_revision": "1", "lease": "1"}
ANSWER: Final[dict[str, Any]] = {"header": {"revision": "1"}, "kvs": [ITEM], "ID": "1", "succeeded": True}
ERROR: Final[dict[str, Any]] = {"error": {"grpc_code": 1, "message": "m"}, "message": "m", "code": 1}
EVENTS: Final[dict[str, Any]] = {"events": [{"type": "PUT", "kv": ITEM}], "cancel_reason": "r", "compact_revision": "1"}
DOCUMENTS: Final[dict[str, tuple[dict[str, Any], Callable[[str], None]]]] = {
    "node": (NODE, use_node),
    "config": (CONFIG, use_config),
    "drain": (json.loads(write_drain(Drain())), use_drain),
    "file": ({"nodes": [NODE], **CONFIG}, lambda text: use_view(read_file(text, 0))),
    "answer": (ANSWER | {"result": {"TTL": "1"} | EVENTS, "responses": [{"response_range": ANSWER}]}, use_answer),
    "error": (ERROR, use_answer),
}


def with_each_field(document: Any, wrong: str) -> list[str]:
    """Return the texts of a document of which one value is replaced by this text."""
    if isinstance(document, dict):
        inner = [
            (json.dumps({**document, name: "@"}), text)
            for name, value in document.items()
            for text in with_each_field(value, wrong)
        ]
    elif isinstance(document, list):
        inner = [('["@"]', text) for text in with_each_field(document[0], wrong)]
    else:
        inner = []
    return [wrong, *(frame.replace('"@"', text) for frame, text in inner)]


@for_each(name=DOCUMENTS, wrong=WRONG)
def test_a_document_with_a_wrong_value_is_used_or_refused_by_one_error(name: str, wrong: str) -> None:
    document, use = DOCUMENTS[name]
    for text in with_each_field(document, wrong):
        with suppress(WrongDocument):
            use(text)


@for_each(text=[*WRONG, "17x", " ", "1e2"])
def test_what_a_node_has_purged_is_a_revision_or_none(text: str) -> None:
    assert 0 <= read_purged(text.encode()) < 2**63


@for_each(host=["a..b", "\udcff", "x" * 300, "a\0b"])
def test_what_no_host_can_be_called_is_refused_in_urls_and_settings(host: str) -> None:
    for url in (f"infinistore+static://{host}:1", f"infinistore+etcd://{host}:1/c"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            parse_cluster_url(url)
    with pytest.raises(ConfigError, match="HOST:PORT"):
        ServerConfig(cluster="infinistore+etcd://a/c", advertise=f"{host}:1")


@for_each(name=["node_id", "node_zone"], wrong=["\udcff", "x" * 300])
def test_a_server_writes_no_name_that_others_refuse(name: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"must have at most 200 characters|must be Unicode"):
        ServerConfig(**{name: wrong})  # type: ignore[arg-type]
