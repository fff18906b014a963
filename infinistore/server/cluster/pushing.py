"""Passes the hottest blocks of a node that drains on to the nodes that own them now.

Groups, that is keys with one hash tag, go as wholes, the group with the hottest block
first, and the blocks of a group in the order of their use: the head of a prefix before
its tail. One batch is under way at a time, so that requests hardly notice. What the new
owner has stays as it is, and a key that is deleted meanwhile stays deleted: a batch is
put with marks that are older than its blocks (`infinistore/core/deletions.py`).

Cancelled, it lets go of everything at once.
"""

import logging
from collections.abc import AsyncGenerator, Callable, Collection, Container, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Unpack

import attrs
import trio
from xxhash import xxh3_64_intdigest

from infinistore.client import StoreOptions, open_store
from infinistore.client.api.arguments import ttl_in_us
from infinistore.client.drivers.trio_cluster import ClusterTrioStore
from infinistore.client.extension import Environment as ClientEnvironment
from infinistore.client.requests import Batch, Copy, Marks
from infinistore.cluster.documents import Drain
from infinistore.cluster.placement import hash_tag
from infinistore.core.clients import Client, Lease
from infinistore.core.entry import NO_CHECKSUM, length_of
from infinistore.core.store import StoreCore
from infinistore.errors import InfiniStoreException, PartialPut

__all__ = ["OtherNodes", "PushLimits", "open_nodes", "push"]

_log = logging.getLogger("infinistore.cluster")
_SLICE_KEYS: Final = 4096
_BATCH_KEYS: Final = 256
_BATCH_BYTES: Final = 4 * 1024 * 1024


@attrs.frozen
class PushLimits:
    """How much is passed on, in all and in a second."""

    most_bytes: int
    bytes_per_s: int
    settle_s: float = 1.0
    """How long clients that have not heard of the drain may still write here, before
    this node looks again what it has."""


class OtherNodes:
    """Where blocks are passed on to: all nodes that this `store` knows."""

    def __init__(self, store: ClusterTrioStore) -> None:
        self._store = store

    async def marks(self) -> Mapping[str, int]:
        """Return the marks of the nodes that answer."""
        return await self._store.drive(self._store.calls.call(Marks()))

    async def copy(
        self, blocks: Mapping[str, memoryview], marks: Mapping[str, int], ttl_s: float | None
    ) -> Collection[str]:
        """Put blocks that were read after the nodes had made these marks; return the
        keys that were there, or were deleted since.

        Raises:
            PartialPut: some were not stored.
            InfiniStoreException: none was.
        """
        batch = Batch(list(blocks), list(blocks.values()))
        return await self._store.drive(self._store.calls.call(Copy(batch, marks, ttl_in_us(ttl_s))))


@asynccontextmanager
async def open_nodes(
    url: str | None, environment: ClientEnvironment, **options: Unpack[StoreOptions]
) -> AsyncGenerator[OtherNodes, None]:
    """Open a store of a cluster, to pass blocks on to its nodes."""
    async with open_store(url, environment=environment, **options) as store:
        assert isinstance(store, ClusterTrioStore)
        yield OtherNodes(store)


@attrs.define(eq=False)
class _Group:
    keys: list[tuple[str, int]] = attrs.field(factory=list)
    """Its keys, with the lengths of their blocks."""
    size_bytes: int = 0
    left: int = 0
    """How many of its keys have not been tried yet."""
    moved: bool = False
    failed: bool = False


async def push(
    core: StoreCore,
    open_others: Callable[[], AbstractAsyncContextManager[OtherNodes]],
    limits: PushLimits,
    on_progress: Callable[[Drain], None],
) -> None:
    """Pass blocks on to the other nodes, until there are none that came
    meanwhile. What could not be moved is counted, and logged at the end.
    """
    drain = Drain()
    problem = ""
    client = core.open_client("drain", counted=False)
    try:
        async with open_others() as others:
            tried: set[str] = set()
            due = began = trio.current_time()
            while groups := await _hottest(core, limits.most_bytes - drain.moved_bytes, tried):
                size_bytes = drain.size_bytes + sum(group.size_bytes for group in groups)
                drain = attrs.evolve(drain, groups=drain.groups + len(groups), size_bytes=size_bytes)
                on_progress(drain)
                keys = [_Key(group, key, length) for group in groups for key, length in group.keys]
                tried.update(one.key for one in keys)
                done = 0
                while done < len(keys):
                    batch = await _put_next(core, client, others, keys[done : done + _BATCH_KEYS])
                    done += len(batch.keys)
                    problem = batch.problem or problem
                    drain = attrs.evolve(_counted(drain, batch), elapsed_s=int(trio.current_time() - began))
                    on_progress(drain)
                    # What a slow node has not taken is not made up for.
                    due = max(due, trio.current_time() - 1.0) + sum(batch.moved.values()) / limits.bytes_per_s
                    await trio.sleep_until(due)
                await trio.sleep(limits.settle_s)
    except InfiniStoreException as error:  # of the store as a whole, when it is opened
        problem = str(error)
    finally:
        core.close_client(client)
    if problem:
        _log.warning("blocks were not passed on", extra={"groups": drain.failed_groups, "problem": problem})


async def _hottest(core: StoreCore, most_bytes: int, without: Container[str]) -> list[_Group]:
    """Return the hottest groups in memory, as many as have `most_bytes` together: the
    hottest group first, and in each its hottest key.
    """
    groups: dict[str, _Group] = {}
    keys = core.all_keys()
    keys.reverse()
    for first in range(0, len(keys), _SLICE_KEYS):
        part = keys[first : first + _SLICE_KEYS]
        for key, entry in zip(part, core.index.get_many(part), strict=True):
            if entry is not None and key not in without:
                tag = hash_tag(key)
                group = groups.get(tag)
                if group is None:
                    group = groups[tag] = _Group()
                length = length_of(entry)
                group.keys.append((key, length))
                group.left += 1
                group.size_bytes += length
        await trio.lowlevel.checkpoint()
    left_bytes = most_bytes
    chosen = []
    for group in groups.values():
        if group.size_bytes <= left_bytes:
            left_bytes -= group.size_bytes
            chosen.append(group)
    return chosen


@attrs.frozen
class _Key:
    """One block to be moved."""

    group: _Group
    key: str
    length_bytes: int


@attrs.frozen
class _Batch:
    """What became of some keys: the lengths of the blocks that were moved, and those
    that could not be. The others were there, or are gone.
    """

    keys: Sequence[_Key]
    moved: Mapping[str, int] = {}
    failed: Collection[str] = ()
    problem: str = ""


async def _put_next(core: StoreCore, client: Client, others: OtherNodes, keys: Sequence[_Key]) -> _Batch:
    """Put the first of these keys, as many as go at once."""
    marks = await others.marks()
    keys = keys[: core.limits.max_batch_keys]
    lease = core.lease(client, [one.key for one in keys], max_bytes=_BATCH_BYTES, touch=False)
    try:
        keys = keys[: len(lease.entries)]
        items = _sound(core, [one.key for one in keys], lease)
        if not items:
            await trio.lowlevel.checkpoint()
            return _Batch(keys)
        problem = ""
        moved: dict[str, int] = {}
        failed: set[str] = set()
        for ttl_s, part in _by_time_left(core, items):
            there: Collection[str] = ()
            try:
                there = await others.copy(part, marks, ttl_s)
            except PartialPut as error:
                failed.update(error.failed, error.unknown)
                problem = str(error)
            except InfiniStoreException as error:
                failed.update(part)
                problem = str(error)
            skipped = failed.union(there)
            moved |= {key: len(view) for key, view in part.items() if key not in skipped}
        return _Batch(keys, moved, failed, problem)
    finally:
        core.release(lease)


def _by_time_left(core: StoreCore, items: Mapping[str, memoryview]) -> list[tuple[float | None, dict[str, memoryview]]]:
    """Return blocks by how many seconds they have left, None: they do not end. Those
    that are gone are left out.
    """
    parts: dict[float | None, dict[str, memoryview]] = {}
    for (key, view), left_s in zip(items.items(), core.retention.times_left(list(items)), strict=True):
        if left_s != 0:
            parts.setdefault(left_s, {})[key] = view
    return list(parts.items())


def _sound(core: StoreCore, keys: Sequence[str], lease: Lease) -> dict[str, memoryview]:
    """Return the blocks of a lease. One that is damaged must not get a checksum that
    fits: it is dropped.
    """
    found: dict[str, memoryview] = {}
    for key, view, checksum in zip(keys, lease.views, lease.checksums, strict=True):
        if view is None:
            continue
        if checksum in (NO_CHECKSUM, xxh3_64_intdigest(view)):
            found[key] = view
        else:
            core.verify(key)
    return found


def _counted(drain: Drain, batch: _Batch) -> Drain:
    """Count a batch, and the groups that it ends."""
    ended: list[_Group] = []
    for one in batch.keys:
        group = one.group
        group.left -= 1
        group.moved |= one.key in batch.moved
        group.failed |= one.key in batch.failed
        if not group.left:
            ended.append(group)
    return attrs.evolve(
        drain,
        moved_groups=drain.moved_groups + sum(group.moved and not group.failed for group in ended),
        skipped_groups=drain.skipped_groups + sum(not group.moved and not group.failed for group in ended),
        failed_groups=drain.failed_groups + sum(group.failed for group in ended),
        moved_blocks=drain.moved_blocks + len(batch.moved),
        moved_bytes=drain.moved_bytes + sum(batch.moved.values()),
        done_bytes=drain.done_bytes + sum(one.length_bytes for one in batch.keys),
    )
