"""Processes that can be stopped in the middle of ordinary code.

The tasks of a process run one at a time, as in its event loop. `Processes.step` is
called wherever a process touches memory that it shares with others. There it may be
stopped for a while of virtual time, although its code does not wait: the other
processes go on, and all tasks of this one wait until it does. So a process is killed or
delayed between any two accesses, and the code under test stays as it is.

The coroutine of each task runs in a greenlet of its own, which a step leaves and comes
back to. Which task belongs to which process follows from the context that it inherits.

Processors keep stores back, as on x86-64 (x86-TSO: Sewell et al., CACM 53(7), 2010): a
process sees its own stores at once, others see them later, in the order in which they
were made. Each waits in the buffer of its process until it is flushed: at any step of
anybody, and all of them at a fence, or when the process waits for something.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from math import log
from typing import Any

import trio
from greenlet import getcurrent, greenlet

from tests.simulation.clock import Timer, VirtualClock

__all__ = ["STOP_CHANCES", "Killed", "Process", "Processes"]

_STOPS_S = (0.0, 0.00002, 0.0002, 0.002, 0.02)
"""For how long a process is stopped at a step, at most: often as long as a message
takes."""
_LONG_STOP_S = 2.0
_LONG_STOP_CHANCE = 0.002
_NEW_PACE_CHANCE = 0.02
_FLUSH_CHANCES = (0.002, 0.02, 0.2)
STOP_CHANCES = (0.02, 0.1, 0.3)
"""How likely a stop is at a step, at one pace or another."""


class Killed(BaseException):
    """This process has been killed."""


def _first_wish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return what a coroutine asks Trio for first."""
    wish = coroutine.send(None)
    coroutine.close()
    return wish


async def _wait() -> None:
    await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)


_WAIT = _first_wish(_wait())
"""Asks Trio to go on with a task when it is rescheduled, even if it is cancelled."""


class Process:
    """A process with one event loop, and the store buffer of its processor."""

    def __init__(self, name: str, steps: int = 1) -> None:
        """`steps` makes it slow: each of its accesses counts as so many."""
        self.name = name
        self.steps = steps
        self.killed = False
        """Nothing that it does has an effect on others any more."""
        self.raises = False
        """Whether a task that was stopped when it was killed raises `Killed`."""
        self.stopped: _Steps | None = None
        """The task that was stopped in the middle of something."""
        self.timer: Timer | None = None
        """When that goes on."""
        self.waiting: list[trio.lowlevel.Task] = []
        """The other tasks that have something to do, until then."""
        self.stores: deque[tuple[Any, Any, Any]] = deque()
        """What it has stored and others do not see yet: memory, place and value."""
        self.own: dict[Any, Any] = {}
        """The last values of what is in `stores`, by keys of the caller."""

    def flush_one(self) -> None:
        """Let others see the oldest store."""
        memory, place, value = self.stores.popleft()
        memory[place] = value
        if not self.stores:
            self.own.clear()

    def fence(self) -> None:
        """Let others see all that this process has stored."""
        while self.stores:
            self.flush_one()

    def kill(self, *, quietly: bool = False) -> None:
        """End the process. What it has stored becomes visible, and nothing later.

        A task that was stopped raises `Killed`, unless `quietly`. Who calls this
        cancels the others.
        """
        self.fence()
        self.killed = True
        self.raises = not quietly
        timer, self.timer = self.timer, None
        if timer is not None and timer.call is not None:
            go_on = timer.call
            timer.cancel()
            go_on()


class Processes(trio.abc.Instrument):
    """All processes of a world, and which of them is stopped where."""

    def __init__(
        self, clock: VirtualClock, chance: random.Random, stop_chances: Sequence[float] = STOP_CHANCES
    ) -> None:
        self.counts: Counter[str] = Counter()
        """How many stops there were, and stores that became visible by chance."""
        self.running: _Steps | None = None
        """The task that runs, if it is one of a process."""
        self.loop = getcurrent()
        """The greenlet of Trio's loop."""
        self._clock = clock
        self._random = chance
        self._stop_chances = stop_chances
        self._process: ContextVar[Process | None] = ContextVar("process", default=None)
        self._with_stores: dict[Process, None] = {}
        self._set_pace()

    def start_soon(self, nursery: trio.Nursery, process: Process, function: Callable[..., Any], *args: Any) -> None:
        """Start a task of a process. The tasks that it starts belong to it, too."""
        token = self._process.set(process)
        try:
            nursery.start_soon(function, *args)
        finally:
            self._process.reset(token)

    def enter(self, process: Process) -> None:
        """Have the tasks that this task starts from now on belong to a process."""
        self._process.set(process)

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        """Have a new task of a process run in steps. Trio calls it."""
        process = task.context.get(self._process)
        if process is not None:
            task.coro = _Steps(self, process, task)  # type: ignore[assignment]

    def step(self, process: Process, weight: int = 1) -> None:
        """Touch shared memory: perhaps others go on, or see something, before that."""
        self._left -= weight * process.steps
        if self._left < 0:
            self._act(process)

    def fence(self) -> None:
        """Let others see what the running process has stored."""
        if self.running is not None:
            self.running.process.fence()

    def store(self, process: Process, memory: Any, place: Any, value: Any, key: Any) -> None:
        """Store a value: others see it later. A killed process stores nothing."""
        if process.killed:
            return
        if self.running is None or self.running.process is not process:  # in a finalizer that anybody runs
            process.fence()
            memory[place] = value
            return
        process.stores.append((memory, place, value))
        process.own[key] = value
        self._with_stores[process] = None

    def _act(self, process: Process) -> None:
        chance = self._random.random
        self._left = self._gap()
        if chance() < _NEW_PACE_CHANCE:
            self._set_pace()
        if chance() * (self._flush + self._stop) < self._flush:
            self._flush_any()
        elif self.running is not None and self.running.process is process and not process.killed:
            self.counts["stops"] += 1
            if chance() < _LONG_STOP_CHANCE:
                process.fence()
                self.running.stop(_LONG_STOP_S * chance())
            else:
                self.running.stop(self._random.choice(_STOPS_S) * chance())

    def _flush_any(self) -> None:
        self._with_stores = {process: None for process in self._with_stores if process.stores}
        if self._with_stores:
            self.counts["flushes"] += 1
            self._random.choice(list(self._with_stores)).flush_one()

    def _set_pace(self) -> None:
        """Choose how likely it is at a step that a store becomes visible, and that the
        process is stopped.
        """
        self._flush = self._random.choice(_FLUSH_CHANCES)
        self._stop = self._random.choice(self._stop_chances)
        self._left = self._gap()

    def _gap(self) -> int:
        """Choose after how many steps something happens."""
        return int(log(1.0 - self._random.random()) / log(1.0 - self._flush - self._stop))

    def call_later(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Call a function when so many seconds have passed."""
        return self._clock.after(seconds, call)


class _Steps:
    """The coroutine of a task, which can be left at any step."""

    def __init__(self, processes: Processes, process: Process, task: trio.lowlevel.Task) -> None:
        self.processes = processes
        self.process = process
        self._task = task
        self._coroutine: Any = task.coro
        self._held: list[Any] = []  # what was sent while another task was stopped
        self._greenlet = greenlet(self._run, processes.loop)
        self._greenlet.gr_context = task.context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # as Trio looks at a coroutine

    def send(self, value: Any) -> Any:
        """Go on, if the process does. Trio calls it."""
        process, processes = self.process, self.processes
        if process.stopped is self:
            process.stopped = None
        elif process.stopped is not None:
            if not self._held:  # else it is what woke this task when the process went on, and was stopped again
                self._held.append(value)
            process.waiting.append(self._task)
            return _WAIT
        elif self._held:
            value = self._held.pop()
        processes.running = self
        try:
            return self._greenlet.switch(value)
        finally:
            processes.running = None
            if process.stopped is None:
                process.fence()  # the kernel does, where a process waits
                waiting, process.waiting = process.waiting, []
                for task in waiting:
                    trio.lowlevel.reschedule(task)

    def throw(self, *error: Any) -> Any:
        """Raise an error inside. Trio calls it for an await that is not its own."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """Close the coroutine."""
        self._coroutine.close()

    def stop(self, seconds: float) -> None:
        """Leave the coroutine where it is, for some time.

        Raises:
            Killed: the process was killed meanwhile.
        """
        process = self.process
        process.stopped = self
        process.timer = self.processes.call_later(seconds, self._go_on)
        self.processes.loop.switch(_WAIT)
        if process.raises:
            raise Killed

    def _go_on(self) -> None:
        self.process.timer = None
        trio.lowlevel.reschedule(self._task)

    def _run(self, value: Any) -> Any:
        send, leave = self._coroutine.send, self.processes.loop.switch
        while True:
            value = leave(send(value))
