"""What is fuzzed: functions of bytes that somebody else wrote, which take any of them
or raise what they promise.

A target raises whatever should not have been raised. What it keeps from one input to
the next is empty.
"""

import logging
import mmap
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, Self

import attrs
import trio

from infinistore.access.policy import OneTenant
from infinistore.access.tenants import digest_of
from infinistore.access.tenants_file import add_tenant, parse_tenants, remove_tenant, replace_tokens
from infinistore.allocators import create_allocator
from infinistore.cli.files import MAGIC, BadManifest, parse_manifest
from infinistore.cluster.documents import (
    ClusterConfig,
    WrongDocument,
    read_file,
    read_node,
    read_purged,
    write_node,
)
from infinistore.cluster.etcd.gateway import Item
from infinistore.cluster.etcd.layout import Layout, Listing
from infinistore.cluster.membership import Node, View
from infinistore.cluster.placement import Placement
from infinistore.config import ServerConfig
from infinistore.core import Pool, StoreCore, create_arena
from infinistore.core.pool_state import READERS, PoolState, decode_state, encode_state, header_of
from infinistore.disk.format import (
    LEAD,
    SUPERBLOCK_BYTES,
    End,
    Footer,
    Origin,
    SnapshotHeader,
    SnapshotSection,
    Superblock,
    Table,
    checked,
    decode_end,
    decode_footer,
    decode_section,
    decode_snapshot_header,
    decode_superblocks,
    decode_table,
    peek_table,
)
from infinistore.disk.jobs import ALIGNMENT_BYTES
from infinistore.disk.volume import Volume
from infinistore.errors import ConfigError, InfiniStoreException, ProtocolError, StoreUnavailable
from infinistore.protocol.client_connection import ClientConnection
from infinistore.protocol.codec import (
    HEADER_BYTES,
    decode_body,
    encode_head,
    pack_u64,
    parse_header,
    statistics_from_tree,
    with_offer,
)
from infinistore.protocol.messages import (
    KINDS,
    MISSING,
    ONE_WAY,
    ErrorReply,
    Exists,
    Flush,
    Get,
    GetReply,
    Hello,
    HelloReply,
    Keys,
    Lease,
    ListKeys,
    MapTables,
    MatchPrefix,
    Message,
    Prefetch,
    Put,
    Request,
    Reserve,
    Statistics,
    StatisticsReply,
    Touch,
)
from infinistore.protocol.server_connection import ServerConnection
from infinistore.protocol.shared_tables import READER_BYTES, TouchLog
from infinistore.protocol.states import State
from infinistore.protocol.versions import MINOR, OFFER, Offer
from infinistore.server.connection import ClientTables
from infinistore.server.management.api import Management
from infinistore.server.management.http import ConnectionSlots, HttpLimits, serve_connection
from infinistore.server.movers.shm import PublishedRemovals
from tests.protocol.wire import Wire, frame

__all__ = ["TARGETS"]

KIB = 1024
MIB = 1024 * KIB
_KINDS = sorted(KINDS)
_NEWER = Offer(MINOR + 1, OFFER.capabilities)
_HELLO_REPLY = HelloReply("0123", "1.0", 64 * MIB, 8192, 256 * MIB, 16 * MIB)
_KEY = Keys(["a"])
_REQUESTS: tuple[Request, ...] = (
    Exists(_KEY),
    Get(_KEY, pack_u64()),
    Lease(_KEY, pack_u64()),
    ListKeys(),
    MapTables(),
    MatchPrefix(_KEY),
    Put(Keys([]), pack_u64()),
    Reserve(pack_u64([1])),
    Statistics(),
    # New ones at the end, so that an input goes on meaning what it means.
    Flush(_KEY),
    Prefetch(_KEY),
)


class _Faults(logging.Handler):
    """Notes errors in the log: what is contained there is a fault all the same."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record)

    def __enter__(self) -> Self:
        logging.getLogger("infinistore").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("infinistore").removeHandler(self)
        for record in self.found:
            error = record.exc_info[1] if record.exc_info else None
            raise AssertionError(record.getMessage()) from error


def decoder(data: bytes) -> None:
    """A header, or a body of any kind of message: requests and replies. What is taken
    goes out as it came in.
    """
    with suppress(ProtocolError):
        parse_header(memoryview(data.ljust(HEADER_BYTES, b"\0")), max_body_bytes=2**32, max_payload_bytes=2**63)
    if not data:
        return
    kind = _KINDS[data[0] % len(_KINDS)]
    with suppress(ProtocolError):
        message = decode_body(kind, memoryview(data)[1:])
        again = _again(message)  # what is not a number is not equal to itself, but its bytes are
        assert again == message or encode_head(again, request_id=1) == encode_head(message, request_id=1)
        if isinstance(message, StatisticsReply):
            statistics_from_tree(message.statistics)


def _again(message: Message) -> Message:
    head = encode_head(message, request_id=1)
    header = parse_header(memoryview(head), max_body_bytes=2**32, max_payload_bytes=0)
    return decode_body(header.kind, memoryview(head)[HEADER_BYTES : HEADER_BYTES + header.body_bytes])


def server(data: bytes) -> None:
    """A conversation as the server hears it: without a hello, after one, and after one
    of a newer release.
    """
    for incoming in (data, frame(Hello()) + data, with_offer(frame(Hello()), _NEWER) + data):
        wire = Wire(incoming)
        connection = ServerConnection(max_body_bytes=MIB, max_payload_bytes=64 * KIB)
        try:
            while (received := wire.run(connection.receive())) is not None:
                message = received.message
                if isinstance(message, Put):
                    lengths = [*message.sizes, 8 * len(message.keys) * message.checksums]
                    wire.run(connection.read_payload([memoryview(bytearray(length)) for length in lengths]))
                if not isinstance(message, ONE_WAY):
                    wire.run(connection.reply(_HELLO_REPLY if isinstance(message, Hello) else ErrorReply(1, "")))
        except StoreUnavailable:
            pass
        except ProtocolError as error:
            wire.run(connection.reply_fatal(error))
        assert connection.state is not State.REPLYING


def client(data: bytes) -> None:
    """What a server answers: to the hello, and to a request which the first byte
    chooses.
    """
    if not data:
        return
    request = _REQUESTS[data[0] % len(_REQUESTS)]
    for incoming in (data[1:], frame(_HELLO_REPLY) + data[1:], with_offer(frame(_HELLO_REPLY), _NEWER) + data[1:]):
        wire = Wire(incoming)
        connection = ClientConnection(max_body_bytes=MIB)
        with suppress(InfiniStoreException):
            wire.run(connection.request(Hello()))
            reply = wire.run(connection.request(request))
            if isinstance(reply, GetReply):
                assert connection.payload_left == sum(size for size in reply.sizes if size != MISSING)
            if isinstance(reply, StatisticsReply):
                statistics_from_tree(reply.statistics)
            if connection.payload_left and connection.payload_left < MIB:
                wire.run(connection.read_payload([memoryview(bytearray(connection.payload_left))]))


@cache
def _watched_core() -> StoreCore:
    """A store whose removals are noted. Made once, which takes longer than most
    inputs.
    """
    core = StoreCore(Pool(create_allocator("bitmap", KIB)), clock=lambda: 0.0)
    core.add_arena(create_arena(0, 16 * KIB))
    PublishedRemovals(16 * KIB).watch(core)
    return core


def touch_log(data: bytes) -> None:
    """What a client on this host leaves in its log, while others put and delete. No
    room may be lost by it.
    """
    core, own = _watched_core(), ClientTables()
    hostile, other = core.open_client("hostile"), core.open_client("other")
    descriptor = own.share()
    memory = mmap.mmap(descriptor, READER_BYTES)
    log = TouchLog(memoryview(memory))

    def hear(touch: Message) -> None:
        assert isinstance(touch, Touch)
        core.note_use(touch.keys, read=touch.read)

    with _Faults():
        own.watch(core, hostile, hear)
        core.commit(core.reserve(other, [KIB, KIB]), ["a", "b"], None)
        log.append(data[: len(data) // 2])
        core.delete(["a"])
        log.append(data[len(data) // 2 :])
        core.commit(core.reserve(other, [KIB]), ["b"], None)
        own.listen()
        core.close_client(hostile)
        core.close_client(other)
        core.purge()
        assert core.pool.used_bytes == 0
    own.close()


class _Said:
    """A stream on which everything has been said already. Answers are taken and
    forgotten.
    """

    passes_descriptors = False

    def __init__(self, data: bytes) -> None:
        self._left = data

    async def send_all(self, views: Sequence[memoryview], within_s: float = 0) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_into(self, views: Sequence[memoryview], deadline: float = 0) -> int:
        await trio.lowlevel.checkpoint()
        count = min(len(views[0]), len(self._left))
        views[0][:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Nothing is open."""


def http(data: bytes) -> None:
    """What is said to the management API of a server that is starting."""
    application = Management(ServerConfig(), OneTenant("token")).application()

    async def serve() -> None:
        slots = ConnectionSlots(HttpLimits())
        stream: Any = _Said(data)
        await serve_connection(application, stream, slots)

    with _Faults():
        trio.run(serve)


def manifest(data: bytes) -> None:
    """What `get` and `rm` find under a key."""
    for value in (data, MAGIC + data):
        with suppress(BadManifest):
            found = parse_manifest("key", value)
            if found is not None:
                assert parse_manifest("key", found.encode()) == found
                for _, keys in found.block_keys("key"):
                    assert len(keys) <= found.blocks
                    break


_UUID, _SEED, _SEGMENT_BYTES = bytes(16), 1, MIB
_ORIGIN = Origin(_UUID, _SEED, 0, _SEGMENT_BYTES)


def disk(data: bytes) -> None:
    """What is on a disk: a structure, which the first byte chooses. Once as it is, and
    once with a checksum that is right, which nothing but the fields can refuse.
    """
    if not data:
        return
    name, magic, seed = _STRUCTURES[data[0] % len(_STRUCTURES)]
    fields = data[1:].ljust(SUPERBLOCK_BYTES - LEAD.size, b"\0") if magic is Superblock.MAGIC else data[1:]
    for found in (data[1:], checked(magic, fields, seed)):
        _read_structure(name, found)


_STRUCTURES = (
    ("superblock", Superblock.MAGIC, 0),
    ("table", Table.MAGIC, _SEED),
    ("footer", Footer.MAGIC, _SEED),
    ("end", End.MAGIC, _SEED),
    ("section", SnapshotSection.MAGIC, _SEED),
    ("snapshot", SnapshotHeader.MAGIC, _SEED),
)


def _read_structure(name: str, found: bytes) -> None:
    view = memoryview(found)
    match name:
        case "superblock":
            with suppress(ConfigError):
                assert decode_superblocks(found).segment_bytes % ALIGNMENT_BYTES == 0
                Volume.open(0, superblock=found, files={"segments/0": MIB}, capacity_bytes=64 * MIB)
        case "table":
            peek_table(view, uuid=_UUID, segment=0)
            table = decode_table(view, _ORIGIN, 0)
            if isinstance(table, int):
                assert len(found) < table <= _SEGMENT_BYTES
            elif table is not None:
                assert len(table[1]) == table[0].rows
                assert table[1].is_within(_SEGMENT_BYTES)
        case "footer":
            footer = decode_footer(view, _ORIGIN, 0)
            if footer is not None:
                assert len(footer[1]) == len(footer[2]) == footer[0].batches
                assert len(footer[3]) == sum(footer[2])
        case "end":
            end = decode_end(view, _ORIGIN)
            assert end is None or end.footer_bytes < _SEGMENT_BYTES
        case "section":
            rows = decode_section(view, shard=0, uuid=_UUID, sequence=0, seed=_SEED)
            assert rows is None or len({column.size for column in rows}) == 1
        case _:
            header = decode_snapshot_header(view, uuid=_UUID, seed=_SEED)
            if isinstance(header, tuple):
                assert len(header[1]) == header[0].sections
                assert len(header[2]) == header[0].segments


(_STATE_MAGIC,) = struct.unpack_from("=8s", encode_state(PoolState("", "", 1, [], [], [], [], []))[0])


def pool_state(data: bytes) -> None:
    """The state of a pool that another process has handed over: the body of one, in
    each format, or all of it. What is taken can be written again.
    """
    for found in (data, *(header_of(_STATE_MAGIC, number, data) + data for number in READERS)):
        with suppress(ValueError):
            state = decode_state(found)
            again = decode_state(b"".join(encode_state(state)))
            assert attrs.evolve(again, ends=state.ends) == state
            for (position, left_s), (same, still_s) in zip(state.ends, again.ends, strict=True):
                assert position == same
                assert abs(left_s - still_s) < 1e-5  # a float has no microseconds for centuries


def tenants(data: bytes) -> None:
    """Read a tenants file, and edit what was read: each edit is what was meant, or is
    refused, in one line.
    """
    text = data.decode("utf-8", "replace")
    token = "new." + "x" * 43
    edits: list[Callable[[str], str]] = [
        lambda text: add_tenant(text, "file", "new", digest_of(token), keys={"max_bytes": "1GiB"}, note="today"),
    ]
    try:
        found = parse_tenants(text, "file")
    except ConfigError as error:
        problem = str(error)
    else:
        problem = "file:"
        for name in list(found.tenants)[:1]:
            edits.append(partial(remove_tenant, name="file", tenant=name))
            edits.append(partial(replace_tokens, name="file", tenant=name, digests=[digest_of(token)]))
        for edit in edits:
            try:
                edited = edit(text)
            except ConfigError:  # written as it cannot be edited, or it has a tenant `new`
                continue
            parse_tenants(edited, "file")
    if not problem.startswith("file:") or len(problem.splitlines()) != 1:
        raise AssertionError(f"a line that names the file was promised: {problem!r}")


_CLUSTER = Layout("c")
_OF_CLUSTER = (_CLUSTER.node("a"), _CLUSTER.config, _CLUSTER.drain("b"), _CLUSTER.purged("a"), _CLUSTER.purge)


def cluster(data: bytes) -> None:
    """A document of a cluster: in a file, and under each key of etcd beside a good
    node. What is taken can be placed.
    """
    with suppress(WrongDocument):
        Placement(read_file(data, 0)).places(["key"])
    read_purged(data)
    good = Item(_CLUSTER.node("b"), write_node(Node("b", "infinistore://b:1")), 1, 1)
    for key in _OF_CLUSTER:
        with suppress(WrongDocument):
            listing = Listing.of(_CLUSTER, [Item(key, data, 1, 1), good])
            assert "b" in listing.nodes
            nodes = tuple(listing.nodes[name] for name in sorted(listing.nodes))
            Placement(View(1, nodes, (listing.config or ClusterConfig()).copies)).places(["key"])
            for node in nodes:
                assert read_node(write_node(node), id=node.id, generation=node.generation) == node


TARGETS: dict[str, Callable[[bytes], None]] = {
    "decoder": decoder,
    "server": server,
    "client": client,
    "touch_log": touch_log,
    "http": http,
    "manifest": manifest,
    "disk": disk,
    "pool_state": pool_state,
    "tenants": tenants,
    "cluster": cluster,
}
"""Each by its name, which is also that of its folder in `corpus`."""
