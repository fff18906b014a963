"""A conversation with etcd: what it asks of whoever runs it, how it is told that there
is no answer, and calls that go to the members in turn, with a token where etcd wants
one.

A call that one member does not answer goes to the next. What etcd refuses raises
`EtcdRefused`, once for all of them.
"""

from collections.abc import Coroutine, Generator
from typing import Any, Final, TypeAlias, TypeVar

import attrs

from infinistore.cluster.etcd.gateway import (
    UNAVAILABLE_CODES,
    Answer,
    EtcdMisbehaved,
    EtcdRefused,
    Request,
    authenticate,
    read_error,
    read_token,
)
from infinistore.cluster.membership import Node

_T = TypeVar("_T")


class EtcdUnavailable(Exception):
    """No member of etcd answered, or none that has a quorum. It may be back soon."""


@attrs.frozen
class Post:
    """A request of HTTP to an endpoint, by its index. `token` may be empty."""

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


_CALL_S: Final = 2.0
"""How long one member may take to answer."""
_NEEDS_TOKEN: Final = (
    "user name is empty",
    "invalid auth token",
    "revision of auth store is old",
    "revision in header is old",
)
"""What etcd says to a call without a token, or with one that has expired."""


@attrs.frozen
class Credentials:
    """A user of etcd, and the password."""

    user: str
    password: str = attrs.field(repr=False)


class EtcdSession:
    """Calls to the members of one etcd, which are named by their index."""

    def __init__(self, members: int, credentials: Credentials | None = None, *, first: int = 0) -> None:
        self._members = members
        self._credentials = credentials
        self._token = ""
        self.member = first % members
        """The member that is asked next."""

    def turn(self) -> None:
        """Ask another member from now on."""
        self.member = (self.member + 1) % self._members

    async def call(self, request: Request, timeout_s: float = _CALL_S) -> bytes:
        """Send a request, and return the body of the answer.

        Raises:
            EtcdUnavailable: no member answered within `timeout_s`.
            EtcdRefused: etcd answered with an error.
        """
        problem = ""
        for _ in range(self._members):
            try:
                return await self._ask(request, timeout_s)
            except (EtcdUnavailable, EtcdMisbehaved) as error:
                problem = str(error)
            except EtcdRefused as error:
                if error.code not in UNAVAILABLE_CODES:
                    raise
                problem = str(error)
            self.turn()
        raise EtcdUnavailable(problem)

    async def open_stream(self, request: Request, timeout_s: float = _CALL_S) -> None:
        """Open a stream for a request, at the member that is asked next, with the token
        of the last call.

        Raises:
            EtcdUnavailable: it did not take the request.
        """
        await OpenStream(self.member, request.path, request.encode(), self._token, timeout_s)

    async def _ask(self, request: Request, timeout_s: float) -> bytes:
        answer = await self._post(request, timeout_s)
        if answer.status == 200:
            return answer.body
        refusal = str(read_error(answer))
        if not any(text in refusal for text in _NEEDS_TOKEN):
            raise read_error(answer)
        if self._credentials is None:
            raise EtcdRefused(16, "etcd wants a user and a password: set etcd_user and etcd_password_file")
        self._token = ""
        answer = await self._post(authenticate(self._credentials.user, self._credentials.password), timeout_s)
        if answer.status != 200:
            raise read_error(answer)
        self._token = read_token(answer.body)
        answer = await self._post(request, timeout_s)
        if answer.status != 200:
            raise read_error(answer)
        return answer.body

    async def _post(self, request: Request, timeout_s: float) -> Answer:
        return await Exchange(self.member, request.path, request.encode(), self._token, timeout_s)
