"""Calls that are sent in several parts, and those about how long keys stay."""

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from infinistore.client import requests
from infinistore.client.movers.channel import Channel, expect
from infinistore.client.requests import Followed, RemovedKeys
from infinistore.client.requests import Removed as RemovedRequest
from infinistore.errors import DiskFailed, ProtocolError, ServerReplaced, StoreUnavailable, VersionMismatch
from infinistore.kept_errors import KeptError
from infinistore.protocol.messages import (
    MISSING,
    CountReply,
    Keys,
    Mark,
    Numbers,
    Pin,
    PinReply,
    Removed,
    RemovedReply,
    TimesLeft,
    TimesLeftReply,
)
from infinistore.protocol.versions import Capability

__all__ = ["all_deleted", "check_ttl", "cuts", "mark", "not_all_over", "pin", "removed", "times_left"]


@contextmanager
def not_all_over(done: int) -> Iterator[None]:
    """Around one part: let nobody begin the call again if parts of it are `done`."""
    try:
        yield
    except ServerReplaced as error:
        if not done:
            raise
        raise StoreUnavailable(f"{error}; earlier parts of the batch are") from error


async def all_deleted(parts: Iterable[Keys], delete: Callable[[Keys], Awaitable[int]]) -> int:
    """Delete part after part; return how many keys were there.

    Raises:
        DiskFailed: a disk may bring some back. All parts are over.
    """
    deleted, failed = 0, list[KeptError]()
    for number, part in enumerate(parts):
        with not_all_over(number):
            try:
                deleted += await delete(part)
            except DiskFailed as error:
                failed.append(KeptError(error))
    if failed:
        raise failed[0].again()
    return deleted


def cuts(sizes: Sequence[int], most_keys: int, most_bytes: int) -> list[tuple[int, int]]:
    """Cut a batch into parts within the limits; a single block may be longer than
    `most_bytes`.
    """
    cuts: list[tuple[int, int]] = []
    first = 0
    part_bytes = 0
    for index, size in enumerate(sizes):
        if index > first and (index - first == most_keys or part_bytes + size > most_bytes):
            cuts.append((first, index))
            first, part_bytes = index, 0
        part_bytes += size
    if sizes:
        cuts.append((first, len(sizes)))
    return cuts


def check_ttl(channel: Channel, ttl_us: int) -> None:
    """Raise VersionMismatch if blocks shall end and the server cannot end them."""
    if ttl_us and Capability.RETENTION not in channel.connection.peer.capabilities:
        raise VersionMismatch(
            "the server's release knows no time to live; put without ttl_s, or install this release there, too"
        )


async def pin(channel: Channel, request: requests.Pin) -> list[bool]:
    """Pin keys, or unpin them."""
    if request.ttl_us and Capability.TIMED_PINS not in channel.connection.peer.capabilities:
        raise VersionMismatch(
            "the server's release does not end pins; pin without ttl_s, or install this release there, too"
        )

    async def ask(part: Keys) -> bytes:
        return expect(PinReply, await channel.ask(Pin(part, request.pinned, request.ttl_us))).pinned

    return list(map(bool, await _of_each(channel, request.keys, ask)))


async def removed(channel: Channel, request: RemovedRequest) -> Followed:
    """Ask which keys were removed."""
    if Capability.REMOVALS not in channel.connection.peer.capabilities:
        raise VersionMismatch(
            "the server's release does not tell what it removes; ask with exists_many, or install this release there,"
            " too"
        )
    log, number = request.places.get("", (0, 0))
    reply = expect(RemovedReply, await channel.ask(Removed(log, number, wait_us=int(request.wait_s * 1e6))))
    missed = None if reply.missed == MISSING else reply.missed
    return Followed({"": (reply.log, reply.number)}, RemovedKeys(reply.keys, missed))


async def mark(channel: Channel, request: requests.Mark) -> int:
    """Ask for a mark. A server without COPIES makes none."""
    if Capability.COPIES not in channel.connection.peer.capabilities:
        return 0
    return expect(CountReply, await channel.ask(Mark(request.ends_earlier))).count


async def times_left(channel: Channel, request: requests.TimesLeft) -> list[int | None]:
    """Ask when keys end. A server without RETENTION ends none."""
    if Capability.RETENTION not in channel.connection.peer.capabilities:
        return [0] * len(request.keys)

    async def ask(part: Keys) -> Numbers:
        return expect(TimesLeftReply, await channel.ask(TimesLeft(part))).times

    return [None if time == MISSING else time for time in await _of_each(channel, request.keys, ask)]


async def _of_each(
    channel: Channel, keys: Sequence[str], ask: Callable[[Keys], Coroutine[Any, Any, Sequence[int]]]
) -> list[int]:
    """Ask for as many keys at once as a request may name; return a number for each."""
    found: list[int] = []
    while len(found) < len(keys):
        part = channel.key_part(keys, len(found))
        numbers = await ask(part)
        if len(numbers) != len(part):
            raise ProtocolError(f"the server answered for {len(numbers)} of {len(part)} keys")
        found += numbers
    return found
