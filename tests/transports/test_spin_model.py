"""Spinning in a model of a machine with two cores, in virtual time: clients in closed
loops, one server, and programs that compute all the time.

The model has what decides whether spinning pays. A sleeping task whose core is idle
takes long to wake. A core serves whoever came first, and somebody else after a slice. A
spinning task keeps its core meanwhile. What spins is `Spinner` itself, as far as it
decides.
"""

from collections import deque
from collections.abc import Callable

import pytest

from infinistore.settings import Spin
from infinistore.transports.sockets.spin import STALLED_S, Spinner

CORES = 2
TICK_S = 10e-6
SLICE = 70  # in ticks, as the next ones
WAKING_IDLE, WAKING = 6, 1
SENDING, SERVING, RECEIVING = 1, 3, 2
WARM_UP, COUNTED = 5_000, 10_000


class Task:
    """Something that wants a core from time to time."""

    gives_way = False

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        self.slice_left = SLICE
        self.asleep = False

    def step(self) -> None:
        """Run for a tick."""


class Program(Task):
    """It computes."""


class NicedProgram(Task):
    """It computes when nobody else does."""

    gives_way = True


class Peer(Task):
    """An end of a connection, which sends, works and waits."""

    def __init__(self, machine: "Machine", spin: Spin) -> None:
        super().__init__(machine)
        self.spinner = Spinner(spin, lambda: machine.now * TICK_S)
        self.arrived: deque[Peer] = deque()
        self.busy = 0
        self._then: Callable[[], None] = self.wait
        self._since = self._last = self._lost = 0
        self._end_s = 0.0

    def work(self, ticks: int, then: Callable[[], None]) -> None:
        """Be busy, then do something."""
        self.busy, self._then = ticks, then

    def wait(self) -> None:
        """Spin for a message, or sleep."""
        now = self.machine.now
        self._since = self._last = now
        self._lost = 0
        self._end_s = self.spinner.begin(now * TICK_S)
        if not self._end_s:
            self.sleep()

    def sleep(self) -> None:
        """Wait until a message comes."""
        self._end_s = 0.0
        self.asleep = not self.arrived

    def step(self) -> None:
        now = self.machine.now
        if self.busy:
            self.busy -= 1
            if not self.busy:
                self._then()
            return
        if self._end_s:
            gap, self._last = now - self._last, now
            self._lost += gap if gap * TICK_S > STALLED_S else 0
            spun_s = (now - self._since) * TICK_S
            if self.arrived:
                self.spinner.hit(spun_s, self._lost * TICK_S)
                self._end_s = 0.0
            elif now * TICK_S >= self._end_s:
                self.spinner.missed(spun_s)
                self.sleep()
                return
        if self.arrived:
            self.receive(self.arrived.popleft())

    def receive(self, sender: "Peer") -> None:
        """Do what a message asks for."""

    def send(self, peer: "Peer") -> None:
        """Give a message to a peer, and wake it."""
        peer.arrived.append(self)
        if peer.asleep:
            peer.asleep = False
            self.machine.wake(peer)


class Server(Peer):
    """It answers."""

    def receive(self, sender: Peer) -> None:
        self.spinner.moved(sender)

        def reply() -> None:
            self.send(sender)
            self.spinner.moved(sender)
            if not self.arrived:
                self.wait()

        self.work(SERVING, reply)


class Client(Peer):
    """It asks again and again."""

    def __init__(self, machine: "Machine", spin: Spin, server: Server) -> None:
        super().__init__(machine, spin)
        self.server = server
        self.calls = 0
        self.leaves = False
        self.receive(self)

    def receive(self, sender: Peer) -> None:
        self.spinner.moved(self)
        self.asleep = self.leaves

        def ask() -> None:
            self.calls += 1
            self.spinner.moved(self)
            self.send(self.server)
            self.wait()

        self.work(RECEIVING + SENDING, ask)


class Machine:
    """Cores, and who waits for one."""

    def __init__(self) -> None:
        self.now = 0
        self.queue: deque[Task] = deque()
        self.running: list[Task | None] = [None] * CORES
        self.waking: list[tuple[int, Task]] = []

    def wake(self, task: Task) -> None:
        """Make a task ready to run, some time later."""
        idle = any(one is None for one in self.running)
        self.waking.append((self.now + (WAKING_IDLE if idle else WAKING), task))

    def tick(self) -> None:
        """Let time pass."""
        self.now += 1
        self.queue += [task for at, task in self.waking if at <= self.now]
        self.waking = [(at, task) for at, task in self.waking if at > self.now]
        for core in range(CORES):
            task = self.running[core]
            waiting = next((one for one in self.queue if not one.gives_way), None)
            if task is not None and waiting is not None and (task.slice_left <= 0 or task.gives_way):
                self.queue.append(task)
                task = None
            if task is None and self.queue:
                task = waiting or self.queue[0]
                self.queue.remove(task)
                task.slice_left = SLICE
            self.running[core] = task
            if task is not None:
                task.slice_left -= 1
                task.step()
                if task.asleep:
                    self.running[core] = None


def calls_made(spin: Spin, clients: int, programs: type[Task] | None) -> int:
    """Return how many calls clients make together in 100 ms."""
    machine = Machine()
    server = Server(machine, spin)
    server.asleep = True
    all_clients = [Client(machine, spin, server) for _ in range(clients)]
    machine.queue += all_clients
    machine.queue += [programs(machine) for _ in range(CORES)] if programs else []
    for _ in range(WARM_UP):
        machine.tick()
    before = sum(client.calls for client in all_clients)
    for _ in range(COUNTED):
        machine.tick()
    return sum(client.calls for client in all_clients) - before


@pytest.mark.parametrize("programs", [None, Program, NicedProgram])
@pytest.mark.parametrize("clients", [1, 2, 4, 8])
def test_adaptive_spinning_is_never_far_from_the_better_of_on_and_off(
    clients: int, programs: type[Task] | None
) -> None:
    off, on, adaptive = (calls_made(spin, clients, programs) for spin in ("off", 400, "adaptive"))
    assert adaptive >= 0.9 * max(off, on), (off, on, adaptive)


def test_neither_on_nor_off_is_best_everywhere() -> None:
    assert calls_made(400, 1, None) > 1.5 * calls_made("off", 1, None)
    assert calls_made("off", 4, None) > 1.2 * calls_made(400, 4, None)
    assert calls_made("off", 8, Program) > 1.1 * calls_made(400, 8, Program)


def test_a_client_that_is_alone_again_spins_again_soon() -> None:
    machine = Machine()
    server = Server(machine, "adaptive")
    server.asleep = True
    clients = [Client(machine, "adaptive", server) for _ in range(4)]
    machine.queue += clients
    for _ in range(COUNTED):
        machine.tick()
    for client in clients[1:]:
        client.leaves = True
    for _ in range(2 * COUNTED):
        machine.tick()
    hits, calls = clients[0].spinner.statistics().hits, clients[0].calls
    for _ in range(WARM_UP):
        machine.tick()
    assert clients[0].calls - calls > 500
    assert clients[0].spinner.statistics().hits - hits >= clients[0].calls - calls - 1
