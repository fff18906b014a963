"""One client of a stress run, in a process of its own that may be stopped and killed at
any moment.

It writes its own keys and reads everybody's, in every way there is, and checks what it
reads: each value as such, that its version is not older than the last one whose put had
returned before, and that versions never go back.
"""

import random
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import attrs

from infinistore.aio import AsyncStore
from infinistore.client.movers.base import PutPart
from infinistore.client.movers.shm.known_blocks import KnownBlocks
from infinistore.client.movers.shm.mover import ShmMover
from infinistore.errors import DeadlineExceeded, LimitExceeded, OutOfMemory, StoreUnavailable
from infinistore.protocol.messages import Numbers, ReserveReply
from tests.bad_days.clients import run_with_store
from tests.stress.board import KEYS, Board
from tests.stress.values import LEAST_BYTES, WrongValue, value_of, version_in

__all__ = ["CLIENTS", "PLANTS", "run_client"]

CLIENTS: list[tuple[str, dict[str, Any]]] = [
    ("blocking", {"inline_bytes": 1000}),
    ("blocking", {"verify": "never"}),
    ("asyncio", {"inline_bytes": 0, "known_blocks": 8}),
    ("trio", {"inline_bytes": 1000, "verify": "never"}),
    ("blocking", {"known_blocks": 0}),
    ("blocking", {"inline_bytes": 0, "max_connections": 1}),
]
"""The kinds, by turns."""
_SIZES = (LEAST_BYTES, 900, 5000, 70_000, 300_000)
_MOST_LEASES = 3
_PAUSE_S = 0.01


@attrs.define
class _Expected:
    """What a key may have, as it was known before it is read."""

    writer: int
    number: int
    epoch: int
    committed: int
    kept: int
    """The least version that it may have if the server is killed meanwhile."""
    life: int
    """Of the server when it was asked."""

    @property
    def key(self) -> str:
        return f"{self.writer}.{self.epoch}.{self.number}"


@attrs.define
class _Client:
    board: Board
    writer: int
    random: random.Random
    store: AsyncStore
    latest: dict[str, tuple[int, int]] = attrs.field(factory=dict)
    """The newest version of each key that was read, and in which life of the server."""
    leases: list[tuple[AsyncExitStack, list[tuple[_Expected, Any, int]]]] = attrs.field(factory=list)

    async def run(self) -> None:
        writing = [self.put, self.put, self.reserve, self.delete, self.flush]
        reading = [self.get, self.get, self.get_into, self.lease, self.look, self.prefetch]
        try:
            while not self.board.over:
                self.board.count(self.writer, calls=1)
                try:
                    await self.random.choice(writing + reading)()
                except (StoreUnavailable, DeadlineExceeded, LimitExceeded):
                    time.sleep(_PAUSE_S)  # noqa: ASYNC251  # a server is being started, say; nobody else is in this loop
        finally:
            while self.leases:
                await self.end_lease()

    # Writing

    async def put(self) -> None:
        async def put(keys: list[str], versions: list[int], sizes: list[int]) -> None:
            await self.store.put_many(
                {key: value_of(key, version, size) for key, version, size in zip(keys, versions, sizes, strict=True)}
            )

        await self.write(put)

    async def reserve(self) -> None:
        async def reserve(keys: list[str], versions: list[int], sizes: list[int]) -> None:
            async with self.store.reserve(dict(zip(keys, sizes, strict=True))) as views:
                for view, key, version, size in zip(views, keys, versions, sizes, strict=True):
                    view[:] = value_of(key, version, size)
                del view

        await self.write(reserve)

    async def delete(self) -> None:
        async def delete(keys: list[str], versions: list[int], sizes: list[int]) -> None:
            await self.store.delete(keys)

        for number, version in (await self.write(delete)).items():
            self.board.keep(self.writer, number, version)

    async def flush(self) -> None:
        numbers = self.random.sample(range(KEYS), self.random.randint(1, 5))
        epoch = self.board.epoch(self.writer)
        versions = [self.board.committed(self.writer, number) for number in numbers]
        durable = await self.store.flush([f"{self.writer}.{epoch}.{number}" for number in numbers])
        if durable == len(numbers):  # those without a version are on no disk
            for number, version in zip(numbers, versions, strict=True):
                self.board.keep(self.writer, number, version)

    async def write(self, how: Callable[[list[str], list[int], list[int]], Any]) -> dict[int, int]:
        """Write some keys; return the version that each of them has then, by its
        number.
        """
        numbers = self.random.sample(range(KEYS), self.random.randint(1, 5))
        size = self.random.choice(_SIZES)
        sizes = [size if self.random.random() < 0.8 else self.random.choice(_SIZES) for _ in numbers]
        epoch = self.board.epoch(self.writer)
        keys = [f"{self.writer}.{epoch}.{number}" for number in numbers]
        versions = [self.board.begin(self.writer, number) for number in numbers]
        life = self.board.life
        try:
            await how(keys, versions, sizes)
        except (OutOfMemory, LimitExceeded):  # nothing has happened
            return {}
        except (StoreUnavailable, DeadlineExceeded):
            self.board.leave_keys(self.writer)
            raise
        for number, version in zip(numbers, versions, strict=True):
            self.board.commit(self.writer, number, version, life)
        return dict(zip(numbers, versions, strict=True))

    # Reading

    def choose(self) -> list[_Expected]:
        """Some keys of anybody's, in order or not, and what they may have from
        now on.
        """
        count = self.random.randint(1, 6)
        writers = [self.random.randrange(self.board.writers)] * count
        if self.random.random() < 0.3:
            writers = [self.random.randrange(self.board.writers) for _ in writers]
        first = self.random.randrange(KEYS)
        chosen = []
        for writer, number in zip(writers, range(first, first + count), strict=True):
            epoch, life = self.board.epoch(writer), self.board.life
            committed, kept = self.board.committed(writer, number % KEYS), self.board.kept(writer, number % KEYS)
            if not epoch % 2 and epoch == self.board.epoch(writer):
                chosen.append(_Expected(writer, number % KEYS, epoch, committed, kept, life))
        return list({expected.key: expected for expected in chosen}.values())

    def check(self, expected: _Expected, value: bytes | bytearray | memoryview | None) -> int:
        if value is None:
            self.board.count(self.writer, missing=1)
            return 0
        version = version_in(expected.key, value)
        begun = self.board.begun(expected.writer, expected.number)
        is_same_life = self.board.life == expected.life
        oldest = expected.committed if is_same_life else expected.kept
        if self.board.epoch(expected.writer) == expected.epoch:
            if not oldest <= version <= begun:
                raise WrongValue(
                    f"{expected.key}: v{version} is stale: v{oldest} was there before it was read,"
                    f" v{begun} is the newest"
                )
            if is_same_life:
                life, latest = self.latest.get(expected.key, (0, 0))
                if life == expected.life and version < latest:
                    raise WrongValue(f"{expected.key}: v{version} after v{latest}")
                self.latest[expected.key] = expected.life, version
        self.board.count(self.writer, checked=1)
        return version

    async def get(self) -> None:
        chosen = self.choose()
        for expected, value in zip(chosen, await self.store.get_many([one.key for one in chosen]), strict=True):
            self.check(expected, value)

    async def get_into(self) -> None:
        chosen = self.choose()
        buffers = [bytearray(max(_SIZES)) for _ in chosen]
        lengths = await self.store.get_many_into({one.key: buffer for one, buffer in zip(chosen, buffers, strict=True)})
        for expected, buffer, length in zip(chosen, buffers, lengths, strict=True):
            self.check(expected, None if length is None else memoryview(buffer)[:length])

    async def lease(self) -> None:
        if len(self.leases) == _MOST_LEASES or (self.leases and self.random.random() < 0.3):
            await self.end_lease()
        chosen = self.choose()
        stack = AsyncExitStack()
        try:
            views = await stack.enter_async_context(self.store.lease([one.key for one in chosen]))
        except LimitExceeded:
            return
        self.leases.append((stack, []))
        for expected, view in zip(chosen, views, strict=True):
            version = self.check(expected, view)
            if view is not None:
                self.leases[-1][1].append((expected, view, version))

    async def end_lease(self) -> None:
        """What is leased is what it was, whatever has become of its key and its
        server.
        """
        stack, leased = self.leases.pop(self.random.randrange(len(self.leases)))
        for expected, view, version in leased:
            if version_in(expected.key, view) != version:
                raise WrongValue(f"{expected.key}: v{version} has changed under a lease")
        leased.clear()
        await stack.aclose()

    async def prefetch(self) -> None:
        await self.store.prefetch([one.key for one in self.choose()])

    async def look(self) -> None:
        keys = [one.key for one in self.choose()]
        await self.store.exists_many(keys)
        await self.store.match_prefix(keys)


def run_client(board: Board, writer: int, url: str, seed: str, plant: str) -> None:
    """Be a client until the board says that it is over. Raises what is found."""
    if plant:
        PLANTS[plant]()
    board.leave_keys(writer)
    kind, options = CLIENTS[writer % len(CLIENTS)]

    async def body(store: AsyncStore) -> None:
        await _Client(board, writer, random.Random(seed), store).run()

    run_with_store(kind, url, body, lazy=True, deadline_s=3, **options)


def _plant_wrong_bytes() -> None:
    """Writes a byte too many, behind the checksum."""
    copy_in = ShmMover._copy_in

    async def copying(self: ShmMover, part: PutPart, room: ReserveReply) -> Numbers:
        hashes = await copy_in(self, part, room)
        for view in self.pool.blocks(room.places.tolist(), part.sizes, writable=True):
            view[len(view) // 2] ^= 1
        return hashes

    setattr(ShmMover, "_copy_in", copying)  # noqa: B010


def _plant_stale_reads() -> None:
    """Believes for ever what it once knew."""
    setattr(KnownBlocks, "hold", lambda *_: True)  # noqa: B010


PLANTS = {"wrong-bytes": _plant_wrong_bytes, "stale-reads": _plant_stale_reads}
"""Faults for one client, which the others, or itself, must notice."""
