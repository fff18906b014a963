"""Which errors calls may raise: those that docs/promises.md lists, and those about
corrupted bytes only where bytes were corrupted.
"""

from collections.abc import Iterator

from infinistore.access.identity import ALL_ROLES, Role
from infinistore.errors import (
    AuthenticationFailed,
    ChecksumMismatch,
    DeadlineExceeded,
    PermissionDenied,
    ProtocolError,
    ServerReplaced,
    StoreUnavailable,
)
from tests.simulation.history import Call, End, History
from tests.simulation.promises import allowed_errors

__all__ = ["may_be_corrupted", "wrong_errors", "wrongly_allowed"]

_NEVER_LOST = {
    *("get", "get_many", "get_into", "get_many_into", "lease", "exists", "exists_many", "match_prefix"),
    *("release_hold", "prefetch", "flush", "keys", "evict"),
}
"""What goes on in a cluster whatever node is lost."""
_OF_ALL_NODES = {"flush", "release_hold", "prefetch", "keys", "evict"}
"""What goes to all nodes of a cluster, and does not say which of them are lost."""
_WRITING = {"put", "put_many", "reserve", "delete", "pin", "unpin"}


def wrong_errors(history: History) -> Iterator[str]:
    """Yield which calls raised what they must not raise."""
    for call in history.calls:
        error = call.error
        if error is None:
            continue
        if isinstance(error, PermissionDenied):
            tenant, _ = history.tenant_of.get(call.client, ("", ""))
            right = any(table.tenants[tenant].roles != ALL_ROLES for table in history.tables_during(call))
        elif isinstance(error, AuthenticationFailed):  # perhaps the end of a session long ago
            tenant, digest = history.tenant_of.get(call.client, ("", ""))
            before = (one.table for one in history.tables if one.begun <= call.ended)
            right = any(digest not in table.tenants[tenant].digests for table in before)
        elif isinstance(error, ProtocolError):
            right = _was_corrupted_for(call, history.corrupted_heads)
        elif history.nodes and isinstance(error, StoreUnavailable | DeadlineExceeded):
            right = call.method not in _NEVER_LOST or any(
                client == call.client and since_s <= call.ended and call.begun <= until_s
                for client, since_s, until_s in history.without_nodes
            )
        elif isinstance(error, ChecksumMismatch):
            right = _was_corrupted_for(call, history.corrupted_replies) or _may_see_corrupted_block(call, history)
        else:
            kind = StoreUnavailable if isinstance(error, ServerReplaced) else type(error)  # the page names it as one
            right = kind.__name__ in allowed_errors(call.method)
        if not right:
            yield f"call {call.number}: {call.method} of {call.client} raised {type(error).__name__}: {error}"


def wrongly_allowed(history: History) -> Iterator[str]:
    """Yield which calls returned although the tenant had no token, or not the role, in
    all of their time. A call to a cluster whose node is lost may have asked nobody.
    """
    for call in history.calls:
        if call.end is not End.RETURNED or call.client not in history.tenant_of:
            continue
        if history.may_lose_nodes and history.nodes and (call.lost or call.method in _OF_ALL_NODES):
            continue
        name, digest = history.tenant_of[call.client]
        tenants = [table.tenants[name] for table in history.tables_during(call)]
        role = Role.READ if call.seen else Role.WRITE if call.method in _WRITING and not call.may_skip else None
        if not any(digest in one.digests for one in tenants):
            yield f"call {call.number}: {call.method} of {call.client} returned, and its token was revoked"
        elif role is not None and not any(role in one.roles for one in tenants):
            yield f"call {call.number}: {call.method} of {call.client} returned, and {name} may not {role.value}"


def may_be_corrupted(call: Call, key: str, history: History) -> bool:
    """Whether a call may have returned what a cable made of a block: it checked
    nothing, or the block has no checksum.
    """
    corrupted = [put for name, put in history.corrupted_puts if name == key]
    on_its_way = _was_corrupted_for(call, history.corrupted_replies)
    if not call.verified:
        return bool(corrupted) or on_its_way
    return (on_its_way and key in history.unchecked_keys) or any(not put.verified for put in corrupted)


def _was_corrupted_for(call: Call, events: list[tuple[float, str]]) -> bool:
    return any(client == call.client and call.begun <= time <= call.ended for time, client in events)


def _may_see_corrupted_block(call: Call, history: History) -> bool:
    """Whether a block of a call may have come to the server corrupted, and be there
    still: the first read that sees it has it dropped.
    """
    cluster = bool(history.nodes)  # then a read may have asked another node
    return any(
        key in call.keys
        and put.begun <= call.ended
        and (cluster or not any(_reads_all_of(read, key, put.latest_s, call.begun) for read in history.calls))
        for key, put in history.corrupted_puts
    )


def _reads_all_of(read: Call, key: str, since_s: float, until_s: float) -> bool:
    """Whether a call has seen a key in this time, and would have had it dropped."""
    return (
        since_s < read.begun
        and read.ended < until_s
        and key in read.keys
        and read.is_whole
        and read.verified
        and (isinstance(read.error, ChecksumMismatch) or (read.end is End.RETURNED and bool(read.seen)))
    )
