"""Nodes as JSON, as a file lists them and as they stand in etcd.

What others wrote is checked: it becomes a node, or raises ValueError with half a
sentence that follows the place where it stands.
"""

import json
from typing import Any, Final

import attrs

from infinistore.addresses import DEFAULT_SERVICE_PORT, host_and_port, with_port
from infinistore.cluster.placement import PLACEMENT_VERSION
from infinistore.cluster.view import MOST_COPIES, MOST_WEIGHT, Node, NodeState, View

__all__ = ["ClusterConfig", "read_config", "read_file", "read_node", "write_config", "write_node"]

_STATES: Final = {state.value: state for state in NodeState}
_TEXTS: Final = ("instance", "zone", "host")
_NUMBERS: Final = {"weight": MOST_WEIGHT, "generation": 2**63, "capacity_bytes": 2**63, "protocol": 2**31}
_SCHEMES: Final = ("infinistore", "infinistores", "tcp", "rdma")
_MOST_TEXT: Final = 256


@attrs.frozen
class ClusterConfig:
    """What holds for all nodes of a cluster."""

    copies: int = 1


def read_config(document: Any) -> ClusterConfig:
    """Read the configuration of a cluster: `{"placement": 1, "copies": 1}`."""
    given = _object(document)
    version = given.get("placement", PLACEMENT_VERSION)
    if version != PLACEMENT_VERSION:
        raise ValueError(
            f"is of placement version {version!r}, and this is {PLACEMENT_VERSION}: "
            "use one release of InfiniStore for the servers and clients of a cluster"
        )
    copies = given.get("copies", 1)
    if type(copies) is not int or not 1 <= copies <= MOST_COPIES:
        raise ValueError(f"has copies {copies!r}: it must be a whole number between 1 and {MOST_COPIES}")
    return ClusterConfig(copies)


def write_config(config: ClusterConfig) -> bytes:
    """Write the configuration of a cluster."""
    return json.dumps({"placement": PLACEMENT_VERSION, "copies": config.copies}).encode()


def read_node(document: Any, **known: Any) -> Node:
    """Read a node. `known` are fields that the document does not have, or cannot
    know.
    """
    given = {**_object(document), **known}
    node_id = given.get("id")
    if not isinstance(node_id, str) or not 0 < len(node_id) <= _MOST_TEXT:
        raise ValueError(f"needs an id, a text of at most {_MOST_TEXT} characters")
    values: dict[str, Any] = {"id": node_id, "address": _address(given.get("address"))}
    for name in _TEXTS:
        if name in given:
            if not isinstance(given[name], str) or len(given[name]) > _MOST_TEXT:
                raise ValueError(f"has a {name} that is no text of at most {_MOST_TEXT} characters")
            values[name] = given[name]
    for name, most in _NUMBERS.items():
        if name in given:
            if type(given[name]) is not int or not 0 <= given[name] <= most:
                raise ValueError(f"has a {name} that is no whole number from 0 to {most}: {given[name]!r:.40}")
            values[name] = given[name]
    if "state" in given:
        if given["state"] not in _STATES:
            raise ValueError(f"has the state {given['state']!r:.40}; there are {', '.join(_STATES)}")
        values["state"] = _STATES[given["state"]]
    return Node(**values)


def write_node(node: Node) -> bytes:
    """Write a node as it stands in etcd, whose key has the id and whose revision is the
    generation.
    """
    document = attrs.asdict(node, filter=lambda field, value: field.name not in ("id", "generation"))
    return json.dumps({**document, "state": node.state.value}).encode()


def read_file(text: str | bytes, epoch: int) -> View:
    """Read a file that lists the nodes of a cluster:

    `{"nodes": [{"id": "a", "address": "10.0.0.1:22345", "weight": 100}], "copies": 1}`
    """
    try:
        document = _object(json.loads(text))
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None
    config = read_config(document)
    listed = document.get("nodes")
    if not isinstance(listed, list):
        raise ValueError('must have a list of "nodes"')
    nodes: dict[str, Node] = {}
    for number, one in enumerate(listed):
        try:
            node = read_node(one)
        except ValueError as error:
            raise ValueError(f"nodes[{number}] {error}") from None
        if node.id in nodes:
            raise ValueError(f"nodes[{number}] has the id {node.id!r} of another node; give each its own")
        if any(node.address == other.address for other in nodes.values()):
            raise ValueError(f"nodes[{number}] has the address {node.address!r} of another node; list each server once")
        nodes[node.id] = node
    return View(epoch, tuple(nodes[node_id] for node_id in sorted(nodes)), copies=config.copies)


def _object(document: Any) -> dict[str, Any]:
    if isinstance(document, bytes):
        try:
            document = json.loads(document)
        except (ValueError, RecursionError):
            raise ValueError("is not JSON") from None
    if not isinstance(document, dict):
        raise ValueError("must be an object")
    return document


def _address(written: Any) -> str:
    if not isinstance(written, str):
        raise ValueError("needs an address, such as 10.0.0.7:22345")
    scheme, separator, rest = written.partition("://")
    if separator and scheme not in _SCHEMES:
        raise ValueError(f"has an address {written!r:.80} that begins with none of {', '.join(_SCHEMES)}")
    try:
        host, port = host_and_port(rest if separator else written, DEFAULT_SERVICE_PORT)
    except ValueError as error:
        raise ValueError(f"has an address {written!r:.80} that {error}") from None
    return f"{scheme if separator else 'infinistore'}://{with_port(host, port)}"
