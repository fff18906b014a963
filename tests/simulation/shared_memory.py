"""Memory that the processes of one host share: a server's pool and tables, mapped by
its clients.

Files, descriptors and mappings are the system's, all of them in this process. The
tables are reached through `Window`: each access to a number is a step of the process
that makes it, and what it stores waits in its store buffer (see `processes`). Blocks
are copied in pieces, with steps in between, so that one that changes meanwhile is torn.
"""

import os
import random
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from xxhash import xxh3_64

from infinistore.client.memory.copying import CopyThreads
from infinistore.core.arena import Arena, Mapping, create_arena
from infinistore.errors import StoreUnavailable
from infinistore.protocol.effects import Exchange
from tests.simulation.processes import Process, Processes

__all__ = ["Copier", "Tables", "Window", "refuse_thread"]

_TABLES = ("removals", "reader")
_WORD_BYTES = 8
_PIECES = (1, 1, 2, 3, 5)
_COPY_WEIGHT = 3  # how much more likely a stop is between two pieces than between two numbers


class Window:
    """A file with tables, as one process maps it: what they use of a memoryview."""

    def __init__(self, processes: Processes, process: Process, file: int, memory: memoryview) -> None:
        self.processes = processes
        self.process = process
        self.file = file
        self.memory = memory

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, place: slice) -> "_Part":
        start, end, _ = place.indices(len(self.memory))
        return _Part(self, start, end)

    def cast(self, kind: str) -> "_Words":
        """Return it as numbers."""
        return self[:].cast(kind)


class _Part:
    """A part of a window: numbers, or bytes that are stored and loaded as a whole."""

    def __init__(self, window: Window, start: int, end: int) -> None:
        self._window = window
        self._start = start
        self._memory = window.memory[start:end]

    def cast(self, kind: str) -> "_Words":
        """Return it as numbers."""
        assert kind == "Q" and self._start % _WORD_BYTES == 0
        return _Words(self._window, self._memory.cast("Q"), self._start // _WORD_BYTES)

    def __getitem__(self, place: slice) -> bytes:
        self._window.processes.step(self._window.process)
        return bytes(self._memory[place])

    def __setitem__(self, place: slice, value: bytes) -> None:
        if value:
            window = self._window
            window.processes.step(window.process)
            window.processes.store(window.process, self._memory, place, bytes(value), None)


class _Words:
    """Unsigned numbers of 64 bits. Each is loaded and stored as a whole."""

    def __init__(self, window: Window, words: memoryview, first: int) -> None:
        self._processes = window.processes
        self._process = window.process
        self._file = window.file
        self._words: Any = words
        self._first = first

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return memoryview(array("Q", [self[i] for i in range(*place.indices(len(self._words)))]))
        process = self._process
        self._processes.step(process)
        if process.own:
            stored = process.own.get((self._file, self._first + place))
            if stored is not None:
                return stored
        return self._words[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        if isinstance(place, slice):
            for i, one in zip(range(*place.indices(len(self._words))), value, strict=True):
                self[i] = one
            return
        process = self._process
        self._processes.step(process)
        self._processes.store(process, self._words, place, value, (self._file, self._first + place))


class Tables:
    """The files of a host that hold tables. Both ends map them as windows."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._files: set[int] = set()

    def create_arena(self, process: Process, index: int, length: int, *, name: str = "arena", **_: Any) -> Arena:
        """Do as `infinistore.core.arena.create_arena`, for a server."""
        arena = create_arena(index, length, name=name)
        if name in _TABLES:
            file = os.fstat(arena.fd).st_ino
            self._files.add(file)
            window: Any = Window(self._processes, process, file, arena.memory)
            arena.memory = arena.read_only = window
        return arena

    def map_memory(self, process: Process, descriptor: int, length: int, *, writable: bool) -> Mapping:
        """Do as `infinistore.core.arena.Mapping`, for a client."""
        mapping = Mapping(descriptor, length, writable=writable)
        file = os.fstat(descriptor).st_ino
        if file in self._files:
            window: Any = Window(self._processes, process, file, mapping.memory)
            mapping.memory = window
        return mapping


class Copier(CopyThreads):
    """Copies blocks for one client, in pieces that a seed chooses, without threads."""

    def __init__(self, processes: Processes, process: Process, chance: random.Random, steps: int) -> None:
        """Take so many `steps` before each piece."""
        super().__init__(1)
        self._steps = steps
        self._processes = processes
        self._process = process
        self._random = chance

    def copy(
        self,
        sources: Iterable[memoryview],
        targets: Iterable[memoryview],
        sizes: Sequence[int],
        total_bytes: int,
        *,
        hash_targets: bool,
    ) -> Exchange[list[int]]:
        """Copy block by block; return the hashes of the copies if they are wanted."""
        return self._copy(sources, targets, hash_targets=hash_targets)

    async def _copy(
        self, sources: Iterable[memoryview], targets: Iterable[memoryview], *, hash_targets: bool
    ) -> list[int]:
        checksums: list[int] = []
        for source, target in zip(sources, targets, strict=True):
            for piece in self._pieces(len(source)):
                target[piece] = source[piece]
            if hash_targets:
                state = xxh3_64()
                for piece in self._pieces(len(target)):
                    state.update(target[piece])
                checksums.append(state.intdigest())
        return checksums

    def _pieces(self, length: int) -> Iterable[slice]:
        choose = self._random
        count = min(length, choose.choice(_PIECES))
        cuts = [0, *sorted(choose.randrange(length) for _ in range(count - 1)), length]
        for start, end in pairwise(cuts):
            for _ in range(self._steps):
                self._processes.step(self._process, _COPY_WEIGHT)
            yield slice(start, end)


def refuse_thread(thread: object) -> None:
    """Start no thread. The pool's pages are made present when they are touched.

    Raises:
        StoreUnavailable: always.
    """
    raise StoreUnavailable("a simulated process gets no threads")
