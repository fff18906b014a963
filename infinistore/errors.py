"""Every error that InfiniStore raises, in one tree.

All of them descend from `InfiniStoreException`. Each class that can travel over the wire has a numeric
`code`; `error_from_code` turns a code and a message back into the class, so that a client raises what the server
meant. Codes are part of the protocol (`docs/protocol.md`): they are never re-used and never change.

Misuse of the API that needs no store to detect (an empty key, a key twice in one put, a read-only buffer to
read into) is a plain `ValueError` or `TypeError`, raised before anything is sent.
"""

from typing import ClassVar

__all__ = [
    "AuthenticationFailed",
    "BufferTooSmall",
    "ChecksumMismatch",
    "ConfigError",
    "DeadlineExceeded",
    "DeviceMemoryUnreachable",
    "InfiniStoreException",
    "InfiniStoreKeyNotFound",
    "InvalidRequest",
    "KeyNotFound",
    "LeaseStillInUse",
    "LimitExceeded",
    "OutOfMemory",
    "ProtocolError",
    "StoreUnavailable",
    "TransferFailed",
    "UnknownReservation",
    "ValueTooLarge",
    "VersionMismatch",
    "error_from_code",
]


class InfiniStoreException(Exception):
    """The root of every error that InfiniStore raises.

    On its own it means a failure inside the server that has no better name.
    """

    code: ClassVar[int] = 1


class KeyNotFound(InfiniStoreException, KeyError):
    """The key is not in the store: never written, deleted, or evicted."""

    code: ClassVar[int] = 2

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return Exception.__str__(self)


InfiniStoreKeyNotFound = KeyNotFound
"""The name that the original InfiniStore has for it."""


class OutOfMemory(InfiniStoreException):
    """The pool has no room for the batch, even after evicting what may be evicted. Nothing was changed for it."""

    code: ClassVar[int] = 3


class ValueTooLarge(InfiniStoreException):
    """One value is larger than the store accepts: its limit, or its whole pool."""

    code: ClassVar[int] = 4


class LimitExceeded(InfiniStoreException):
    """A bound was reached: connections, bytes pinned by one client, keys in a batch. The message names it."""

    code: ClassVar[int] = 5


class BufferTooSmall(InfiniStoreException):
    """A stored value is longer than the buffer it was to be read into. No byte was written to any buffer."""

    code: ClassVar[int] = 6


class StoreUnavailable(InfiniStoreException):
    """The store cannot be reached, or the connection was lost.

    A put that ends so may have been committed: it is not known.
    """

    code: ClassVar[int] = 7


class DeadlineExceeded(InfiniStoreException):
    """The call did not finish in the time it was given. A put that ends so may have been committed."""

    code: ClassVar[int] = 8


class ProtocolError(InfiniStoreException):
    """The peer said something that the protocol does not allow. The connection is closed."""

    code: ClassVar[int] = 9


class VersionMismatch(ProtocolError):
    """The peer speaks another version of the protocol."""

    code: ClassVar[int] = 10


class InvalidRequest(ProtocolError):
    """A well-formed message asks for something that no request may ask for: an empty key, a key twice in a put."""

    code: ClassVar[int] = 11


class ChecksumMismatch(InfiniStoreException):
    """The bytes that arrived are not the bytes that were written, by their xxh3 checksum."""

    code: ClassVar[int] = 12


class AuthenticationFailed(InfiniStoreException):
    """The server wants a token, and the one given is missing or wrong."""

    code: ClassVar[int] = 13


class UnknownReservation(InfiniStoreException):
    """The reservation named is not open: never made, or already committed or aborted."""

    code: ClassVar[int] = 14


class ConfigError(InfiniStoreException, ValueError):
    """A setting (flag, environment variable, file or URL) that cannot be used. The message says which, and what would
    do."""

    code: ClassVar[int] = 15


class TransferFailed(StoreUnavailable):
    """The bytes could not be moved by RDMA: the peer does not answer, or its memory is not what it said.

    Nothing was stored, and what a get should have filled is undefined. The clients try another path by themselves, and
    raise this only where the URL allows none.
    """

    code: ClassVar[int] = 16


class DeviceMemoryUnreachable(InfiniStoreException, ValueError):
    """Memory of a GPU was to be moved as it is, or registered for that, and it cannot be: it is not registered, the
    system does not let it be, or there is no RDMA to move it by.

    The message says which, and what would help. Nothing was stored (of a batch over the limits: nothing of that part);
    what a get should have filled is undefined.
    """

    code: ClassVar[int] = 17


class LeaseStillInUse(ResourceWarning):
    """A `lease` or `reserve` block was left while views, arrays or tensors of its memory were still alive.

    Leased memory stays pinned until they die. Reserved memory is committed all the same: nobody may write there now.
    """


def _subclasses(cls: type[InfiniStoreException]) -> list[type[InfiniStoreException]]:
    return [cls, *(found for child in cls.__subclasses__() for found in _subclasses(child))]


_BY_CODE = {cls.code: cls for cls in _subclasses(InfiniStoreException)}


def error_from_code(code: int, message: str) -> InfiniStoreException:
    """Return the error that `code` stands for; an unknown code gives the root class, which names the code."""
    cls = _BY_CODE.get(code)
    if cls is None:
        return InfiniStoreException(f"{message} (unknown error code {code})")
    return cls(message)
