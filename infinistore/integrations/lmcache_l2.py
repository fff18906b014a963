"""LMCache's multi-process mode: a store as its second level of cache (`L2AdapterInterface` of LMCache 0.5.6).

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "infinistore.integrations.lmcache_l2",
        "class_name": "InfiniStoreL2Adapter", "adapter_params": {"url": "infinistore://127.0.0.1:22345"}}'

LMCache's controllers submit tasks, and poll three event descriptors for their ends. A look-up locks what it finds: the
store holds it, so that the load that follows finds it, until it is unlocked or `hold_s` is over. Blocks go straight
between the objects that LMCache gives and the store. No failure is raised: a store that fails has stored nothing, and
a look-up or a load that fails has found nothing; both are counted, and told to the log once.
"""

import ctypes
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

import attrs
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface, L2TaskId
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from infinistore import blocking
from infinistore.errors import LimitExceeded
from infinistore.integrations.exact_reads import Outcome, read_exactly
from infinistore.integrations.record import Record
from infinistore.integrations.store_settings import StoreSettings

__all__ = ["InfiniStoreL2Adapter"]

_T = TypeVar("_T")
_log = init_logger(__name__)
_LOOKUP_THREADS = 2
_TRANSFER_THREADS = 4


@attrs.define(eq=False)
class _Lock:
    """What one hold of the store keeps: it is released when the last of its keys is unlocked."""

    hold: str
    keys: set[ObjectKey]
    ends: float


class _Locks:
    """Which hold stands for which lock. LMCache unlocks by key, each key as often as it was locked."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._of_key: dict[ObjectKey, deque[_Lock]] = {}
        self._by_end: deque[_Lock] = deque()

    def add(self, keys: Sequence[ObjectKey], hold: str, hold_s: float) -> None:
        """Note that a hold keeps these keys for so long. What has ended meanwhile is forgotten."""
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
        """Unlock each key once; return the holds that nothing needs any more."""
        done: list[str] = []
        with self._lock:
            for key in keys:
                locks = self._of_key.get(key)
                if not locks:  # it ended by itself
                    continue
                lock = locks[0]
                self._unlock(key, lock)
                if not lock.keys:
                    self._by_end.remove(lock)
                    done.append(lock.hold)
        return done

    def remove_all(self) -> list[str]:
        """Unlock everything; return all holds."""
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
    """Tasks of one kind: run in threads, their results kept until they are asked for, and signalled by a descriptor."""

    def __init__(self, threads: ThreadPoolExecutor, numbers: Iterator[L2TaskId]) -> None:
        self._threads = threads
        self._numbers = numbers
        self._lock = threading.Lock()
        self._results: dict[L2TaskId, Any] = {}
        self._notifier = create_event_notifier()
        self.close = self._notifier.close

    def fileno(self) -> int:
        """The descriptor that becomes readable when a task is done."""
        descriptor: int = self._notifier.fileno()
        return descriptor

    def submit(self, work: Callable[[], Any]) -> L2TaskId:
        """Run `work`, which does not raise, and keep what it returns."""
        number = next(self._numbers)
        self._threads.submit(self._run, number, work)
        return number

    def _run(self, number: L2TaskId, work: Callable[[], Any]) -> None:
        result = work()
        with self._lock:
            self._results[number] = result
        self._notifier.notify()

    def pop(self, number: L2TaskId) -> Any:
        """Return the result of a task, once; None before it is there."""
        with self._lock:
            return self._results.pop(number, None)

    def pop_all(self) -> dict[L2TaskId, Any]:
        """Return the results of all tasks that are done, once."""
        with self._lock:
            results, self._results = self._results, {}
            return results


class InfiniStoreL2Adapter(L2AdapterInterface):  # type: ignore[misc, unused-ignore]
    """A store as LMCache's second level. `parameters` are the settings of `StoreSettings`.

    The store evicts by itself, so LMCache is told no capacity, and does not evict there. What it deletes is accounted
    for with the size that the last object of the same group had.

    Raises:
        ConfigError: the parameters name no store, or have a setting that is none.
    """

    def __init__(self, parameters: Mapping[str, Any], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        super().__init__()
        settings = StoreSettings.from_mapping(parameters, where="adapter_params", key_prefix="lmcache-mp/")
        self._settings = settings
        self._record = Record(_log, settings.url)
        self._locks = _Locks()
        self._sizes: dict[tuple[str, int, int], int] = {}
        with ExitStack() as stack:
            self._store = stack.enter_context(blocking.open_store(settings.url, **settings.options))
            if l1_memory_desc is not None:  # so that RDMA moves objects without copying them
                memory = (ctypes.c_ubyte * l1_memory_desc.size).from_address(l1_memory_desc.ptr)
                self._guarded("registration", lambda: stack.callback(self._store.register(memory).close), None)
            # Look-ups never wait behind blocks.
            self._lookup_threads = _threads(stack, _LOOKUP_THREADS, "look-up")
            self._transfer_threads = _threads(stack, _TRANSFER_THREADS, "transfer")
            stack.callback(lambda: self._release(self._locks.remove_all()))
            numbers = itertools.count()
            self._stores = _Tasks(self._transfer_threads, numbers)
            self._lookups = _Tasks(self._lookup_threads, numbers)
            self._loads = _Tasks(self._transfer_threads, numbers)
            self._exit = stack.pop_all()

    def get_store_event_fd(self) -> int:
        """The descriptor that tells of stores that are done."""
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """The descriptor that tells of look-ups that are done."""
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        """The descriptor that tells of loads that are done."""
        return self._loads.fileno()

    # Stores.

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """Store objects; those that are there already are not moved again."""
        return self._stores.submit(
            lambda: self._guarded("store", lambda: self._put(keys, objects), L2StoreResult(False, 0))
        )

    def pop_completed_store_tasks(self) -> dict[L2TaskId, L2StoreResult]:
        """Return how the stores that are done ended."""
        return self._stores.pop_all()

    def _put(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> L2StoreResult:
        views = {self._name(key): memoryview(block.byte_array) for key, block in zip(keys, objects, strict=True)}
        skipped = set(self._store.put_many(views, replace=False))
        stored = {key: len(views[self._name(key)]) for key in keys if self._name(key) not in skipped}
        self._sizes |= {_group(key): size for key, size in stored.items()}
        self._record.count(stored=len(stored))
        if stored:
            self._notify_keys_stored(list(stored), list(stored.values()))
        return L2StoreResult(True, sum(stored.values()))

    # Look-ups.

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> L2TaskId:
        """Look up objects, and lock those that are there."""
        return self._lookups.submit(lambda: self._guarded("look-up", lambda: self._look_up(keys), Bitmap(len(keys))))

    def query_lookup_and_lock_result(self, task_id: L2TaskId) -> Bitmap | None:
        """Return which objects were found, once; None before that is known."""
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Unlock objects. What cannot be unlocked because the store is away ends by itself after `hold_s`."""
        holds = self._locks.remove(keys)
        if holds:
            self._lookup_threads.submit(self._release, holds)

    def _release(self, holds: Sequence[str]) -> None:
        self._guarded("unlock", lambda: sum(map(self._store.release_hold, holds)), 0)

    def _look_up(self, keys: Sequence[ObjectKey]) -> Bitmap:
        # LMCache asks for several prefixes at once, one for each rank and group of layers, and may want what comes
        # after a hole, too: a sliding window needs the last chunks, not the first.
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
        """Lock the leading keys that are there, note them in `found` from place `first` on, and return how many."""
        names = list(map(self._name, keys))
        try:
            match = self._store.match_prefix(names, hold_s=self._settings.hold_s)
        except LimitExceeded as error:  # held too long or too much: most of it will be there all the same
            self._record.failed("lock", error)
            match = self._store.match_prefix(names)
        if match.hold:
            self._locks.add(keys[:match], match.hold, self._settings.hold_s)
        found.batched_set(list(range(first, first + match)))
        return int(match)

    # Loads.

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """Load objects straight into the memory given."""
        return self._loads.submit(lambda: self._guarded("load", lambda: self._get(keys, objects), Bitmap(len(keys))))

    def query_load_result(self, task_id: L2TaskId) -> Bitmap | None:
        """Return which objects were loaded, once; None before that is known."""
        return self._loads.pop(task_id)

    def _get(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> Bitmap:
        items = [(self._name(key), memoryview(block.byte_array)) for key, block in zip(keys, objects, strict=True)]
        outcomes = read_exactly(self._store, items, self._record)
        bad = [name for (name, _), outcome in zip(items, outcomes, strict=True) if outcome is Outcome.BAD]
        if bad:  # so that the next store of these objects is not skipped
            self._store.delete(bad)
        loaded = Bitmap(len(keys))
        hits = [index for index, outcome in enumerate(outcomes) if outcome is Outcome.HIT]
        loaded.batched_set(hits)
        self._record.count(hits=len(hits), misses=len(keys) - len(hits))
        if hits:
            self._notify_keys_accessed([keys[index] for index in hits])
        return loaded

    # The rest.

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects. What a load is reading stays until it is done."""
        if self._guarded("deletion", lambda: self._store.delete(map(self._name, keys)), 0):
            self._notify_keys_deleted(keys, [self._sizes.get(_group(key), 0) for key in keys])

    def report_status(self) -> dict[str, Any]:
        """Tell whether the store is there, and what was counted."""
        return {
            "is_healthy": self._record.is_healthy,
            "type": type(self).__name__,
            "url": self._settings.url,
            "locked_keys": len(self._locks),
            **self._record.counts,
        }

    def close(self) -> None:
        """Unlock everything, finish what is under way, drop what has not begun, and let go of the store."""
        self._exit.close()
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()

    def _name(self, key: ObjectKey) -> str:
        salt = f"@{key.cache_salt}" if key.cache_salt else ""
        group = f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:x}"
        return f"{self._settings.key_prefix}{group}@{key.chunk_hash.hex()}{salt}"

    def _guarded(self, call: str, work: Callable[[], _T], otherwise: _T) -> _T:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - whatever it is, LMCache goes on without the store
            self._record.failed(call, error)
            return otherwise
        self._record.succeeded(call)
        return result


def _threads(stack: ExitStack, count: int, name: str) -> ThreadPoolExecutor:
    threads = ThreadPoolExecutor(count, f"infinistore-{name}")
    stack.callback(threads.shutdown, cancel_futures=True)
    return threads


def _group(key: ObjectKey) -> tuple[str, int, int]:
    return (key.model_name, key.kv_rank, key.object_group_id)


def _runs(flags: Sequence[bool]) -> Iterator[tuple[bool, int]]:
    return ((flag, len(list(run))) for flag, run in itertools.groupby(flags))
