"""The documents of a cluster: JSON that a file has, or that stands in etcd.

What others wrote is checked here, all of it: it becomes what it says, which can be used
and written, or raises `WrongDocument`. A drain on request is one key beside those of
the nodes: an operator writes it, the node writes there how far it is, and whoever
deletes it lets the node serve again. So it outlives the node's lease and its process,
and nobody but a node writes what stands under its lease.
"""

import json
from typing import Any, Final

import attrs

from infinistore.addresses import DEFAULT_SERVICE_PORT, host_and_port, with_port
from infinistore.cluster.membership import MOST_COPIES, MOST_WEIGHT, Node, NodeState, View
from infinistore.cluster.placement import PLACEMENT_VERSION

_STATES: Final = {state.value: state for state in NodeState}
_TEXTS: Final = ("instance", "zone", "host")
_NUMBERS: Final = {"weight": MOST_WEIGHT, "generation": 2**63, "capacity_bytes": 2**63, "protocol": 2**31}
_SCHEMES: Final = ("infinistore", "infinistores", "tcp", "rdma")
_MOST_TEXT: Final = 256
_MOST_REVISION: Final = 2**63 - 1


class WrongDocument(ValueError):
    """What somebody wrote cannot be used. The message follows the place."""


@attrs.frozen
class ClusterConfig:
    """What holds for all nodes of a cluster."""

    copies: int = 1


def read_config(document: Any) -> ClusterConfig:
    """Read the configuration of a cluster: `{"placement": 1, "copies": 1}`."""
    given = _read_object(document)
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
    """Read a node. `known` are fields that the document does not or cannot have."""
    given = {**_read_object(document), **known}
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
    """Write a node for etcd: the key has its id, the revision is its generation."""
    document = attrs.asdict(node, filter=lambda field, value: field.name not in ("id", "generation"))
    return json.dumps({**document, "state": node.state.value}).encode()


def read_file(text: str | bytes, epoch: int) -> View:
    """Read a file that lists the nodes of a cluster:

    `{"nodes": [{"id": "a", "address": "10.0.0.1:22345", "weight": 100}], "copies": 1}`
    """
    document = _read_object(text)
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


def _read_object(document: Any) -> dict[str, Any]:
    """Read an object of JSON, as text or parsed. Its values may be anything."""
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
    """Whether this is a text of at most `_MOST_TEXT` characters, and valid UTF-8."""
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


_MOST_COUNT: Final = 2**63


@attrs.frozen
class Drain:
    """How far a node is. Groups are keys with one hash tag."""

    done: bool = False
    """Whether it has passed on what it could, and gave its lease up."""
    groups: int = 0
    """How many groups are to be moved: the hottest ones."""
    moved_groups: int = 0
    skipped_groups: int = 0
    """Groups that their new owners had already."""
    failed_groups: int = 0
    """Groups that could not be moved as a whole."""
    moved_blocks: int = 0
    moved_bytes: int = 0
    size_bytes: int = 0
    """What the blocks to be moved have together."""
    done_bytes: int = 0
    """What of this was moved, was there, is gone, or could not be moved."""
    elapsed_s: int = 0
    """For how long it has been passing blocks on."""

    @property
    def ratio(self) -> float:
        """Which part of the blocks is done: 0.0 to 1.0."""
        return min(1.0, self.done_bytes / self.size_bytes) if self.size_bytes else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds that the rest takes at the pace so far; None if not known yet."""
        if not self.elapsed_s or not self.ratio:
            return None
        return self.elapsed_s * (1 - self.ratio) / self.ratio

    def __str__(self) -> str:
        told = f"{self.moved_groups + self.skipped_groups} of {self.groups} groups"
        return told + (f", {self.failed_groups} could not be moved" if self.failed_groups else "")


_COUNTS: Final = tuple(field.name for field in attrs.fields(Drain) if field.name != "done")


def write_drain(drain: Drain) -> bytes:
    """Write a drain as it stands in etcd."""
    return json.dumps(attrs.asdict(drain)).encode()


def read_drain(document: bytes) -> Drain:
    """Read a drain; what cannot be read is one that has not begun."""
    try:
        given = _read_object(document)
    except WrongDocument:
        return Drain()
    counts = {name: given[name] for name in _COUNTS if type(given.get(name)) is int and 0 <= given[name] <= _MOST_COUNT}
    return Drain(done=given.get("done") is True, **counts)
