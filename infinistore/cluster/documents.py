"""The documents of a cluster: JSON that a file has, or that stands in etcd.

What others wrote is checked here, all of it: it becomes what it says, which can be used
and written, or raises `WrongDocument`.
"""

import json
from typing import Any, Final

import attrs

from infinistore.addresses import DEFAULT_SERVICE_PORT, host_and_port, with_port
from infinistore.cluster.membership import MOST_COPIES, MOST_WEIGHT, Node, NodeState, View
from infinistore.cluster.placement import PLACEMENT_VERSION

__all__ = [
    "ClusterConfig",
    "WrongDocument",
    "read_config",
    "read_file",
    "read_node",
    "read_object",
    "read_purged",
    "write_config",
    "write_node",
]

_STATES: Final = {state.value: state for state in NodeState}
_TEXTS: Final = ("instance", "zone", "host")
_NUMBERS: Final = {"weight": MOST_WEIGHT, "generation": 2**63, "capacity_bytes": 2**63, "protocol": 2**31}
_SCHEMES: Final = ("infinistore", "infinistores", "tcp", "rdma")
_MOST_TEXT: Final = 256
_MOST_REVISION: Final = 2**63 - 1


class WrongDocument(ValueError):
    """What somebody wrote cannot be used. The message is half a sentence that follows
    the place where it stands.
    """


@attrs.frozen
class ClusterConfig:
    """What holds for all nodes of a cluster."""

    copies: int = 1


def read_config(document: Any) -> ClusterConfig:
    """Read the configuration of a cluster: `{"placement": 1, "copies": 1}`."""
    given = read_object(document)
    version = given.get("placement", PLACEMENT_VERSION)
    if type(version) is not int or version != PLACEMENT_VERSION:
        raise WrongDocument(
            f"is of placement version {_shown(version)}, and this is {PLACEMENT_VERSION}: "
            "use one release of InfiniStore for the servers and clients of a cluster"
        )
    copies = given.get("copies", 1)
    if type(copies) is not int or not 1 <= copies <= MOST_COPIES:
        raise WrongDocument(f"has copies {_shown(copies)}: it must be a whole number between 1 and {MOST_COPIES}")
    return ClusterConfig(copies)


def write_config(config: ClusterConfig) -> bytes:
    """Write the configuration of a cluster."""
    return json.dumps({"placement": PLACEMENT_VERSION, "copies": config.copies}).encode()


def read_node(document: Any, **known: Any) -> Node:
    """Read a node. `known` are fields that the document does not have, or cannot
    know.
    """
    given = {**read_object(document), **known}
    node_id = given.get("id")
    if not node_id or not _is_text(node_id):
        raise WrongDocument(f"needs an id, a text of at most {_MOST_TEXT} characters")
    values: dict[str, Any] = {"id": node_id, "address": _address(given.get("address"))}
    for name in _TEXTS:
        if name in given:
            if not _is_text(given[name]):
                raise WrongDocument(f"has a {name} that is no text of at most {_MOST_TEXT} characters")
            values[name] = given[name]
    for name, most in _NUMBERS.items():
        if name in given:
            if type(given[name]) is not int or not 0 <= given[name] <= most:
                raise WrongDocument(f"has a {name} that is no whole number from 0 to {most}: {_shown(given[name])}")
            values[name] = given[name]
    if "state" in given:
        state = given["state"]
        if not isinstance(state, str) or state not in _STATES:
            raise WrongDocument(f"has the state {_shown(state)}; there are {', '.join(_STATES)}")
        values["state"] = _STATES[state]
    if "founding" in given:
        if type(given["founding"]) is not bool:
            raise WrongDocument(f"has a founding that is neither true nor false: {_shown(given['founding'])}")
        values["founding"] = given["founding"]
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
    document = read_object(text)
    config = read_config(document)
    listed = document.get("nodes")
    if not isinstance(listed, list):
        raise WrongDocument('must have a list of "nodes"')
    nodes: dict[str, Node] = {}
    for number, one in enumerate(listed):
        try:
            node = read_node(one)
        except WrongDocument as error:
            raise WrongDocument(f"nodes[{number}] {error}") from None
        if node.id in nodes:
            raise WrongDocument(f"nodes[{number}] has the id {node.id!r} of another node; give each its own")
        if any(node.address == other.address for other in nodes.values()):
            raise WrongDocument(
                f"nodes[{number}] has the address {node.address!r} of another node; list each server once"
            )
        nodes[node.id] = node
    return View(epoch, tuple(nodes[node_id] for node_id in sorted(nodes)), copies=config.copies)


def read_purged(value: bytes) -> int:
    """Read the revision of the last purge that a node has carried out: 0 if it has not
    said so, or if what stands there cannot be read.
    """
    try:
        revision = _parsed(value)
    except WrongDocument:
        return 0
    return revision if type(revision) is int and 0 <= revision <= _MOST_REVISION else 0


def read_object(document: Any) -> dict[str, Any]:
    """Read an object of JSON, as text or as `json` has parsed it. Its values may be
    anything.
    """
    if isinstance(document, str | bytes):
        document = _parsed(document)
    if not isinstance(document, dict):
        raise WrongDocument("must be an object")
    return document


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WrongDocument(f"is not JSON: {error}") from None


def _is_text(value: Any) -> bool:
    """Whether this is a text of at most `_MOST_TEXT` characters that has bytes: JSON
    may have half of a character.
    """
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    """A value in a message; what may be nested without end only by its type."""
    return "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else f"{value!r:.40}"


def _address(written: Any) -> str:
    if not isinstance(written, str):
        raise WrongDocument("needs an address, such as 10.0.0.7:22345")
    scheme, separator, rest = written.partition("://")
    if separator and scheme not in _SCHEMES:
        raise WrongDocument(f"has an address {written!r:.80} that begins with none of {', '.join(_SCHEMES)}")
    try:
        host, port = host_and_port(rest if separator else written, DEFAULT_SERVICE_PORT)
    except ValueError as error:
        raise WrongDocument(f"has an address {written!r:.80} that {error}") from None
    return f"{scheme if separator else 'infinistore'}://{with_port(host, port)}"
