"""Clusters inside a test: each server in a loop and a thread of its own, so that it can
be stopped, silenced and started again where it was.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Final

from infinistore import blocking, open_store
from infinistore.client.extension import Environment
from infinistore.cluster.documents import Drain
from infinistore.cluster.membership import Listener, Node, View
from infinistore.core import StoreCore
from infinistore.server.cluster import Others, PushLimits, open_nodes, push
from tests.asking import until
from tests.clients.event_loops import TrioThread
from tests.ports import own_ports
from tests.server.running import RunningServer, make_config, running_server

__all__ = [
    "PATIENT",
    "Cluster",
    "Given",
    "Member",
    "open_given",
    "open_given_async",
    "pass_on",
    "running_cluster",
    "until",
]

PATIENT: Final[dict[str, Any]] = {"deadline_s": 600.0, "lookup_deadline_s": 60.0}
"""Options of a store for which no node that is there counts as lost, however busy the
machine is.
"""


def _aside(work: Callable[[], Any]) -> Any:
    """Do something in a thread, for tests that run in a loop: they may not talk to
    another one.
    """
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


class Member:
    """One server of a cluster."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._stack = ExitStack()
        self._awake = threading.Event()
        (self.port,) = own_ports(1)
        self.server: RunningServer | None = None
        self.start()

    def start(self) -> None:
        """Start it, where it was before; what it had is gone."""
        _aside(self._start)

    def _start(self) -> None:
        self._loop = self._stack.enter_context(TrioThread())
        config = make_config(service_port=self.port, **self._settings)
        self.server = self._stack.enter_context(self._loop.entered(lambda: running_server(config)))

    def stop(self) -> None:
        """End it; nobody answers at its port."""
        self.wake()
        _aside(self._stack.close)
        self.server = None

    def silence(self) -> None:
        """Let it do nothing, without a word, as if it were stopped by a signal."""
        self._awake.clear()
        asleep = threading.Event()

        def sleep() -> None:
            asleep.set()
            self._awake.wait()

        self._sleeper = threading.Thread(target=self._loop.run_sync, args=(sleep,))
        self._sleeper.start()
        asleep.wait()

    def wake(self) -> None:
        """End its silence."""
        if not self._awake.is_set():
            self._awake.set()
            if hasattr(self, "_sleeper"):
                self._sleeper.join()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def core(self) -> StoreCore:
        assert self.server is not None
        return self.server.core

    def look(self, function: Callable[[], Any]) -> Any:
        """Run a function in the loop of the server."""
        return _aside(lambda: self._loop.run_sync(function))

    def run(self, function: Callable[[], Any]) -> Any:
        """Run an asynchronous function in the loop of the server."""
        return _aside(lambda: self._loop.run(function))

    def wait_until_quiet(self) -> None:
        """Wait until nobody is connected, and nothing is leased."""
        server = self.server
        assert server is not None
        _aside(lambda: self._loop.run(server.quiet))

    def keys(self) -> set[str]:
        """What it has."""
        found: set[str] = self.look(lambda: set(self.core.index))
        return found


class Cluster:
    """Some servers. `url` names all of them."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members

    def url(self, *options: str) -> str:
        hosts = ",".join(member.address for member in self.members)
        return f"infinistore+static://{hosts}" + ("?" + "&".join(options) if options else "")

    def clear(self) -> None:
        """Let everybody run, with nothing in it."""
        for member in self.members:
            member.wake()
            if member.server is None:
                member.start()
            member.look(member.core.purge)

    def nodes(self, **changes: Any) -> list[Node]:
        """The members as nodes of a view: a, b, c and so on."""
        return [
            Node(**{"id": chr(97 + number), "address": f"infinistore://{member.address}", **changes})
            for number, member in enumerate(self.members)
        ]


@contextmanager
def running_cluster(count: int, **settings: Any) -> Iterator[Cluster]:
    """So many servers, until the block is left."""
    members: list[Member] = []
    try:
        members.extend(Member(**settings) for _ in range(count))
        yield Cluster(members)
    finally:
        for member in members:
            member.stop()


class Given:
    """A membership that says what the test gives it."""

    def __init__(self, nodes: Sequence[Node], **settings: Any) -> None:
        self.age_s = 0.0
        self.view = View(1, tuple(nodes), **settings)
        self.closed = False

    def give(self, nodes: Sequence[Node], **settings: Any) -> None:
        self.view = View(self.view.epoch + 1, tuple(nodes), **settings)

    def wait_known(self, timeout_s: float) -> None:
        """There is a view."""

    def add_listener(self, listener: Listener) -> Callable[[], None]:
        return lambda: None

    def close(self) -> None:
        self.closed = True


_NOBODY: Final = "infinistore+static://nobody:1"


def _environment(membership: Any) -> Environment:
    return Environment(membership=lambda url: membership)


def open_given(given: Given, **options: Any) -> AbstractContextManager[Any]:
    """A store of a cluster with this membership. However busy the machine is, no node
    counts as lost.
    """
    return blocking.open_store(_NOBODY, environment=_environment(given), **{"lookup_deadline_s": 60.0, **options})


def open_given_async(given: Any, **options: Any) -> AbstractAsyncContextManager[Any]:
    """The same for Trio."""
    return open_store(_NOBODY, environment=_environment(given), **{"lookup_deadline_s": 60.0, **options})


def pass_on(
    member: Member, others: Others, opened: Any = None, told: Callable[[Drain], None] = lambda drain: None
) -> None:
    """Have a node push what it has to the others, as it does itself when it drains."""
    limits = PushLimits(most_bytes=1 << 40, bytes_per_s=1 << 40, settle_s=0.0)
    opened = opened or partial(open_nodes, _NOBODY, _environment(others), lookup_deadline_s=60.0, lazy=True)
    member.run(partial(push, member.core, opened, others.has_place, limits, told))
