"""The messages and the conversation that the golden frames hold, for the code of any
release.

`messages` is the module `infinistore.protocol.messages` of that release, `pack` its
function that packs 64-bit numbers. Fields are named, so that a field that has moved or
changed its name is noticed.
"""

from collections.abc import Callable
from typing import Any

__all__ = ["CONVERSATION_BLOCKS", "conversation", "golden_messages"]

CONVERSATION_BLOCKS = [b"the first block", b"and the second"]


def golden_messages(m: Any, pack: Callable[[Any], Any]) -> list[Any]:
    """One message of each kind with a value in every field, and one with the defaults
    where there are some.
    """
    keys, one = m.Keys(["prompt/0", "\u00fcber"]), m.Keys(["prompt/0"])
    two = pack([4096, 2**40 + 1])
    queue: dict[str, Any] = {"queue": 17, "packet": 2**24 - 1, "gid": "fe80" + "0" * 28}
    limits: dict[str, Any] = {"max_body_bytes": 2**26, "max_batch_keys": 8192, "max_batch_bytes": 2**30}
    return [
        m.Hello(),
        m.Hello(name="decode-7", token="s3cret"),
        m.HelloReply(instance="6f1ce0", server_version="0.1.0", max_value_bytes=2**29, **limits),
        m.HelloReply(
            instance="6f1ce0",
            server_version="0.1.0",
            max_value_bytes=2**29,
            unix_socket="/run/a.sock",
            rdma="Ethernet",
            **limits,
        ),
        m.Put(keys=keys, sizes=two),
        m.Put(keys=keys, sizes=two, checksums=False, replace=False),
        m.PutReply(skipped=pack([0, 7])),
        m.Get(keys=keys, capacities=pack([])),
        m.Get(keys=keys, capacities=two, checksums=False),
        m.GetReply(sizes=pack([5, m.MISSING]), checksums=pack([2**64 - 2, m.NO_CHECKSUM])),
        m.Exists(keys=keys),
        m.Exists(keys=keys, touch=True),
        m.ExistsReply(present=b"\1\0"),
        m.MatchPrefix(keys=keys),
        m.MatchPrefix(keys=keys, hold_us=2_000_000),
        m.MatchPrefixReply(matched=2),
        m.MatchPrefixReply(matched=2, hold=2**63),
        m.ReleaseHold(hold=2**63),
        m.Delete(keys=keys),
        m.ListKeys(),
        m.ListKeys(prefix="prompt/", after="prompt/0", limit=10),
        m.KeysReply(keys=keys, limit=10),
        m.Purge(),
        m.Evict(low=0.25, high=0.75),
        m.Statistics(),
        m.Statistics(details=True),
        m.StatisticsReply(statistics=m.Tree({"server": {"instance": "6f1ce0"}, "store": {"keys": 2, "fill": [0.5]}})),
        m.Verify(keys=keys),
        m.VerifyReply(sound=b"\1\0"),
        m.CountReply(count=2**64 - 1),
        m.ErrorReply(code=3, message="no room"),
        m.ErrorReply(code=9, message="what?", fatal=True),
        m.MapArenas(),
        m.MapArenas(first=3),
        m.MapArenasReply(lengths=two, writable=True),
        m.MapTables(),
        m.MapTablesReply(granule_bytes=4096),
        m.MapTablesReply(granule_bytes=4096, max_pinned_bytes=2**33, unit_bytes=1024),
        m.Reserve(sizes=two),
        m.Reserve(sizes=two, spare=True),
        m.ReserveReply(reservation=7, places=pack([0, 2**48 + 64])),
        m.Commit(reservation=7, keys=keys, checksums=two),
        m.Commit(reservation=7, keys=keys, checksums=pack([]), replace=False),
        m.Prepare(reservation=7, keys=keys, sizes=pack([])),
        m.Prepare(reservation=0, keys=keys, sizes=two, checksums=False),
        m.PrepareReply(accepted=False, reservation=7, places=pack([])),
        m.PrepareReply(accepted=True, reservation=7, places=pack([0, 2**48 + 64]), removals=9),
        m.Lease(keys=keys, capacities=pack([])),
        m.Lease(keys=keys, capacities=two, inline_bytes=65536),
        m.LeaseReply(lease=4, sizes=two, checksums=pack([1, 0]), places=pack([0, 64])),
        m.LeaseReply(lease=4, sizes=two, checksums=pack([1, 0]), places=pack([0, 64]), removals=9),
        m.Touch(keys=one),
        m.Touch(keys=keys, read=False),
        m.Release(lease=4),
        m.Abort(reservation=7),
        m.RdmaConnect(**queue),
        m.RdmaConnect(lid=5, mtu=4096, reads=16, **queue),
        m.RdmaConnectReply(**queue),
        m.RdmaConnectReply(lid=5, mtu=4096, reads=16, **queue),
        m.RdmaPut(keys=keys, sizes=two, addresses=two, remote_keys=pack([3]), checksums=pack([])),
        m.RdmaPut(keys=keys, sizes=two, addresses=two, remote_keys=two, checksums=two, replace=False),
        m.RdmaGet(keys=keys, capacities=two, addresses=two, remote_keys=pack([3])),
        m.RdmaGet(
            keys=keys,
            capacities=pack([]),
            addresses=pack([8]),
            remote_keys=pack([3]),
            region_bytes=2**20,
            inline_bytes=512,
            read_back=True,
        ),
        m.RdmaGetReply(sizes=two, checksums=two),
        m.RdmaGetReply(sizes=two, checksums=two, lease=4, inline=True),
        m.RdmaFill(reservation=7, first_byte=1, length=2, address=2**47, remote_key=3),
        m.RdmaFetch(lease=4, first_byte=1, length=2, address=2**47, remote_key=3),
    ]


def conversation(m: Any, pack: Callable[[Any], Any]) -> list[tuple[Any, bytes]]:
    """Requests that a client of any release may send to a server that is empty, with
    their payloads.
    """
    blocks = b"".join(CONVERSATION_BLOCKS)
    keys, sizes = m.Keys(["prompt/0", "prompt/1"]), pack(map(len, CONVERSATION_BLOCKS))
    return [
        (m.Hello(name="decode-7"), b""),
        (m.Put(keys=keys, sizes=sizes, checksums=False), blocks),
        (m.Put(keys=keys, sizes=sizes, checksums=True, replace=False), blocks + bytes(16)),
        (m.Get(keys=m.Keys([*keys, "prompt/2"]), capacities=pack([])), b""),
        (m.Get(keys=keys, capacities=pack([1, 99])), b""),
        (m.Exists(keys=m.Keys(["prompt/1", "prompt/2"]), touch=True), b""),
        (m.MatchPrefix(keys=keys), b""),
        (m.ListKeys(prefix="prompt/"), b""),
        (m.Verify(keys=keys), b""),
        (m.ReleaseHold(hold=12345), b""),
        (m.Touch(keys=keys), b""),
        (m.Delete(keys=m.Keys(["prompt/0"])), b""),
        (m.Evict(low=0.5, high=0.9), b""),
        (m.Put(keys=m.Keys(["k", "k"]), sizes=pack([1, 1]), checksums=False), b"ab"),
        (m.Statistics(details=True), b""),
        (m.Purge(), b""),
        (m.Release(lease=3), b""),  # which was never leased: a fatal error
    ]
