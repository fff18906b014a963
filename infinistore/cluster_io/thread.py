"""The one thread of a process in which its clients hear who is in their clusters.

It starts with the first membership that somebody opens and ends with the last one that
is closed. Stores that name the same cluster share a membership. A forked child has no
such thread, and what was open keeps its last view: stores that were opened before the
fork refuse calls there anyway.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import trio

from infinistore.cluster.locate import ClusterUrl, EtcdPlace, FilePlace, StaticPlace
from infinistore.cluster.membership import Listener, Membership, StaticMembership, View
from infinistore.cluster_io.memberships import RunningMembership, make_membership
from infinistore.host import start_thread

if TYPE_CHECKING:
    from ssl import SSLContext

_log = logging.getLogger("infinistore.cluster")


def open_membership(url: ClusterUrl, token: str = "", tls: "SSLContext | None" = None) -> Membership:
    """Return a membership of a cluster, which may have no view yet; `wait_known` waits
    for one. Close it when it is no longer needed. `token` is that of the servers,
    and `tls` is what they are asked with: that of the first who opens it, for all.

    Raises:
        ConfigError: a file that the URL names cannot be used.
        StoreUnavailable: the system gives this process no thread.
    """
    if isinstance(url.place, StaticPlace):
        return StaticMembership(url.place.nodes, copies=url.place.copies)
    return _all.open(url.place, token, tls)


class Share:
    """What one caller of `open_membership` has of a membership."""

    def __init__(self, membership: RunningMembership, release: Callable[[], None]) -> None:
        self._membership = membership
        self._release = release
        self._removers: list[Callable[[], None]] = []
        self._open = threading.Lock()

    @property
    def view(self) -> View:
        """The newest view."""
        return self._membership.view

    @property
    def age_s(self) -> float:
        """For how long nothing has confirmed it."""
        return self._membership.age_s

    def wait_known(self, timeout_s: float) -> None:
        """Wait until there is a view."""
        self._membership.wait_known(timeout_s)

    def add_listener(self, listener: Listener) -> Callable[[], None]:
        """Have a listener called with each new view, until this is closed."""
        remove = self._membership.add_listener(listener)
        self._removers.append(remove)
        return remove

    def close(self) -> None:
        """Hear nothing more."""
        if self._open.acquire(blocking=False):  # for good: the first call closes
            for remove in self._removers:
                remove()
            self._release()


@attrs.define
class _Shared:
    membership: RunningMembership
    users: int = 0


class _Thread:
    """A thread that runs memberships on Trio. One owner calls it, not concurrently."""

    def __init__(self) -> None:
        """Raises StoreUnavailable if the system refuses it."""
        self._ready = threading.Event()
        self._scopes: dict[RunningMembership, trio.CancelScope] = {}
        start_thread(threading.Thread(target=trio.run, args=(self._main,), name="cluster membership", daemon=True))
        self._ready.wait()

    def start(self, membership: RunningMembership) -> None:
        """Run a membership."""
        self._token.run_sync_soon(self._start, membership)

    def stop(self, membership: RunningMembership) -> None:
        """Run it no longer."""
        self._token.run_sync_soon(self._stop, membership)

    def end(self) -> None:
        """End the thread, soon."""
        self._token.run_sync_soon(self._over.set)

    async def _main(self) -> None:
        async with trio.open_nursery() as self._nursery:
            self._over = trio.Event()
            self._token = trio.lowlevel.current_trio_token()
            self._ready.set()
            await self._over.wait()
            self._nursery.cancel_scope.cancel()

    def _start(self, membership: RunningMembership) -> None:
        scope = self._scopes[membership] = trio.CancelScope()
        self._nursery.start_soon(self._run, membership, scope)

    def _stop(self, membership: RunningMembership) -> None:
        self._scopes.pop(membership).cancel()

    async def _run(self, membership: RunningMembership, scope: trio.CancelScope) -> None:
        try:
            with scope:
                await membership.run()
        except Exception:  # noqa: BLE001  # a fault of ours in one cluster must not end the others
            _log.exception("internal error; the view of the cluster stays as it is")


class _Memberships:
    """The memberships of this process that need a thread."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._shared: dict[tuple[FilePlace | EtcdPlace, str], _Shared] = {}
        self._thread: _Thread | None = None

    def open(self, place: FilePlace | EtcdPlace, token: str, tls: "SSLContext | None" = None) -> Membership:
        key = (place, token)
        with self._lock:
            shared = self._shared.get(key)
            if shared is None:
                shared = _Shared(make_membership(place, token, tls, clock=time.monotonic))
                if self._thread is None:
                    self._thread = _Thread()
                self._thread.start(shared.membership)
                self._shared[key] = shared
            shared.users += 1
        return Share(shared.membership, lambda: self._release(key))

    def _release(self, key: tuple[FilePlace | EtcdPlace, str]) -> None:
        if os.getpid() != self._process:
            return  # the lock and the thread are the parent's
        with self._lock:
            shared = self._shared[key]
            shared.users -= 1
            if shared.users or self._thread is None:
                return
            del self._shared[key]
            self._thread.stop(shared.membership)
            if not self._shared:
                self._thread.end()
                self._thread = None


_all = _Memberships()


def _after_fork_in_child() -> None:
    global _all  # noqa: PLW0603
    _all = _Memberships()


os.register_at_fork(after_in_child=_after_fork_in_child)
