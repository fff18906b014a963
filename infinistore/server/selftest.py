"""A server's test of itself: over each of its transports it writes a block, reads it back, and deletes it.

It goes the way of a client, through the server's own sockets, so that it finds what a client would find: no connection
left, a token that does not fit, a pool without room, bytes that came back wrong.
"""

import ipaddress
import secrets
from collections.abc import Awaitable, Callable

import attrs
import trio
import xxhash

from infinistore.errors import ChecksumMismatch, DeadlineExceeded, InfiniStoreException
from infinistore.protocol.codec import numbers
from infinistore.protocol.connection import ClientConnection
from infinistore.protocol.messages import Delete, Get, GetReply, Hello, Keys, Put, Request
from infinistore.transports.base import Stream, drive
from infinistore.transports.sockets import connect_tcp, connect_unix

__all__ = ["SELFTEST_PREFIX", "TransportCheck", "check_transports"]

SELFTEST_PREFIX = "infinistore-selftest/"
"""What the keys begin with that a self-test writes."""
_VALUE_BYTES = 4096
_DEADLINE_S = 5.0


@attrs.frozen
class TransportCheck:
    """What came of one transport; `error` is empty if it is fine."""

    transport: str
    address: str
    ok: bool
    error: str
    elapsed_s: float


async def check_transports(
    tcp: tuple[tuple[str, int], ...], unix_socket: str | None, token: str
) -> list[TransportCheck]:
    """Check the server behind these addresses, one after the other."""
    checks = [await _check("tcp", f"{host}:{port}", _tcp(host, port), token) for host, port in tcp]
    if unix_socket is not None:
        checks.append(await _check("unix", unix_socket, lambda: connect_unix(unix_socket), token))
    return checks


def _tcp(host: str, port: int) -> Callable[[], Awaitable[Stream]]:
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:  # a server that listens everywhere is found at home
        host = "127.0.0.1" if address.version == 4 else "::1"
    return lambda: connect_tcp(host, port)


async def _check(transport: str, address: str, connect: Callable[[], Awaitable[Stream]], token: str) -> TransportCheck:
    start = trio.current_time()
    error = ""
    try:
        with trio.move_on_after(_DEADLINE_S) as scope:
            stream = await connect()
            try:
                await _write_read_delete(stream, token)
            finally:
                stream.close()
        if scope.cancelled_caught:
            raise DeadlineExceeded(f"no answer within {_DEADLINE_S:g} s")
    except InfiniStoreException as problem:
        error = f"{type(problem).__name__}: {problem}"
    return TransportCheck(transport, address, not error, error, trio.current_time() - start)


async def _write_read_delete(stream: Stream, token: str) -> None:
    connection = ClientConnection()
    keys = Keys([SELFTEST_PREFIX + secrets.token_hex(16)])
    value = secrets.token_bytes(_VALUE_BYTES)
    checksum = numbers([xxhash.xxh3_64_intdigest(value)]).tobytes()

    async def ask(request: Request, payload: bytes = b"") -> object:
        views = [[memoryview(payload)]] if payload else ()
        return await drive(connection.request(request, views, payload_bytes=len(payload)), stream)

    await ask(Hello(name="selftest", token=token))
    await ask(Put(keys, numbers([_VALUE_BYTES])), value + checksum)
    reply = await ask(Get(keys, numbers()))
    assert isinstance(reply, GetReply)
    found = bytearray(connection.payload_left)
    if found:
        await drive(connection.read_payload([memoryview(found)]), stream)
    await ask(Delete(keys))
    if found != value:
        what = "other bytes" if found else "nothing"
        raise ChecksumMismatch(f"wrote {_VALUE_BYTES} bytes, and read {what}")
