"""Processors with store buffers, as on x86-64 (x86-TSO: Sewell et al., CACM 53(7),
2010), for code that shares memory.

A processor sees its own stores at once. The others see them later, in the order in
which they were made: each waits in the processor's buffer until it is flushed, at any
moment, and all of them at a fence. What is loaded is what is in memory then. Each
number is loaded and stored as a whole.

Actors are greenlets of which one runs at a time, as a seed says: at each access to
shared numbers another may go on, and a store may become visible. So the same seed gives
the same run, and ordinary code can be stopped at every access.
"""

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from greenlet import greenlet

__all__ = ["Actor", "Numbers", "Processors"]


class Ended(BaseException):
    """Another actor has failed: this one has nothing to do any more."""


class Actor:
    """Code that waits for its turn; `processor` is the one that it runs on."""

    def __init__(self, processor: str, act: Callable[[], object]) -> None:
        self.name = self.processor = processor
        self.act = act
        self.stopped_until = 0


class Processors:
    """The buffers of all processors, and who runs next."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._steps = 0
        self._set_pace()
        self._buffers: dict[str, deque[tuple[Any, int, int]]] = {}
        self._actors: list[Actor] = []
        self._running: Actor | None = None
        self._error: BaseException | None = None
        self._greenlets: dict[Actor, Any] = {}

    def run(self, *actors: Actor) -> None:
        """Run actors to their ends, and raise what one of them raised."""
        self._actors = list(actors)
        self._greenlets = {actor: greenlet(self._act) for actor in actors}
        self._running = self._actors[0]
        while self._running is not None:  # one that ends comes back to here
            self._greenlets[self._running].switch(self._running)
        if self._error is not None:
            raise self._error

    @contextmanager
    def on(self, processor: str) -> Iterator[None]:
        """Let the actor that runs go on as another processor. Sending a message between
        them is a fence for both.
        """
        actor = self._running
        assert actor is not None
        self.fence()
        before, actor.processor = actor.processor, processor
        try:
            yield
        finally:
            self.fence()
            actor.processor = before

    def fence(self) -> None:
        """Have all that this processor has stored seen by everybody."""
        if self._running is not None:
            while self._flush_one(self._running.processor):
                pass

    def step(self) -> None:
        """Perhaps make a store visible, and perhaps let another actor go on."""
        actor = self._running
        if actor is None:  # nothing runs yet, or any more
            return
        if self._error is not None:
            raise Ended
        chance = self.random.random
        if chance() < 0.01:
            self._set_pace()
        if chance() < self._flush:
            waiting = [processor for processor, buffer in self._buffers.items() if buffer]
            if waiting:
                self._flush_one(self.random.choice(waiting))
        self._steps += 1
        if actor.processor == actor.name and chance() < self._stop:
            actor.stopped_until = self._steps + 300
        if chance() < self._change or actor.stopped_until > self._steps:
            awake = [other for other in self._actors if other.stopped_until <= self._steps]
            self._hand_over(self.random.choice(awake or self._actors))
            if self._error is not None:
                raise Ended

    def _set_pace(self) -> None:
        """Choose how likely it is at a step that a store becomes visible, that another
        actor goes on, and that one is stopped for long, as by a signal."""
        self._flush = self.random.choice([0.0, 0.02, 0.2])
        self._change = self.random.choice([0.03, 0.1, 0.3])
        self._stop = self.random.choice([0.0, 0.003, 0.02])

    def store(self, memory: Any, index: int, value: int) -> None:
        """Store a number: others see it later."""
        if self._running is None:
            memory[index] = value
        else:
            self._buffers.setdefault(self._running.processor, deque()).append((memory, index, value))

    def load(self, memory: Any, index: int) -> int:
        """Load a number: what this processor stored last, or what is in memory."""
        found: int = memory[index]
        if self._running is not None:
            for stored, at, value in self._buffers.get(self._running.processor, ()):
                if stored is memory and at == index:
                    found = value
        return found

    def _flush_one(self, processor: str) -> bool:
        buffer = self._buffers.get(processor)
        if not buffer:
            return False
        memory, index, value = buffer.popleft()
        memory[index] = value
        return True

    def _hand_over(self, to: Actor) -> None:
        if to is not self._running:
            self._running = to
            self._greenlets[to].switch(to)

    def _act(self, actor: Actor) -> None:
        try:
            if self._error is None:
                actor.act()
                self.fence()
        except Ended:
            pass
        except BaseException as error:  # noqa: BLE001  # it is raised where the actors were started
            self._error = error
        self._actors.remove(actor)
        self._running = self.random.choice(self._actors) if self._actors else None


class Numbers:
    """Numbers of shared memory, as the code that is tested uses them: a memoryview of
    unsigned 64-bit numbers.
    """

    def __init__(self, processors: Processors, numbers: Any) -> None:
        self._processors = processors
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return memoryview(array("Q", [self[i] for i in range(*index.indices(len(self._numbers)))]))
        self._processors.step()
        return self._processors.load(self._numbers, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            for i, one in zip(range(*index.indices(len(self._numbers))), value, strict=True):
                self[i] = one
        else:
            self._processors.step()
            self._processors.store(self._numbers, index, value)
