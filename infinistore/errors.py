"""Every error that InfiniStore raises, in one tree.

All errors are subclasses of `InfiniStoreException`. Each class that can travel over the
wire has a numeric `code`. `error_from_code` converts a code and a message back into the
class, so that a client raises the server's error. Codes are part of the protocol
(`docs/protocol.md`): they never change and are never reused.

Misuse of the API that is detectable without a store (an empty key, a duplicate key in
one put, a read-only buffer to read into) raises a plain `ValueError` or `TypeError`
before anything is sent.
"""

from collections.abc import Sequence
from typing import ClassVar

import infinistore.namesake  # noqa: F401 - first of all, for every other module imports this one

__all__ = [
    "AuthenticationFailed",
    "BufferTooSmall",
    "ChecksumMismatch",
    "ConfigError",
    "DeadlineExceeded",
    "DeviceMemoryUnreachable",
    "DiskFailed",
    "InfiniStoreException",
    "InfiniStoreKeyNotFound",
    "InvalidRequest",
    "KeyNotFound",
    "LeaseStillInUse",
    "LimitExceeded",
    "OutOfMemory",
    "PartialPut",
    "PermissionDenied",
    "ProtocolError",
    "ServerReplaced",
    "StoreUnavailable",
    "TlsFailed",
    "TransferFailed",
    "UnknownReservation",
    "ValueTooLarge",
    "VersionMismatch",
    "error_from_code",
]


class InfiniStoreException(Exception):
    """The base class of every error that InfiniStore raises.

    An instance of this class itself is an internal error of the server.
    """

    code: ClassVar[int] = 1


class KeyNotFound(InfiniStoreException, KeyError):
    """The key does not exist: it was never put, or was deleted or evicted."""

    code: ClassVar[int] = 2

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return Exception.__str__(self)


InfiniStoreKeyNotFound = KeyNotFound
"""The name of `KeyNotFound` in the original InfiniStore."""


class OutOfMemory(InfiniStoreException):
    """A pool has no space for what was sent to it, even after eviction. Nothing of that
    was stored there.
    """

    code: ClassVar[int] = 3


class ValueTooLarge(InfiniStoreException):
    """A value is larger than the store's limit, or than its whole pool."""

    code: ClassVar[int] = 4


class LimitExceeded(InfiniStoreException):
    """A limit was reached: connections, bytes pinned by one client, keys in a batch.

    The message names the limit.
    """

    code: ClassVar[int] = 5


class BufferTooSmall(InfiniStoreException):
    """A stored value is longer than its buffer. No byte was written to any buffer."""

    code: ClassVar[int] = 6


class StoreUnavailable(InfiniStoreException):
    """The store cannot be reached, or the connection was lost.

    A put that raises it may have been committed. The message says whether the outcome
    is unknown.
    """

    code: ClassVar[int] = 7
    outcome_is_unknown: bool = False
    """Whether the request may have been carried out, or may be later."""
    store_is_closed: bool = False
    """Whether the store was closed, or opened before a fork: no later call succeeds."""


class DeadlineExceeded(InfiniStoreException):
    """The call did not finish before its deadline.

    A put that raises it may have been committed.
    """

    code: ClassVar[int] = 8
    outcome_is_unknown: bool = False
    """Whether the request may have been carried out, or may be later."""


class ProtocolError(InfiniStoreException):
    """The peer violated the protocol. The connection is closed."""

    code: ClassVar[int] = 9


class VersionMismatch(ProtocolError):
    """The peer speaks an incompatible version of the protocol, or lacks a
    capability.
    """

    code: ClassVar[int] = 10


class InvalidRequest(ProtocolError):
    """A well-formed message with invalid contents, such as a duplicate key."""

    code: ClassVar[int] = 11


class ChecksumMismatch(InfiniStoreException):
    """The bytes are not those that were written, by their xxh3 checksum."""

    code: ClassVar[int] = 12


class AuthenticationFailed(InfiniStoreException):
    """The server does not know who this is: the token is missing or wrong, or was
    revoked. Or it knows, and its Unix socket is not for this user.
    """

    code: ClassVar[int] = 13


class PermissionDenied(InfiniStoreException):
    """The tenant lacks the role that the request needs. Nothing was done.

    The message names the role.
    """

    code: ClassVar[int] = 21


class UnknownReservation(InfiniStoreException):
    """The reservation is not open: it never existed, or was committed or aborted."""

    code: ClassVar[int] = 14


class ConfigError(InfiniStoreException, ValueError):
    """An invalid setting: a flag, environment variable, file or URL.

    The message names the setting and a remedy.
    """

    code: ClassVar[int] = 15


class PartialPut(StoreUnavailable):
    """Some nodes of a cluster could not be reached; the others have stored their part.

    Each key of the put is in one of three lists.
    """

    code: ClassVar[int] = 18

    def __init__(
        self,
        message: str = "",
        stored: Sequence[str] = (),
        failed: Sequence[str] = (),
        unknown: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.stored = list(stored)
        """Keys that are stored, or were skipped because they were there."""
        self.failed = list(failed)
        """Keys that were not stored."""
        self.unknown = list(unknown)
        """Keys that may have been stored, or may be later."""
        self.outcome_is_unknown = bool(unknown)


class TransferFailed(StoreUnavailable):
    """An RDMA transfer failed: no answer, or the peer's memory is not as it said.

    Nothing was stored, and the buffers of a get are undefined. Clients fall back to
    another transport, and raise this error only if the URL allows RDMA alone.
    """

    code: ClassVar[int] = 16


class TlsFailed(StoreUnavailable):
    """There is no encrypted connection: one end does not speak TLS, does not accept the
    certificate of the other, or got bytes that were changed on their way. The store is
    as it was.

    The message says what to do.
    """

    code: ClassVar[int] = 20


class ServerReplaced(StoreUnavailable):
    """Another process takes the server's place. Nothing of the request was done.

    Clients try again, and raise this only where they cannot: to commit a reservation of
    the earlier process. Reserve again and write the blocks again.
    """

    code: ClassVar[int] = 22


class DeviceMemoryUnreachable(InfiniStoreException, ValueError):
    """RDMA cannot move GPU memory.

    It is not registered, the system does not allow its registration, or there is no
    RDMA. The message gives the reason and a remedy. Nothing was stored (of a batch that
    is sent in parts: nothing of that part), and the buffers of a get are undefined.
    """

    code: ClassVar[int] = 17


class DiskFailed(InfiniStoreException):
    """The disks of the store are off because of an internal error, or one cannot be
    written that has what was deleted.

    It is not known what of this call became durable. The store serves on from memory.
    """

    code: ClassVar[int] = 19


class LeaseStillInUse(ResourceWarning):
    """Arrays or tensors outlived the `with` statement of their lease or reservation.

    Leased memory stays pinned until they are gone. Reserved memory has been committed:
    do not write to it any more.
    """


def _subclasses(cls: type[InfiniStoreException]) -> list[type[InfiniStoreException]]:
    return [cls, *(found for child in cls.__subclasses__() for found in _subclasses(child))]


_BY_CODE = {cls.code: cls for cls in _subclasses(InfiniStoreException)}


def error_from_code(code: int, message: str) -> InfiniStoreException:
    """Return the error for a code; the base class for an unknown code."""
    cls = _BY_CODE.get(code)
    if cls is None:
        return InfiniStoreException(f"{message} (unknown error code {code})")
    return cls(message)
