"""LMCache's multi-process mode: a store as its second level of cache
(`L2AdapterInterface` of LMCache 0.5.6).

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "infinistore.integrations.lmcache_l2",
        "class_name": "InfiniStoreL2Adapter", "adapter_params": {"url": "infinistore://127.0.0.1:22345"}}'

LMCache's controllers submit tasks, and poll three event descriptors for their
completion. A lookup locks the blocks that it finds: the store holds them for the
following load until they are unlocked or `hold_s` is over. Blocks move directly between
LMCache's objects and the store. Failures raise nothing: a failed store has stored
nothing, and a failed lookup or load has found nothing. Both are counted, and logged
once.
"""

import ctypes
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import attrs

from infinistore import blocking
from infinistore.errors import ConfigError
from infinistore.integrations.internal.blocking_store_calls import match_and_hold, pin_loaded, read_ahead, read_exactly
from infinistore.integrations.internal.record import Record
from infinistore.integrations.internal.settings import StoreSettings
from infinistore.integrations.internal.tested_release import tested_with
from infinistore.integrations.internal.weights import WeightFiles, weight_files

with tested_with("LMCache", "lmcache", "0.5.6"):
    from lmcache.lmcache_native import Bitmap
    from lmcache.logging import init_logger
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface, L2TaskId
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.platform import create_event_notifier

__all__ = ["InfiniStoreL2Adapter"]

_log = init_logger(__name__)
_PREFIX = "lmcache-mp/"
_LOOKUP_THREADS = 2
_TRANSFER_THREADS = 4


@attrs.define(eq=False)
class _Lock:
    """The keys of one hold; the hold is released when the last of them is unlocked."""

    hold: str
    keys: set[ObjectKey]
    ends: float


class _Locks:
    """Maps locks to holds. LMCache unlocks each key as often as it was locked."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._of_key: dict[ObjectKey, deque[_Lock]] = {}
        self._by_end: deque[_Lock] = deque()

    def add(self, keys: Sequence[ObjectKey], hold: str, hold_s: float) -> None:
        """Record that a hold keeps these keys for `hold_s`; forget expired holds."""
        now = self._clock()
        lock = _Lock(hold, set(keys), now + hold_s)
        with self._lock:
            while self._by_end and self._by_end[0].ends <= now:
                ended = self._by_end.popleft()
                for key in tuple(ended.keys):
                    self._unlock(key, ended)
            self._by_end.append(lock)
            for key in lock.keys:
                self._of_key.setdefault(key, deque()).append(lock)

    def remove(self, keys: Sequence[ObjectKey]) -> list[str]:
        """Unlock each key once. Returns the holds that are no longer needed."""
        done: list[str] = []
        with self._lock:
            for key in keys:
                locks = self._of_key.get(key)
                if not locks:  # it expired
                    continue
                lock = locks[0]
                self._unlock(key, lock)
                if not lock.keys:
                    self._by_end.remove(lock)
                    done.append(lock.hold)
        return done

    def remove_all(self) -> list[str]:
        """Unlock everything. Returns all holds."""
        with self._lock:
            holds = [lock.hold for lock in self._by_end]
            self._by_end.clear()
            self._of_key.clear()
        return holds

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._of_key.values()))

    def _unlock(self, key: ObjectKey, lock: _Lock) -> None:
        lock.keys.discard(key)
        locks = self._of_key[key]
        locks.remove(lock)
        if not locks:
            del self._of_key[key]


class _Tasks:
    """Tasks of one kind, which run in threads and signal completion by a descriptor.

    Results are kept until they are fetched.
    """

    def __init__(self, threads: ThreadPoolExecutor, numbers: Iterator[L2TaskId]) -> None:
        self._threads = threads
        self._numbers = numbers
        self._tasks: dict[L2TaskId, Future[Any]] = {}
        self._notifier = create_event_notifier()
        self.close = self._notifier.close

    def fileno(self) -> int:
        """The descriptor that becomes readable when a task is done."""
        descriptor: int = self._notifier.fileno()
        return descriptor

    def submit(self, work: Callable[[], Any]) -> L2TaskId:
        """Run `work`, which must not raise, and keep its result."""
        number = next(self._numbers)
        task = self._tasks[number] = self._threads.submit(work)
        task.add_done_callback(lambda _: self._notifier.notify())
        return number

    def pop(self, number: L2TaskId) -> Any:
        """Return the result of a task once; None while it runs."""
        task = self._tasks.get(number)
        return self._tasks.pop(number).result() if task is not None and task.done() else None

    def pop_all(self) -> dict[L2TaskId, Any]:
        """Return the results of all finished tasks once."""
        return {number: self.pop(number) for number, task in list(self._tasks.items()) if task.done()}


class InfiniStoreL2Adapter(L2AdapterInterface):  # type: ignore[misc, unused-ignore]
    """A store as LMCache's second level. `parameters` are the settings of
    `StoreSettings`.

    The store handles eviction, so the adapter reports no capacity and LMCache does not
    evict there. Deletions are accounted with the size of the last object of the group.

    Raises:
        ConfigError: the parameters name no store, or have an unknown setting.
    """

    def __init__(self, parameters: Mapping[str, Any], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        super().__init__()
        settings = StoreSettings.from_mapping(parameters, where="adapter_params", key_prefix=_PREFIX)
        self._settings = settings
        self._record = Record(_log, settings.url)
        self._locks = _Locks()
        self._sizes: dict[tuple[str, int, int], int] = {}
        self._seen: dict[str, WeightFiles | None] = {}  # by the model's name
        self._prefixes: dict[str, str] = {}
        with ExitStack() as stack:
            self._store = stack.enter_context(blocking.open_store(settings.url, **settings.options))
            if l1_memory_desc is not None:  # so that RDMA moves objects without copying them
                memory = (ctypes.c_ubyte * l1_memory_desc.size).from_address(l1_memory_desc.ptr)
                self._record.guarded("registration", lambda: stack.callback(self._store.register(memory).close), None)
            # Lookups never wait behind blocks.
            self._lookup_threads = _threads(stack, _LOOKUP_THREADS, "look-up")
            self._transfer_threads = _threads(stack, _TRANSFER_THREADS, "transfer")
            stack.callback(lambda: self._release(self._locks.remove_all()))
            numbers = itertools.count()
            self._stores = _Tasks(self._transfer_threads, numbers)
            self._lookups = _Tasks(self._lookup_threads, numbers)
            self._loads = _Tasks(self._transfer_threads, numbers)
            self._exit = stack.pop_all()

    def get_store_event_fd(self) -> int:
        """The descriptor that signals finished stores."""
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """The descriptor that signals finished lookups."""
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        """The descriptor that signals finished loads."""
        return self._loads.fileno()

    # Stores.

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """Store objects; existing ones are not sent again."""
        return self._stores.submit(
            lambda: self._record.guarded("store", lambda: self._put(keys, objects), L2StoreResult(False, 0))
        )

    def pop_completed_store_tasks(self) -> dict[L2TaskId, L2StoreResult]:
        """Return the results of finished stores."""
        return self._stores.pop_all()

    def _put(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> L2StoreResult:
        self._check_weights(keys)
        views = {self._name(key): memoryview(block.byte_array) for key, block in zip(keys, objects, strict=True)}
        skipped = set(self._store.put_many(views, replace=False, ttl_s=self._settings.ttl_s))
        stored = {key: len(views[self._name(key)]) for key in keys if self._name(key) not in skipped}
        self._sizes |= {_group(key): size for key, size in stored.items()}
        self._record.count(stored=len(stored))
        if stored:
            self._notify_keys_stored(list(stored), list(stored.values()))
        return L2StoreResult(True, sum(stored.values()))

    # Lookups.

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> L2TaskId:
        """Look up objects, and lock those that exist; read ahead those on disk only."""
        return self._lookups.submit(
            lambda: self._record.guarded("look-up", lambda: self._look_up(keys), Bitmap(len(keys)))
        )

    def query_lookup_and_lock_result(self, task_id: L2TaskId) -> Bitmap | None:
        """Return which objects were found, once; None while it runs."""
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Unlock objects. If the store is away, the hold expires after `hold_s`."""
        holds = self._locks.remove(keys)
        if holds:
            self._lookup_threads.submit(self._release, holds)

    def _release(self, holds: Sequence[str]) -> None:
        self._record.guarded("unlock", lambda: sum(map(self._store.release_hold, holds)), 0)

    def _look_up(self, keys: Sequence[ObjectKey]) -> Bitmap:
        self._check_weights(keys)
        # LMCache asks for several prefixes at once, one for each rank and group of
        # layers, and may want what comes after a hole, too: a sliding window needs the
        # last chunks, not the first.
        found = Bitmap(len(keys))
        first = 0
        for _, prefix in itertools.groupby(keys, _group):
            part = list(prefix)
            matched = self._lock(found, first, part)
            if matched < len(part):
                behind = matched + 1
                for present, run in _runs(self._store.exists_many(map(self._name, part[behind:]))):
                    if present:
                        self._lock(found, first + behind, part[behind : behind + run])
                    behind += run
            first += len(part)
        return found

    def _lock(self, found: Bitmap, first: int, keys: Sequence[ObjectKey]) -> int:
        """Lock the leading keys that exist, set their bits in `found` from `first` on.

        Returns how many there are.
        """
        names = list(map(self._name, keys))
        match = match_and_hold(self._store, names, self._settings.hold_s, self._record)
        if match.hold:
            self._locks.add(keys[:match], match.hold, self._settings.hold_s)
        read_ahead(self._store, match, names[:match], self._record)
        found.batched_set(list(range(first, first + match)))
        return int(match)

    # Loads.

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """Load objects into their memory."""
        return self._loads.submit(
            lambda: self._record.guarded("load", lambda: self._get(keys, objects), Bitmap(len(keys)))
        )

    def query_load_result(self, task_id: L2TaskId) -> Bitmap | None:
        """Return which objects were loaded, once; None while it runs."""
        return self._loads.pop(task_id)

    def _get(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> Bitmap:
        items = [(self._name(key), memoryview(block.byte_array)) for key, block in zip(keys, objects, strict=True)]
        hits = [index for index, is_hit in enumerate(read_exactly(self._store, items, self._record)) if is_hit]
        loaded = Bitmap(len(keys))
        loaded.batched_set(hits)
        self._record.count(hits=len(hits), misses=len(keys) - len(hits))
        if hits:
            self._notify_keys_accessed([keys[index] for index in hits])
            pin_loaded(self._store, [items[index][0] for index in hits], self._settings.pin_s, self._record)
        return loaded

    # The rest.

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects, and report those that existed to LMCache.

        An object that a load is reading stays until the load is done.
        """
        deleted: list[ObjectKey] = self._record.guarded("deletion", lambda: self._delete(keys), [])
        if deleted:
            self._notify_keys_deleted(deleted, [self._sizes.get(_group(key), 0) for key in deleted])

    def _delete(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        # The store says how many it has deleted, not which.
        there = self._store.exists_many(map(self._name, keys))
        found = [key for key, is_there in zip(keys, there, strict=True) if is_there]
        self._store.delete(map(self._name, found))
        return found

    def report_status(self) -> dict[str, Any]:
        """Return the health of the store, and the counts."""
        return {
            "is_healthy": self._record.is_healthy,
            "type": type(self).__name__,
            "url": self._settings.url,
            "locked_keys": len(self._locks),
            **self._record.counts,
        }

    def close(self) -> None:
        """Unlock everything, finish running tasks, drop the others, close the store."""
        self._exit.close()
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()

    def _check_weights(self, keys: Sequence[ObjectKey]) -> None:
        """Learn the weights of these models, which engines load. LMCache has nothing to
        tell those of before from those of now.

        Where the user gave a prefix of their own, which they change with the weights,
        it is no change that the weights are not known any more.
        """
        for model in {key.model_name for key in keys}:
            if model not in self._seen:
                self._seen.setdefault(model, weight_files(model, only=True))
            files = self._seen[model]
            now = None if files is None else files.now()
            if now != files and (now is not None or self._settings.key_prefix == _PREFIX):
                raise ConfigError(f"the weights of {model} have changed since LMCache's server started: start it again")
            if model not in self._prefixes:
                weights = "" if files is None else files.identity()
                self._prefixes[model] = self._settings.prefix_of(model, weights, default=_PREFIX)

    def _name(self, key: ObjectKey) -> str:
        salt = f"@{key.cache_salt}" if key.cache_salt else ""
        group = f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:x}"
        return f"{self._prefixes[key.model_name]}{group}@{key.chunk_hash.hex()}{salt}"


def _threads(stack: ExitStack, count: int, name: str) -> ThreadPoolExecutor:
    threads = ThreadPoolExecutor(count, f"infinistore-{name}")
    stack.callback(threads.shutdown, cancel_futures=True)
    return threads


def _group(key: ObjectKey) -> tuple[str, int, int]:
    return (key.model_name, key.kv_rank, key.object_group_id)


def _runs(flags: Sequence[bool]) -> Iterator[tuple[bool, int]]:
    return ((flag, len(list(run))) for flag, run in itertools.groupby(flags))
