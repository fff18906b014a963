"""How each store is called, in the way that its own documentation calls the fast one.

A client is given the memory to write from and to read to, and makes beforehand what its
library takes: what is measured is the call. Reads that a library can do into buffers go
into buffers.
"""

import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from peers.work import KIB, POOL_BYTES, Shape, source_of

Call = Callable[[], object]


class Client(ABC):
    """A connection to one store."""

    keeps = True
    """Whether what was read is still there after the call."""

    def __init__(self, address: str, source: memoryview, target: memoryview) -> None:
        self._source = source
        self._target = target
        self._connect(address)

    @abstractmethod
    def _connect(self, address: str) -> None: ...

    @abstractmethod
    def put(self, keys: Sequence[str], places: Sequence[slice]) -> Call:
        """Return the call that puts these parts of the source under these keys."""

    @abstractmethod
    def get(self, keys: Sequence[str], size: int) -> Call:
        """Return the call that reads these blocks, each of so many bytes."""

    @abstractmethod
    def blocks(self, result: object, shape: Shape) -> list[bytes]:
        """Return what a call of `get` has read; `result` is what it returned."""

    def exists(self, key: str) -> Call | None:
        """Return the call that asks for a key, which is there; None: there is no such
        question.
        """
        return None

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Remove blocks."""

    def close(self) -> None:  # noqa: B027, not all have something to close
        """End the connection."""

    def _targets(self, count: int, size: int) -> list[memoryview]:
        return [self._target[number * size : (number + 1) * size] for number in range(count)]

    def _read_into_target(self, shape: Shape) -> list[bytes]:
        return [bytes(view) for view in self._targets(shape.blocks, shape.size)]


class InfiniStore(Client):
    """This store, by the blocking client. The address is a URL; none: embedded."""

    def _connect(self, address: str) -> None:
        from infinistore.blocking import open_store

        self._until_close = ExitStack()
        store = open_store(address) if address else open_store(pool_bytes=POOL_BYTES, minimal_allocate_bytes=4 * KIB)
        self._store = self._until_close.enter_context(store)

    def put(self, keys: Sequence[str], places: Sequence[slice]) -> Call:
        store, source = self._store, self._source
        if len(keys) == 1:
            key, data = keys[0], source[places[0]]
            return lambda: store.put(key, data)
        pairs = [(key, source[place]) for key, place in zip(keys, places, strict=True)]
        return lambda: store.put_many(pairs)

    def get(self, keys: Sequence[str], size: int) -> Call:
        store, targets = self._store, self._targets(len(keys), size)
        if len(keys) == 1:
            key, target = keys[0], targets[0]
            return lambda: store.get_into(key, target)
        pairs = list(zip(keys, targets, strict=True))
        return lambda: store.get_many_into(pairs)

    def blocks(self, result: object, shape: Shape) -> list[bytes]:
        return self._read_into_target(shape)

    def exists(self, key: str) -> Call | None:
        return lambda: self._store.exists(key)

    def remove(self, keys: Sequence[str]) -> None:
        self._store.delete(keys)

    def close(self) -> None:
        self._until_close.close()


class InfiniStoreObjects(InfiniStore):
    """The same, returning new objects."""

    def get(self, keys: Sequence[str], size: int) -> Call:
        store, names = self._store, list(keys)
        if len(names) == 1:
            return lambda: [store.get(names[0])]
        return lambda: store.get_many(names)

    def blocks(self, result: Any, shape: Shape) -> list[bytes]:
        return [bytes(one) for one in result]


class InfiniStoreLease(InfiniStore):
    """The same, without copying: views of the pool, which end with their lease."""

    keeps = False

    def get(self, keys: Sequence[str], size: int) -> Call:
        store, names = self._store, list(keys)

        def lease() -> object:
            with store.lease(names) as views:
                return len(views)

        return lease

    def blocks(self, result: object, shape: Shape) -> list[bytes]:
        raise NotImplementedError("the copying client checks the same blocks")


class Redis(Client):
    """Redis by redis-py with hiredis: MSET, MGET, and SET and GET for a single block."""

    def _connect(self, address: str) -> None:
        import redis

        self._redis: Any = redis.Redis(unix_socket_path=address) if "/" in address else _tcp(redis.Redis, address)

    def put(self, keys: Sequence[str], places: Sequence[slice]) -> Call:
        if len(keys) == 1:
            key, data = keys[0], self._source[places[0]]
            return lambda: self._redis.set(key, data)
        pairs = {key: self._source[place] for key, place in zip(keys, places, strict=True)}
        return lambda: self._redis.mset(pairs)

    def get(self, keys: Sequence[str], size: int) -> Call:
        names = list(keys)
        if len(names) == 1:
            return lambda: [self._redis.get(names[0])]
        return lambda: self._redis.mget(names)

    def blocks(self, result: Any, shape: Shape) -> list[bytes]:
        return list(result)

    def exists(self, key: str) -> Call | None:
        return lambda: self._redis.exists(key)

    def remove(self, keys: Sequence[str]) -> None:
        for first in range(0, len(keys), 1000):
            self._redis.delete(*keys[first : first + 1000])

    def close(self) -> None:
        self._redis.close()


class RedisPipeline(Redis):
    """The same, with a pipeline of SET or GET for a batch."""

    def put(self, keys: Sequence[str], places: Sequence[slice]) -> Call:
        pairs = [(key, self._source[place]) for key, place in zip(keys, places, strict=True)]

        def put() -> object:
            with self._redis.pipeline(transaction=False) as pipeline:
                for key, data in pairs:
                    pipeline.set(key, data)
                return pipeline.execute()

        return put

    def get(self, keys: Sequence[str], size: int) -> Call:
        names = list(keys)

        def get() -> object:
            with self._redis.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.get(name)
                return pipeline.execute()

        return get


class Pymemcache(Client):
    """memcached by pymemcache, which is written in Python."""

    def _connect(self, address: str) -> None:
        from pymemcache.client.base import Client as Pymemcached

        self._memcached: Any = Pymemcached(address, no_delay=True, default_noreply=False)

    def put(self, keys: Sequence[str], places: Sequence[slice]) -> Call:
        if len(keys) == 1:
            key, data = keys[0], bytes(self._source[places[0]])
            return lambda: _stored(self._memcached.set(key, data))
        pairs = {key: bytes(self._source[place]) for key, place in zip(keys, places, strict=True)}
        return lambda: _stored(not self._memcached.set_many(pairs))

    def get(self, keys: Sequence[str], size: int) -> Call:
        names = list(keys)
        if len(names) == 1:
            return lambda: {names[0]: self._memcached.get(names[0])}
        return lambda: self._memcached.get_many(names)

    def blocks(self, result: Any, shape: Shape) -> list[bytes]:
        return [result[key] for key in sorted(result)]

    def remove(self, keys: Sequence[str]) -> None:
        self._memcached.delete_many(keys, noreply=True)

    def close(self) -> None:
        self._memcached.close()


class Pylibmc(Client):
    """memcached by pylibmc, which is written in C."""

    def _connect(self, address: str) -> None:
        import pylibmc

        self._memcached: Any = pylibmc.Client([address], binary=True, behaviors={"tcp_nodelay": True})

    def put(self, keys: Sequence[str], places: Sequence[slice]) -> Call:
        if len(keys) == 1:
            key, data = keys[0], bytes(self._source[places[0]])
            return lambda: _stored(self._memcached.set(key, data))
        pairs = {key: bytes(self._source[place]) for key, place in zip(keys, places, strict=True)}
        return lambda: _stored(not self._memcached.set_multi(pairs))

    def get(self, keys: Sequence[str], size: int) -> Call:
        names = list(keys)
        if len(names) == 1:
            return lambda: {names[0]: self._memcached.get(names[0])}
        return lambda: self._memcached.get_multi(names)

    def blocks(self, result: Any, shape: Shape) -> list[bytes]:
        return [result[key] for key in sorted(result)]

    def remove(self, keys: Sequence[str]) -> None:
        self._memcached.delete_multi(keys)


class Mooncake(Client):
    """Mooncake's store with its zero-copy calls; the blocks are in another process."""

    def _connect(self, address: str) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        # No segment of its own: else blocks would lie in this process.
        _succeeded([self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", address)])
        for memory in (self._source, self._target):
            _succeeded([self._store.register_buffer(_address(memory), len(memory))])

    def put(self, keys: Sequence[str], places: Sequence[slice]) -> Call:
        start = _address(self._source)
        names, sizes = list(keys), [place.stop - place.start for place in places]
        pointers = [start + place.start for place in places]
        if len(names) == 1:
            return lambda: _succeeded([self._store.put_from(names[0], pointers[0], sizes[0])])
        return lambda: _succeeded(self._store.batch_put_from(names, pointers, sizes))

    def get(self, keys: Sequence[str], size: int) -> Call:
        start = _address(self._target)
        names, sizes = list(keys), [size] * len(keys)
        pointers = [start + number * size for number in range(len(keys))]
        if len(names) == 1:
            return lambda: _stored(self._store.get_into(names[0], pointers[0], size) == size)
        return lambda: _stored(self._store.batch_get_into(names, pointers, sizes) == sizes)

    def blocks(self, result: object, shape: Shape) -> list[bytes]:
        return self._read_into_target(shape)

    def exists(self, key: str) -> Call | None:
        return lambda: _stored(self._store.is_exist(key) == 1)

    def remove(self, keys: Sequence[str]) -> None:
        self._store.batch_remove(list(keys), True)

    def close(self) -> None:
        self._store.close()


class RawSockets(Client):
    """The limit of a store over TCP: the same bytes, and an answer of 64."""

    _HEAD = struct.Struct("<cQQ47x")

    def _connect(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reply = bytearray(64)
        self._at = 0

    def put(self, keys: Sequence[str], places: Sequence[slice]) -> Call:
        views = [self._source[place] for place in places]
        count = sum(map(len, views))
        parts: list[bytes | memoryview] = [self._HEAD.pack(b"p", places[0].start, count), *views]

        def put() -> None:
            sent = self._socket.sendmsg(parts)
            if sent != 64 + count:
                self._socket.sendall(b"".join(parts)[sent:])
            self._socket.recv_into(self._reply, 64, socket.MSG_WAITALL)

        return put

    def get(self, keys: Sequence[str], size: int) -> Call:
        first = source_of(int(keys[0].rpartition("/")[2]), size).start
        views = self._targets(len(keys), size)
        count = len(keys) * size
        request = self._HEAD.pack(b"g", first, count)

        def get() -> None:
            self._socket.sendall(request)
            _stored(self._socket.recvmsg_into(views, 0, socket.MSG_WAITALL)[0] == count)

        return get

    def blocks(self, result: object, shape: Shape) -> list[bytes]:
        return self._read_into_target(shape)

    def exists(self, key: str) -> Call | None:
        request = self._HEAD.pack(b"e", 0, 0)

        def echo() -> None:
            self._socket.sendall(request)
            self._socket.recv_into(self._reply, 64, socket.MSG_WAITALL)

        return echo

    def remove(self, keys: Sequence[str]) -> None:
        pass

    def close(self) -> None:
        self._socket.close()


class Memcpy(Client):
    """The limit of a store in shared memory: numpy copies block by block."""

    def _connect(self, address: str) -> None:
        self._room = np.zeros(len(self._source), np.uint8)
        self._from = np.frombuffer(self._source, np.uint8)
        self._to = np.frombuffer(self._target, np.uint8)
        self._room[:] = self._from

    def put(self, keys: Sequence[str], places: Sequence[slice]) -> Call:
        pairs = [(self._room[place], self._from[place]) for place in places]
        return lambda: _copy(pairs)

    def get(self, keys: Sequence[str], size: int) -> Call:
        numbers = [int(key.rpartition("/")[2]) for key in keys]
        pairs = [
            (self._to[at * size : (at + 1) * size], self._room[source_of(number, size)])
            for at, number in enumerate(numbers)
        ]
        return lambda: _copy(pairs)

    def blocks(self, result: object, shape: Shape) -> list[bytes]:
        return self._read_into_target(shape)

    def remove(self, keys: Sequence[str]) -> None:
        pass


def _tcp(make: Callable[..., Any], address: str) -> Any:
    host, _, port = address.rpartition(":")
    return make(host=host, port=int(port))


def _copy(pairs: Sequence[tuple[Any, Any]]) -> None:
    for target, source in pairs:
        np.copyto(target, source)


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _stored(fine: object) -> None:
    if not fine:
        raise RuntimeError("the store did not do what it was asked to")


def _succeeded(results: Sequence[int]) -> None:
    if any(results):
        raise RuntimeError(f"the store answered {sorted(set(results))}")
