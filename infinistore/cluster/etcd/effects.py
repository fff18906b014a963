"""What a conversation with etcd asks of whoever runs it, and how it is told that there
is no answer.
"""

from collections.abc import Coroutine, Generator
from typing import Any, TypeAlias, TypeVar

import attrs

from infinistore.cluster.etcd.gateway import Answer
from infinistore.cluster.membership import Node

__all__ = [
    "Effect",
    "EtcdUnavailable",
    "Exchange",
    "Flow",
    "NextLine",
    "OpenStream",
    "Pause",
    "Post",
    "Probe",
]

_T = TypeVar("_T")


class EtcdUnavailable(Exception):
    """No member of etcd answered, or none that has a quorum. It may be back soon."""


@attrs.frozen
class Post:
    """A request of HTTP to one endpoint, by its index. `token` is empty without
    authentication.
    """

    endpoint: int
    path: str
    body: bytes
    token: str
    timeout_s: float


@attrs.frozen
class Exchange(Post):
    """Send a request, and return its `Answer`.

    Raises:
        EtcdUnavailable: none came in time.
    """

    def __await__(self) -> Generator["Exchange", Answer, Answer]:
        return (yield self)


@attrs.frozen
class OpenStream(Post):
    """Send a request whose answer is a stream of lines; it replaces an open stream.

    Raises:
        EtcdUnavailable: it could not be sent in time.
    """

    def __await__(self) -> Generator["OpenStream", None, None]:
        yield self


@attrs.frozen
class NextLine:
    """Return the next line of the stream, or None if none came in time.

    Raises:
        EtcdUnavailable: the stream is over or broken.
    """

    timeout_s: float

    def __await__(self) -> Generator["NextLine", bytes | None, bytes | None]:
        return (yield self)


@attrs.frozen
class Pause:
    """Wait; whoever runs the flow may end it early."""

    seconds: float

    def __await__(self) -> Generator["Pause", None, None]:
        yield self


@attrs.frozen
class Probe:
    """Ask these nodes for their instances, all at once. Return the ids of those that
    answered with the instance that they are known by.
    """

    nodes: tuple[Node, ...]
    timeout_s: float

    def __await__(self) -> Generator["Probe", frozenset[str], frozenset[str]]:
        return (yield self)


Effect: TypeAlias = Exchange | OpenStream | NextLine | Pause | Probe
Flow: TypeAlias = Coroutine[Effect, Any, _T]
"""A coroutine whose awaits end in these effects."""
