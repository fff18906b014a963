"""A server's self-test: it writes, reads and deletes a block over each of its
transports, and through its disks.

It connects to the server's own sockets like a client, so it finds what a client would
find: no connection left, a wrong token, a full pool, corrupted bytes.
"""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import attrs
import trio
import xxhash

from infinistore.addresses import own_address
from infinistore.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    DiskFailed,
    InfiniStoreException,
    StoreUnavailable,
    TlsFailed,
)
from infinistore.protocol.client_connection import ClientConnection
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import CountReply, Delete, Exists, Flush, Get, GetReply, Hello, Keys, Put, Request
from infinistore.server.listeners import ServerAddresses
from infinistore.transports.base import Stream, drive
from infinistore.transports.sockets.trio_streams import connect_tcp, connect_unix

if TYPE_CHECKING:
    from infinistore.server.certificates import Certificates

SELFTEST_PREFIX = "infinistore-selftest/"
"""The prefix of the keys that a self-test writes."""
_VALUE_BYTES = 4096
_DEADLINE_S = 5.0


@attrs.frozen
class TransportCheck:
    """The result for one transport; `error` is empty if it works."""

    transport: str
    address: str
    ok: bool
    error: str
    elapsed_s: float


@attrs.frozen
class DiskCheck:
    """The result for the disks together; `error` is empty if a block came back."""

    ok: bool
    error: str
    elapsed_s: float


async def check_transports(
    addresses: ServerAddresses, token: str, *, tls: "Certificates | None" = None, writes: bool = True
) -> list[TransportCheck]:
    """Check the server at each of its addresses; without `writes`, look a key up."""
    found = [("tcp" if tls is None else "tls", f"{host}:{port}", _tcp(host, port, tls)) for host, port in addresses.tcp]
    if (unix_socket := addresses.unix_socket) is not None:
        found.append(("unix", str(unix_socket), lambda: connect_unix(str(unix_socket))))

    async def run(stream: Stream) -> None:
        connection = _Connection(stream, token)
        await (connection.write_read_delete() if writes else connection.look_up())

    checks = []
    for transport, address, connect in found:
        error, elapsed_s = await _check(connect, run, wants_certificate=tls is not None and tls.asks_clients)
        checks.append(TransportCheck(transport, address, not error, error, elapsed_s))
    return checks


async def check_disks(
    addresses: ServerAddresses,
    token: str,
    evict: Callable[[Sequence[str]], object],
    *,
    tls: "Certificates | None" = None,
) -> DiskCheck:
    """Check the disks at the server's Unix socket, if it has one, or by TCP."""
    connect = _tcp(*addresses.tcp[0], tls)
    if (unix_socket := addresses.unix_socket) is not None:
        connect = partial(connect_unix, str(unix_socket))
    error, elapsed_s = await _check(
        connect,
        lambda stream: _Connection(stream, token).write_read_delete(through_disk=evict),
        wants_certificate=tls is not None and tls.asks_clients,
    )
    return DiskCheck(not error, error, elapsed_s)


def _tcp(host: str, port: int, tls: "Certificates | None") -> Callable[[], Awaitable[Stream]]:
    async def connect() -> Stream:
        stream: Stream = await connect_tcp(own_address(host), port)
        return stream if tls is None else tls.connect_to_self(stream)

    return connect


async def _check(
    connect: Callable[[], Awaitable[Stream]],
    run: Callable[[Stream], Awaitable[None]],
    *,
    wants_certificate: bool = False,
) -> tuple[str, float]:
    """Return what went wrong, empty if nothing, and how long it took. A server that
    wants a certificate of its clients is sound if it says so: it has none of these.
    """
    start = trio.current_time()
    error = ""
    try:
        with trio.move_on_after(_DEADLINE_S) as scope:
            stream = await connect()
            try:
                await run(stream)
            finally:
                stream.close()
        if scope.cancelled_caught:
            raise DeadlineExceeded(f"no answer within {_DEADLINE_S:g} s")
    except InfiniStoreException as problem:
        if wants_certificate and isinstance(problem, TlsFailed):
            return "", trio.current_time() - start
        error = f"{type(problem).__name__}: {problem}"
    return error, trio.current_time() - start


class _Connection:
    def __init__(self, stream: Stream, token: str) -> None:
        self._connection = ClientConnection()
        self._stream = stream
        self._token = token

    async def look_up(self) -> None:
        """Ask for a key that nobody has."""
        await self._ask(Hello(name="selftest", token=self._token))
        await self._ask(Exists(Keys([SELFTEST_PREFIX + secrets.token_hex(16)])))

    async def write_read_delete(self, through_disk: Callable[[Sequence[str]], object] | None = None) -> None:
        """Write a block, evict it by `through_disk`, read it and delete it."""
        keys = Keys([SELFTEST_PREFIX + secrets.token_hex(16)])
        value = secrets.token_bytes(_VALUE_BYTES)
        checksum = pack_u64([xxhash.xxh3_64_intdigest(value)]).tobytes()
        await self._ask(Hello(name="selftest", token=self._token))
        await self._ask(Put(keys, pack_u64([_VALUE_BYTES])), value + checksum)
        durable = True
        if through_disk is not None:
            flushed = await self._ask(Flush(keys))
            durable = flushed == CountReply(1)
            if durable:
                through_disk(keys)
        found = await self._read(keys)
        try:
            await self._ask(Delete(keys))
        except DiskFailed:  # as is to be expected of one that could not be written
            if durable:
                raise
        if not durable:
            raise StoreUnavailable("no disk could be written; see the states of the disks in the statistics")
        if found != value:
            what = "other bytes" if found else "nothing"
            raise ChecksumMismatch(f"wrote {_VALUE_BYTES} bytes, and read {what}")

    async def _ask(self, request: Request, payload: bytes = b"") -> object:
        views = [[memoryview(payload)]] if payload else ()
        return await drive(self._connection.request(request, views, payload_bytes=len(payload)), self._stream)

    async def _read(self, keys: Keys) -> bytearray:
        reply = await self._ask(Get(keys, pack_u64()))
        assert isinstance(reply, GetReply)
        found = bytearray(self._connection.payload_left)
        if found:
            await drive(self._connection.read_payload([memoryview(found)]), self._stream)
        return found
