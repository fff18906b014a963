"""Bugs that are planted to see that the simulation finds them: each is a small change
of one module of the product, of the kind that people make.
"""

from importlib.util import find_spec
from pathlib import Path

import attrs

__all__ = ["PLANTED", "Planted"]


@attrs.frozen
class Planted:
    """A bug: in one module, `new` instead of `old`; and `beside` it another, where one
    alone does no harm.
    """

    name: str
    module: str
    old: str
    """What is there; it is there once."""
    new: str
    beside: "Planted | None" = None
    needs: str = ""
    """What a world must have besides what follows from the module: "tenants"."""

    def sources(self) -> dict[str, str]:
        """Return the source of each module with the bug, by name; errors as of
        `source`.
        """
        return {self.module: self.source()} | ({} if self.beside is None else self.beside.sources())

    def source(self) -> str:
        """Return the source of the module with the bug.

        Raises:
            ValueError: the product has changed, and this bug has to change with it.
        """
        spec = find_spec(self.module)
        assert spec is not None and spec.origin is not None
        source = Path(spec.origin).read_text()
        if source.count(self.old) != 1:
            raise ValueError(f"{self.module} has {source.count(self.old)} places for the bug {self.name!r}, not one")
        return source.replace(self.old, self.new)


_INLINE = "infinistore.server.movers.inline"
_CALLS = "infinistore.client.connection.calls"
_REGISTRATION = "infinistore.cluster.etcd.registration"

PLANTED = [
    Planted(
        "commit before payload",
        _INLINE,
        "            if payload is None:\n                await self._receive(self._connection.read",
        "            self._core.commit(reservation, put.keys, None, replace=put.replace, free=False)\n"
        "            if payload is None:\n                await self._receive(self._connection.read",
    ),
    Planted(
        "an answer that is begun and forgotten",
        "infinistore.server.session.receiving",
        "        begun, self._begun = self._begun, None\n",
        "        begun, self._begun = (self._begun if isinstance(self._begun, KeptError) else None), None\n",
    ),
    Planted(
        "a put retried as idempotent",
        _CALLS,
        "not attempt.idempotent and (bound or not replaced):\n",
        "not attempt.idempotent and not request.moves_blocks and (bound or not replaced):\n",
    ),
    Planted(
        "a lease released before sending",
        _INLINE,
        "            await self._conversation.send_blocks(\n",
        "            self._core.release(lease)\n            await self._conversation.send_blocks(\n",
    ),
    Planted(
        "one delete in fifty lost",
        "infinistore.core.removals",
        "        deleted = self.remove(index, keys, entries)\n",
        "        deleted = len(entries) if self.deleted % 50 == 49 else self.remove(index, keys, entries)\n",
    ),
    Planted(
        "a lost wake-up",
        "infinistore.server.budgets",
        "            self.taken_bytes -= grant.body.length\n            self._grant()\n",
        "            self.taken_bytes -= grant.body.length\n",
    ),
    Planted(
        "a stale view served",
        "infinistore.core.store",
        "        entries = index.get_many(keys)\n        found, pinned = _present(keys, entries)\n",
        "        seen = self.__dict__.setdefault('seen', {})\n"
        "        entries = index.get_many(keys)\n"
        "        for i, key in enumerate(keys):\n"
        "            if seen.get(key, (0, None))[0] % 20 == 19:\n"
        "                entries[i] = seen[key][1] and entries[i] and seen[key][1]\n"
        "            seen[key] = (seen.get(key, (0, None))[0] + 1, entries[i])\n"
        "        found, pinned = _present(keys, entries)\n",
    ),
    Planted(
        "a replaced block freed while leased",
        "infinistore.core.pins",
        "            self.condemned.update(entry for entry in entries if entry in pinned)\n"
        "            entries = [entry for entry in entries if entry not in pinned]\n",
        "            pass\n",
    ),
    Planted(
        "an abort that leaks",
        "infinistore.core.store",
        '            self._close(reservation, "aborted")\n            self.pool.free(reservation.extents)\n',
        '            self._close(reservation, "aborted")\n            self.pool.free(reservation.extents[:1])\n',
    ),
    Planted(
        "a prefix match that counts past a gap",
        "infinistore.core.index",
        "        return list(takewhile(self._entries.__contains__, keys))\n",
        "        return list(filter(self._entries.__contains__, keys))\n",
    ),
    Planted(
        "a batch committed in two steps",
        "infinistore.client.operations.remote",
        "        if len(keys) > hello.max_batch_keys or total > hello.max_batch_bytes or not keys:\n"
        "            return await self._put_in_parts(batch, sizes, replace=True, on_device=on_device, ttl_us=ttl_us)\n",
        "        if len(keys) > 1:\n"
        "            await self.put(requests.Put(batch.where([True]), replace))\n"
        "            return await self.put(requests.Put(batch.where([False] + [True] * (len(keys) - 1)), replace))\n",
    ),
    Planted(
        "a checksum not verified",
        "infinistore.client.movers.inline",
        "        bad = checker.bad\n",
        "        bad = []\n",
    ),
    Planted(
        "a put again after its answer",
        _CALLS,
        "            else:\n                if breaker.failures:\n",
        "            else:\n"
        "                if type(request).__name__ == 'Put':\n"
        "                    await RemoteOperations.handlers[type(request)](operations, request)\n"
        "                if breaker.failures:\n",
    ),
    Planted(
        "a connection used again in the middle of a reply",
        "infinistore.client.connection.pool",
        "            self.protocol.state is State.READY\n            and self.operations is not None\n",
        "            self.operations is not None\n",
        beside=Planted(
            "the second look",
            _CALLS,
            "                found.protocol.state is State.READY  # else its pins were given back in the middle of"
            " something\n                and (channel.late",
            "                (channel.late",
        ),
    ),
    Planted(
        "a batch that is whole only without its last block",
        "infinistore.core.index",
        "        self._eviction.insert(keys, entries)\n",
        "        self._eviction.insert(keys[:9], entries[:9])\n",
    ),
    Planted(
        "durable before the disk has flushed",
        "infinistore.disk.batches",
        "            batch.state = _State.WRITTEN\n            self._flush(batch.segment)\n",
        "            batch.state = _State.DURABLE\n",
    ),
    Planted(
        "a tombstone lost",
        "infinistore.disk.deletions",
        "                self._bury(disk, {key: [] for key in lingering})\n",
        "                pass\n",
    ),
    Planted(
        "a delete that does not wait for its tombstone",
        "infinistore.disk.tiers",
        "        yield deletion.wait\n",
        "        yield None\n",
    ),
    Planted(
        "a record kept after its bytes were overwritten",
        "infinistore.disk.upkeep",
        "            log.records.remove(slots[here])\n",
        "",
        beside=Planted(
            "segments whose records do not end with them",
            "infinistore.disk.records",
            "        self._laps[segment] = (self._laps[segment] + np.uint64(1)) & _LAP_MASK\n",
            "",
        ),
    ),
    Planted(
        "a read from disk not verified",
        "infinistore.disk.promotion",
        "            if checksum == location.checksum:\n",
        "            if checksum:\n",
    ),
    Planted(
        "a replaced block found on disk",
        "infinistore.disk.tier",
        "            self._disks.forget(outdated)\n",
        "            pass\n",
    ),
    Planted(
        "a block that comes up after it was deleted",
        "infinistore.disk.promotion",
        "            if i in group.good and now_at is not None and now_at.has_same_block(place)\n",
        "            if i in group.good\n",
    ),
    Planted(
        "a view of a cluster believed for ever",
        "infinistore.client.cluster.nodes",
        "        if former is not None and view == former.view:\n",
        "        if former is not None and len(view.nodes) <= len(former.view.nodes):\n",
    ),
    Planted(
        "a batch merged in the wrong order",
        "infinistore.protocol.messages",
        "            for position, result in zip(positions, results, strict=True):\n",
        "            for position, result in zip(positions, list(results)[::-1], strict=True):\n",
    ),
    Planted(
        "a prefix match that counts past the hole of a node",
        "infinistore.client.cluster.reads",
        "            first_hole = min(first_hole, positions[matched])\n",
        "            first_hole -= len(positions) - matched\n",
    ),
    Planted(
        "a deletion sent to one copy only",
        "infinistore.client.cluster.writes",
        "        for index in places:\n            by_node",
        "        for index in places[:1]:\n            by_node",
    ),
    Planted(
        "a put that counts a lost node as done",
        "infinistore.client.cluster.writes",
        "    missed -= stored\n",
        "    missed = set()\n",
    ),
    Planted(
        "a lost node that answers for what it does not have",
        "infinistore.client.cluster.reads",
        "            call.counters.lost_reads += len(positions)\n            outcome =",
        "            outcome =",
    ),
    Planted(
        "a refusal of a tenant taken for the loss of a node",
        "infinistore.client.cluster.calls",
        "LOST: Final = (StoreUnavailable, DeadlineExceeded)\n",
        "from infinistore.errors import PermissionDenied\n\n"
        "LOST: Final = (StoreUnavailable, DeadlineExceeded, PermissionDenied)\n",
        needs="tenants",
    ),
    Planted(
        "a keep-alive without a time to live believed",
        _REGISTRATION,
        "                if not ttl_s:\n                    self._lose(",
        "                if ttl_s < 0:\n                    self._lose(",
    ),
    Planted(
        "a lease that cannot be renewed, and nobody is told",
        _REGISTRATION,
        '                # again.\n                self._tell(f"etcd: {error}")\n',
        "                # again.\n                pass\n",
    ),
    Planted(
        "a lease renewed when it has run out",
        _REGISTRATION,
        "            pause_s = max(left_s / 2, ",
        "            pause_s = max(left_s * 2, ",
    ),
    Planted(
        "a watch believed that is canceled",
        "infinistore.cluster.etcd.gateway",
        '        canceled=bool(result.get("canceled")) or _integer(result, "compact_revision") > 0,\n',
        "        canceled=False,\n",
    ),
    Planted(
        "an etcd that lists no nodes believed at once",
        "infinistore.cluster.etcd.follower",
        "        nodes = self._departures.nodes\n",
        "        nodes = listing.nodes\n",
    ),
    Planted(
        "a key that is found after its time, until the next put by shared memory",
        "infinistore.core.store",
        "        if self._ends:\n            self._expire(self.__index)\n",
        "        if self._ends and self._prepared:\n            self._expire(self.__index)\n",
    ),
    Planted(
        "a time to live that a later put keeps",
        "infinistore.core.retention",
        "            self.removed(keys)\n            for position, end in protected:\n",
        "            self._unpin(keys)\n            for position, end in protected:\n",
    ),
    Planted(
        "a pin that ends when its key is put again",
        "infinistore.core.retention",
        "                    self._pin({keys[position]: entry}, footprint_bytes)\n",
        "                    pass\n",
    ),
    Planted(
        "a pin without an end that one with an end cuts short",
        "infinistore.core.retention",
        "if key in fresh or until.get(key, inf) < end",
        "if key in fresh or until.get(key, 0.0) < end",
    ),
    Planted(
        "a victim below what is reserved for it",
        "infinistore.core.tenants",
        "        self.tenant_limits = self.space.tenant_limits = tenant_limits\n",
        "        self.tenant_limits = tenant_limits\n"
        "        self.space.tenant_limits = attrs.evolve(tenant_limits, reserved_bytes=0)\n",
    ),
    Planted(
        "a session that keeps a role that was taken away",
        "infinistore.server.session.session",
        "            quick = {kind: answer for kind, answer in quick.items() if kind not in refused}\n"
        "        self._handlers, self._answers, self._at_once.handlers = handlers, answers, quick\n",
        "            quick = {kind: answer for kind, answer in quick.items() if kind not in refused}\n"
        "        if not self.traffic.requests:\n"
        "            self._handlers, self._answers, self._at_once.handlers = handlers, answers, quick\n",
    ),
    Planted(
        "space that a tenant gives back and that stays counted",
        "infinistore.core.sharing",
        "        self.used_bytes -= before - self._whole.used_bytes\n",
        "        self.used_bytes -= (before - self._whole.used_bytes) if len(extents) < 3 else 0\n",
    ),
    Planted(
        "a key of another tenant",
        "infinistore.core.tenants",
        "        store = self._stores.get(tenant)\n        if store is None:\n",
        "        store = next((self._stores[one] for one in self._stores if one.endswith(tenant[-1:])), None)\n"
        "        store = store or self._stores.get('tenant-1' if len(self._limits) > 2 else tenant)\n"
        "        if store is None:\n",
    ),
]
