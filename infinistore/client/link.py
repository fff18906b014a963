"""A connection that has said hello, as every driver keeps it."""

from collections.abc import Callable
from typing import Generic, TypeVar

from infinistore.client.mapped_pool import MappedPool
from infinistore.client.operations import RemoteOperations
from infinistore.client.options import Options
from infinistore.client.shared_memory import SharedMemoryOperations
from infinistore.errors import ProtocolError
from infinistore.protocol.connection import ClientConnection, Exchange, State
from infinistore.protocol.messages import Hello, HelloReply

__all__ = ["Link"]

_Stream = TypeVar("_Stream")


class Link(Generic[_Stream]):
    """A stream, the conversation on it, and what can be asked over it. One call uses it at a time.

    `deadline` is when the caller of the moment stops waiting, on `clock`.
    """

    def __init__(self, stream: _Stream, options: Options, clock: Callable[[], float]) -> None:
        self.stream = stream
        self.deadline = 0.0
        self._options = options
        self._clock = clock
        self._connection = ClientConnection()
        self._operations: RemoteOperations | None = None

    def greet(self) -> Exchange[HelloReply]:
        """Say hello, once, before anything else.

        Raises:
            AuthenticationFailed: the token is missing or wrong.
            VersionMismatch: the server is of another version.
            LimitExceeded: the server has all the connections it takes.
            ProtocolError: what answers is no server of ours.
        """
        hello = Hello(name=self._options.name, token=self._options.token)
        reply = yield from self._connection.request(hello, deadline_us=self._remaining_us())
        assert isinstance(reply, HelloReply)
        for name in ("max_body_bytes", "max_batch_keys", "max_batch_bytes", "max_value_bytes"):
            if not getattr(reply, name):
                raise ProtocolError(f"the server says that it takes nothing: its {name} is 0")
        return reply

    def open(self, hello: HelloReply, path: tuple[str, str], pool: MappedPool | None) -> None:
        """Get ready for calls: by shared memory if there is a mapped pool. `path` names the transport, and why."""
        verify = self._options.verify == "always"
        if pool is None:
            self._operations = RemoteOperations(
                self._connection, hello, verify=verify, path=path, remaining_us=self._remaining_us
            )
        else:
            self._operations = SharedMemoryOperations(
                self._connection,
                hello,
                verify=verify,
                path=path,
                remaining_us=self._remaining_us,
                pool=pool,
                inline_bytes=self._options.inline_bytes,
            )

    @property
    def operations(self) -> RemoteOperations:
        """What can be asked, after the hello."""
        assert self._operations is not None
        return self._operations

    @property
    def usable(self) -> bool:
        """Whether another request may follow. Not while one is half-way, nor after it was given up there."""
        return self._connection.state is State.READY and not self.operations.holding

    def _remaining_us(self) -> int:
        # At least 1: 0 would mean that the caller waits for ever.
        return max(1, int((self.deadline - self._clock()) * 1e6))
