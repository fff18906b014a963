"""What clients do: all calls of a store, on few keys, with values that tell their key
and version.
"""

import math
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from itertools import repeat
from typing import Any

import attrs
import trio

from infinistore.client.api.store import AsyncStore
from infinistore.client.drivers.trio_driver import ClusterTrioStore
from infinistore.errors import (
    AuthenticationFailed,
    BufferTooSmall,
    ChecksumMismatch,
    DeadlineExceeded,
    DiskFailed,
    InfiniStoreException,
    KeyNotFound,
    LimitExceeded,
    OutOfMemory,
    PermissionDenied,
    ProtocolError,
    StoreUnavailable,
)
from tests.simulation.history import Call, End, History, Hold
from tests.simulation.nodes import ServerSettings
from tests.simulation.processes import Killed
from tests.simulation.world import World

__all__ = ["DISK_METHODS", "METHODS", "RETENTION_METHODS", "Workload", "WorkloadSettings", "end_of", "make_value"]

METHODS = {
    "put": 8,
    "put_many": 6,
    "put_missing": 3,
    "reserve": 3,
    "get": 8,
    "get_many": 6,
    "get_into": 3,
    "get_many_into": 3,
    "lease": 3,
    "exists": 2,
    "exists_many": 2,
    "match_prefix": 4,
    "release_hold": 2,
    "read_what_is_held": 2,
    "delete": 5,
    "list_keys": 1,
    "evict": 0.5,
    "purge": 0.3,
    "stats": 1,
}
"""How often each kind of call is made, relative to the others."""
DISK_METHODS = {"flush": 3, "prefetch": 2}
"""The same of those that make sense only where a server has disks."""
RETENTION_METHODS = {"pin": 3, "unpin": 2, "put_over_what_is_pinned": 3}
"""The same of those that keep keys from being evicted."""

_WRITING = {"put", "put_many", "put_missing", "reserve", "read_what_is_held", "delete", "evict", "purge"}
_WRITING |= RETENTION_METHODS.keys()
_OUTCOME_UNKNOWN = "it is not known whether"
_NO_ANSWER = "no answer from"
_NOT_DURABLE = "a disk did not make it durable"
_CIRCUIT_IS_OPEN = re.compile(r"not tried again for another ([\d.]+) s")
_LARGEST_S = 5.0


@attrs.frozen
class WorkloadSettings:
    """How much is called, and on what. Sizes in bytes."""

    operations: int = 100
    """Calls of each task of a client."""
    tasks: int = 1
    """Tasks of each client that call at the same time."""
    keys: int = 4
    value_bytes: tuple[int, ...] = (40, 1000, 3000, 12_000)
    methods: tuple[str, ...] = tuple(METHODS)
    most_pause_s: float = 0.005
    cancel_chance: float = 0.0
    """That a call is cancelled after a while."""
    most_hold_s: float = 1.0
    most_lease_s: float = 2.0
    """How long a lease is kept at most."""
    answers_may_be_short: bool = False
    """Whether a server may answer a read in several parts although it is not long."""
    ttl_chance: float = 0.0
    """That a put says after what time its keys end."""
    most_ttl_s: float = 1.0
    """The longest of these times."""
    groups: int = 0
    """How many hash tags the keys have; 0 for keys without."""

    def key(self, number: int) -> str:
        """Return a key."""
        return f"key-{number}" if not self.groups else f"key-{{{number % self.groups}}}-{number}"

    def reading_only(self) -> "WorkloadSettings":
        """Return the same without calls that write."""
        methods = tuple(method for method in self.methods if method not in _WRITING)
        return attrs.evolve(self, methods=methods or ("get",))


def make_value(key: str, client: str, number: int, length: int) -> bytes:
    """Return a value that tells its key and who put it: no two calls have the same."""
    label = f"{key}/{client}/{number}/{length};".encode()
    return (label * (length // len(label) + 1))[: max(length, len(label))]


def end_of(error: BaseException, *, parts: bool) -> End:
    """Tell what an error says about a call, by the table in docs/promises.md. `parts`
    says that its batch was sent in several.
    """
    if isinstance(error, AuthenticationFailed):  # a session may end in the middle of a request
        return End.UNKNOWN
    if isinstance(error, StoreUnavailable):
        return End.UNKNOWN if _OUTCOME_UNKNOWN in str(error) else End.REFUSED
    if isinstance(error, DeadlineExceeded):
        if _NO_ANSWER in str(error) or _NOT_DURABLE in str(error):
            return End.UNKNOWN
    elif not isinstance(error, OutOfMemory | LimitExceeded | PermissionDenied):
        return End.UNKNOWN if isinstance(error, ProtocolError | DiskFailed) else End.REFUSED
    return End.PARTLY if parts else End.REFUSED


class Workload:
    """One client at work, for as long as its store is open."""

    def __init__(
        self,
        world: World,
        history: History,
        *,
        client: str,
        label: str,
        store: AsyncStore,
        settings: WorkloadSettings,
        server: ServerSettings,
    ) -> None:
        self.world = world
        self.history = history
        self.client = client
        self.label = label
        """What its values are known by: it is that of no other workload."""
        self.store = store
        self.settings = settings
        self._server = server
        self._random = world.generator(label)
        self._keys = [settings.key(number) for number in range(settings.keys)]
        weights = METHODS | DISK_METHODS | RETENTION_METHODS
        self._weights = [weights[method] for method in settings.methods]
        self._holds: list[tuple[Hold, str]] = []
        self._calls = 0

    async def run(self) -> None:
        """Make all calls, one after the other."""
        for _ in range(self.settings.operations):
            await trio.sleep(self.settings.most_pause_s * self._random.random())
            (method,) = self._random.choices(self.settings.methods, self._weights)
            await self._wait_out_the_circuit_breaker(await getattr(self, f"_{method}")())

    async def succeeds(self) -> bool:
        """Put a short block and read it until both have succeeded; then read all."""
        await self.unpin_all()
        key = self._key()
        for pause_s in repeat(0.5):
            put = await self._put_value(key, min(self.settings.value_bytes))
            if put.end is End.RETURNED and (await self._read([key])).end is End.RETURNED:
                break
            await trio.sleep(pause_s)
        await self._read(self._keys)
        return True

    async def put_until_done(self, key: str) -> bytes:
        """Put a short block until that has succeeded; return its value."""
        while True:
            put = await self._put_value(key, min(self.settings.value_bytes))
            if put.end is End.RETURNED:
                return put.puts[key]
            await trio.sleep(0.5)

    async def delete_until_done(self, key: str) -> None:
        """Delete a key until that has succeeded."""
        for pause_s in repeat(0.5):
            done = await self._call("delete", [key], lambda _: self.store.delete([key]), removes=[key])
            if done.error is None:
                return
            await trio.sleep(pause_s)

    async def look_at_all(self) -> list[tuple[str, bytes | None]]:
        """Read all keys, when nothing goes wrong; check that `match_prefix` agrees.
        Blocks that a cable spoiled before may still be there: each read drops some.
        """
        read = await self._read(self._keys)
        while isinstance(read.error, ChecksumMismatch):
            read = await self._read(self._keys)
        match = await self._match(self._keys, 0.0)
        if read.error is not None or match.error is not None or read.lost or match.lost:
            self.world.violation(f"{self.client}: a read does not find all nodes, long after all faults were over")
        there = [value is not None for _, value in read.seen]
        if sum(found for _, found in match.present) != [*there, False].index(False):
            self.world.violation(f"{self.client}: {match.present} are matched, and {there} are there")
        return read.seen

    async def flush_all(self) -> Call:
        """Make all that is there durable."""
        return await self._flush_keys(self._keys)

    async def delete_perhaps(self) -> None:
        """Delete something, or not."""
        if self._random.random() < 0.5:
            await self._delete()

    async def read_each(self) -> None:
        """Read every key for itself, again and again until that has succeeded."""
        for key in self._keys:
            for pause_s in repeat(1.0):
                if (await self._read([key])).end is End.RETURNED:
                    break
                await trio.sleep(pause_s)

    async def _wait_out_the_circuit_breaker(self, call: Call) -> None:
        """Else most calls would be refused by it."""
        found = _CIRCUIT_IS_OPEN.search(str(call.error)) if isinstance(call.error, StoreUnavailable) else None
        if found is not None:
            await trio.sleep(float(found[1]) + 0.05)

    # Writing

    async def _put(self) -> Call:
        return await self._put_value(self._key())

    async def _put_value(self, key: str, length: int | None = None) -> Call:
        value = self._value(key, length)
        ttl_s = self._ttl_s() if length is None else None
        return await self._call(
            "put",
            [key],
            lambda _: self.store.put(key, value, ttl_s=ttl_s),
            puts={key: value},
            lasts_s=self._lasts_s(ttl_s),
        )

    async def _put_many(self) -> Call:
        items, ttl_s = self._items(), self._ttl_s()
        return await self._call(
            "put_many",
            items,
            lambda _: self.store.put_many(items, ttl_s=ttl_s),
            puts=items,
            lasts_s=self._lasts_s(ttl_s),
        )

    async def _put_missing(self) -> Call:
        items, ttl_s = self._items(), self._ttl_s()

        async def put(call: Call) -> None:
            call.skipped = await self.store.put_many(items, replace=False, ttl_s=ttl_s)
            call.present += [(key, key in call.skipped) for key in items]

        return await self._call("put_many", items, put, puts=items, may_skip=True, lasts_s=self._lasts_s(ttl_s))

    async def _reserve(self) -> Call:
        items = self._items()
        gives_up = self._random.random() < 0.2
        pause_s, ttl_s = self._pause_s(), self._ttl_s()
        sizes = {key: len(value) for key, value in items.items()}

        async def reserve(call: Call) -> None:
            async with self.store.reserve(sizes, ttl_s=ttl_s) as views:
                for view, value in zip(views, items.values(), strict=True):
                    view[:] = value
                    await trio.sleep(pause_s)
                if gives_up:
                    raise _GivenUp

        return await self._call("reserve", items, reserve, puts=items, whole=True, lasts_s=self._lasts_s(ttl_s))

    async def _delete(self) -> Call:
        keys = self._some_keys()

        async def delete(call: Call) -> None:
            count = await self.store.delete(keys)
            if count in (0, len(keys)):
                call.present += [(key, count > 0) for key in keys]

        return await self._call("delete", keys, delete, removes=keys)

    async def _purge(self) -> Call:
        return await self._call("purge", [], lambda _: self.store.purge(), removes=self._keys)

    async def _evict(self) -> Call:
        low, high = sorted([self._random.random(), self._random.random()])
        return await self._call("evict", [], lambda _: self.store.evict(low, high))

    async def _flush(self) -> Call:
        return await self._flush_keys(self._some_keys())

    async def _flush_keys(self, keys: list[str]) -> Call:
        async def flush(call: Call) -> None:
            if await self.store.flush(keys) == len(keys):
                call.durable = keys

        return await self._call("flush", keys, flush)

    # Keeping

    async def _pin(self) -> Call:
        return await self._pin_keys(self._some_keys())

    async def _pin_keys(self, keys: list[str]) -> Call:
        ttl_s = self._ttl_s()

        async def pin(call: Call) -> None:
            if await self.store.pin(keys, ttl_s=ttl_s) == len(keys):  # else nobody knows which of them
                # What is pinned is in the pool, so it is never over such a bound.
                pins = self._server.max_protected_ratio == 1.0
                until_s = call.begun + self._lasts_s(ttl_s)
                self.history.holds.append(Hold(call, keys, self.world.clock.now, until_s, pins=pins))

        return await self._call("pin", keys, pin)

    async def _unpin(self) -> Call:
        keys = self._some_keys()
        return await self._call("unpin", keys, lambda _: self.store.unpin(keys), unpins=keys)

    async def _put_over_what_is_pinned(self) -> Call:
        """Put a key again that was pinned, perhaps twice, and fill the pool with
        others.
        """
        kept = self._key()
        await self._put_value(kept)
        for _ in range(self._random.choice([1, 2])):
            await self._pin_keys([kept])
        await self._put_value(kept)
        for key in self._keys:
            if key != kept:
                await self._put_value(key)
        return await self._read([kept])

    async def unpin_all(self) -> None:
        """Unpin everything, until that has succeeded, if anything is ever pinned."""
        if "unpin" not in self.settings.methods:
            return
        for pause_s in repeat(0.5):
            keys = self._keys
            if (await self._call("unpin", keys, lambda _: self.store.unpin(self._keys), unpins=keys)).error is None:
                return
            await trio.sleep(pause_s)

    # Reading

    async def _prefetch(self) -> Call:
        keys = self._some_keys()
        return await self._call("prefetch", keys, lambda _: self.store.prefetch(keys))

    async def _get(self) -> Call:
        key = self._key()

        async def get(call: Call) -> None:
            try:
                value = bytes(await self.store.get(key))
            except KeyNotFound:
                call.seen.append((key, None))
            else:
                call.seen.append((key, value))

        return await self._call("get", [key], get)

    async def _get_many(self) -> Call:
        return await self._read(self._some_keys())

    async def _read(self, keys: list[str]) -> Call:
        async def get(call: Call) -> None:
            for key, value in zip(keys, await self.store.get_many(keys), strict=True):
                call.seen.append((key, None if value is None else bytes(value)))

        return await self._call("get_many", keys, get)

    async def _get_into(self) -> Call:
        key = self._key()
        buffer = bytearray(self._random.choice(self.settings.value_bytes) + 64)
        registers = self._random.random() < 0.2

        async def get(call: Call) -> None:
            try:
                with await self.store.register(buffer) if registers else nullcontext():
                    length = await self.store.get_into(key, buffer)
            except KeyNotFound:
                call.seen.append((key, None))
            except BufferTooSmall:
                if any(buffer) and len(call.connections) == 1:
                    self.world.violation(f"{self.client}: a buffer that was too small was written to")
                call.present.append((key, True))
                raise
            else:
                call.seen.append((key, bytes(buffer[:length])))
                if any(buffer[length:]) and len(call.connections) == 1:  # else a first attempt may have
                    self.world.violation(f"{self.client}: a buffer was written to behind its {length} bytes")

        return await self._call("get_into", [key], get)

    async def _get_many_into(self) -> Call:
        keys = self._some_keys()
        buffers = {key: bytearray(max(self.settings.value_bytes) + 64) for key in keys}
        all_or_nothing = self._random.random() < 0.4

        async def get(call: Call) -> None:
            lengths = await self.store.get_many_into(buffers, all_or_nothing)
            for key, length in zip(keys, lengths, strict=True):
                call.seen.append((key, None if length is None else bytes(buffers[key][:length])))

        return await self._call("get_many_into", keys, get)

    async def _lease(self) -> Call:
        keys = self._some_keys()
        verify = self._random.random() < 0.3
        lease = self.store.lease(keys, verify=verify)
        found: list[memoryview | None] = []

        async def enter(call: Call) -> None:
            found.extend(await lease.__aenter__())
            call.verified = verify if self.store.mapped_arenas() else self.store.verifies
            for key, view in zip(keys, found, strict=True):
                call.seen.append((key, None if view is None else bytes(view)))

        call = await self._call("lease", keys, enter)
        if call.end is End.RETURNED:
            try:
                for _ in range(self._random.randrange(3)):
                    await trio.sleep(min(self._pause_s(), self.settings.most_lease_s * self._random.random()))
                    for (key, value), view in zip(call.seen, found, strict=True):
                        if view is not None and bytes(view) != value:
                            self.world.violation(f"{self.client}: {key} changed while it was leased")
            finally:
                await lease.__aexit__(None, None, None)
        return call

    # Looking

    async def _exists(self) -> Call:
        key = self._key()

        async def exists(call: Call) -> None:
            call.present.append((key, await self.store.exists(key)))

        return await self._call("exists", [key], exists)

    async def _exists_many(self) -> Call:
        keys = self._some_keys()

        async def exists(call: Call) -> None:
            call.present += zip(keys, await self.store.exists_many(keys), strict=True)

        return await self._call("exists_many", keys, exists)

    async def _match_prefix(self) -> Call:
        return await self._match(self._some_keys(), self._random.choice([0.0, 0.0, 0.05, self.settings.most_hold_s]))

    async def _read_what_is_held(self) -> Call:
        """Fill the pool with other blocks while some are held, and read these."""
        keys, others = self._keys[: len(self._keys) // 2 + 1], self._keys[len(self._keys) // 2 + 1 :]
        hold_s = self.settings.most_hold_s
        await self._match(keys, hold_s)
        await trio.sleep(hold_s * self._random.choice([0.0, 0.9 * self._random.random()]))
        for key in others:
            await self._put_value(key)
        return await self._read(keys)

    async def _match(self, keys: list[str], hold_s: float) -> Call:

        async def match(call: Call) -> None:
            matched = await self.store.match_prefix(keys, hold_s)
            call.present += [(key, True) for key in keys[:matched]]
            call.present += [(key, False) for key in keys[matched : matched + 1]]
            if matched.hold:
                until_s = call.begun + hold_s / self._server.clock_rate
                hold = Hold(call, keys[:matched], self.world.clock.now, until_s)
                self.history.holds.append(hold)
                self._holds.append((hold, matched.hold))

        return await self._call("match_prefix", keys, match)

    async def _release_hold(self) -> Call:
        if not self._holds:
            return await self._match_prefix()
        hold, token = self._holds.pop(self._random.randrange(len(self._holds)))
        hold.until_s = min(hold.until_s, self.world.clock.now)
        return await self._call("release_hold", [], lambda _: self.store.release_hold(token))

    async def _list_keys(self) -> Call:
        async def list_keys(call: Call) -> None:
            found = await self.store.keys("key-", 100)
            call.present += [(key, key in found) for key in self._keys]
            if found != sorted(set(found) & set(self._keys)):
                self.world.violation(f"{self.client}: the keys {found} are listed")

        return await self._call("keys", [], list_keys)

    async def _stats(self) -> Call:
        async def stats(call: Call) -> None:
            store = (await self.store.stats()).store
            if not self.history.nodes and store.keys > len(self._keys):
                self.world.violation(f"{self.client}: it has {store.keys} keys, and there are {len(self._keys)}")
            pinned_bytes = store.reserved_bytes + store.pinned_bytes
            inner_bytes = max(store.held_bytes, store.condemned_bytes)
            # A tenant whose limits were lowered has more until it needs space again.
            most_bytes = math.inf if self.client in self.history.tenant_of else store.capacity_bytes
            if not (inner_bytes <= store.pinned_bytes <= pinned_bytes <= store.used_bytes <= most_bytes):
                self.world.violation(f"{self.client}: the statistics contradict themselves: {store}")

        return await self._call("stats", [], stats)

    # Calls

    async def _call(
        self,
        method: str,
        keys: Sequence[str] | dict[str, bytes],
        make: Callable[[Call], Awaitable[Any]],
        *,
        whole: bool = False,
        **facts: Any,
    ) -> Call:
        clock = self.world.clock
        facts["verified"] = self.store.verifies
        facts["is_whole"] = whole or self._is_whole(list(keys), facts.get("puts", {}))
        call = self.history.begin(self.client, method, list(keys), clock.now, **facts)
        if self._random.random() < self.settings.cancel_chance:
            call.scope.deadline = clock.now + _LARGEST_S * self._random.random() ** 6
        task = trio.lowlevel.current_task()
        self.world.calls[task] = call
        lost_reads = self._lost_reads
        try:
            with call.scope:
                await make(call)
                call.end = End.RETURNED
                read_bytes = sum(len(value) for _, value in call.seen if value is not None)
                call.is_whole &= read_bytes <= self._server.max_batch_bytes
                call.is_whole &= not (call.seen and self.settings.answers_may_be_short)
            if call.scope.cancelled_caught:
                call.end = End.UNKNOWN
        except _GivenUp:
            call.end = End.REFUSED
        except InfiniStoreException as error:
            call.error = error
            call.end = end_of(error, parts=not call.is_whole)
            if isinstance(error, ChecksumMismatch) and len(call.keys) > 1:  # it may have been in the first part
                call.is_whole &= not self.settings.answers_may_be_short
        except (trio.Cancelled, Killed):
            call.end = End.UNKNOWN
            raise
        finally:
            del self.world.calls[task]
            call.lost = self._lost_reads != lost_reads
            call.ended = clock.now
            self.world.trace.add(self.label, method, *call.keys, call.end.name, type(call.error).__name__)
        return call

    @property
    def _lost_reads(self) -> int:
        """How many keys the store has counted as missing because a node was lost."""
        calls = self.store.calls if isinstance(self.store, ClusterTrioStore) else None
        return 0 if calls is None else calls.counters.lost_reads

    def _is_whole(self, keys: list[str], puts: dict[str, bytes]) -> bool:
        """Whether a batch is one part."""
        server = self._server
        return len(keys) <= server.max_batch_keys and sum(map(len, puts.values())) <= server.max_batch_bytes

    def _key(self) -> str:
        return self._random.choice(self._keys)

    def _some_keys(self) -> list[str]:
        return self._random.sample(self._keys, self._random.randint(1, len(self._keys)))

    def _items(self) -> dict[str, bytes]:
        return {key: self._value(key) for key in self._some_keys()}

    def _value(self, key: str, length: int | None = None) -> bytes:
        self._calls += 1
        length = length or self._random.choice(self.settings.value_bytes)
        return make_value(key, self.label, self._calls, length)

    def _ttl_s(self) -> float | None:
        """After what time the keys of a put end; None if they do not."""
        if not self.settings.ttl_chance or self._random.random() >= self.settings.ttl_chance:
            return None
        return max(1e-3, self.settings.most_ttl_s * self._random.random() ** 2)

    def _lasts_s(self, ttl_s: float | None) -> float:
        """Return how long that is for everybody: the server goes by a clock of its
        own.
        """
        return math.inf if ttl_s is None else ttl_s / self._server.clock_rate

    def _pause_s(self) -> float:
        return self._random.choice([0.0, 0.001, 0.1, 2.0]) * self._random.random()


class _GivenUp(Exception):
    """The caller of `reserve` does not want it any more."""
