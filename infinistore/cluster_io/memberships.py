"""Memberships that something runs: a watched file (inotify of Linux, on Trio), and
etcd.

`run` is a Trio task: a server starts it in its nursery, and the thread of a process in
its own (`infinistore.cluster_io.thread`). Any thread may read the view.
"""

import abc
import contextlib
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

import trio

from infinistore.addresses import with_port
from infinistore.cluster.documents import WrongDocument, read_file
from infinistore.cluster.etcd.follower import Follower
from infinistore.cluster.etcd.layout import Layout
from infinistore.cluster.etcd.session import Credentials, EtcdSession
from infinistore.cluster.locate import EtcdPlace, FilePlace
from infinistore.cluster.membership import Listener, View
from infinistore.cluster_io.etcd import AskInstance, Connect, EtcdConnections, FlowRunner, connect
from infinistore.cluster_io.probing import ConnectNode, NodeTls, instance_asker
from infinistore.errors import StoreUnavailable
from infinistore.secret_files import read_token
from infinistore.transports.sockets.trio_streams import connect_tcp

_log = logging.getLogger("infinistore.cluster")
_CLOSE_WRITE, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x8, 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _MOVE_SELF = 0x400, 0x800
_MASK: Final = _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF


class FolderWatch:
    """What happens to the entries of some folders until it is closed."""

    def __init__(self, folders: "set[Path]") -> None:
        """Raises OSError if a folder cannot be watched."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        for folder in folders:
            if libc.inotify_add_watch(self._descriptor, os.fsencode(folder), _MASK) < 0:
                number = ctypes.get_errno()
                os.close(self._descriptor)
                raise OSError(number, os.strerror(number))

    async def changed(self) -> None:
        """Wait until something has changed since the last call."""
        await trio.lowlevel.wait_readable(self._descriptor)
        try:
            while os.read(self._descriptor, 64 * 1024):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        """Watch no longer."""
        trio.lowlevel.notify_closing(self._descriptor)
        os.close(self._descriptor)


_READ_AGAIN_S: Final = 30.0
_RETRY_S: Final = 2.0


class RunningMembership(abc.ABC):
    """What both kinds share. `clock` is that of the tasks that run it."""

    def __init__(self, clock: Callable[[], float], source: str) -> None:
        self._clock = clock
        self._source = source
        self._view: View | None = None
        self._known = threading.Event()
        self._listeners: list[Listener] = []
        self.problem = ""
        """What kept the last view from coming; empty if nothing did."""

    @abc.abstractmethod
    async def run(self) -> None:
        """Follow the cluster until cancelled."""

    @property
    @abc.abstractmethod
    def confirmed_at(self) -> float | None:
        """When the view was last known to hold, by the clock that was given."""

    @property
    def view(self) -> View:
        """The newest view; one without nodes and with epoch -1 if there is none yet."""
        return self._view or View(-1)

    @property
    def age_s(self) -> float:
        """For how long nothing has confirmed the view; infinite if there is none."""
        confirmed_at = self.confirmed_at
        return float("inf") if confirmed_at is None else max(0.0, self._clock() - confirmed_at)

    def wait_known(self, timeout_s: float) -> None:
        """Wait until there is a view. Blocking.

        Raises:
            StoreUnavailable: there is none in time.
        """
        if not self._known.wait(timeout_s):
            problem = self.problem or f"no answer from {self._source}"
            raise StoreUnavailable(f"no view of the cluster within {timeout_s:g} s: {problem}")

    def add_listener(self, listener: Listener) -> Callable[[], None]:
        """Have `listener` called with each new view; returns what ends that."""
        self._listeners = [*self._listeners, listener]

        def remove() -> None:
            self._listeners = [one for one in self._listeners if one is not listener]

        return remove

    def _publish(self, view: View) -> None:
        self._view = view
        self.problem = ""
        self._known.set()
        for listener in self._listeners:
            listener(view)

    def _note(self, problem: str) -> None:
        self.problem = problem


class FileMembership(RunningMembership):
    """A file that lists the nodes, read again whenever it is replaced."""

    def __init__(self, place: FilePlace, *, clock: Callable[[], float] = trio.current_time) -> None:
        super().__init__(clock, str(place.path))
        self._path = place.path
        self._text: bytes | None = None
        self._confirmed_at: float | None = None
        self._epoch = 0

    @property
    def confirmed_at(self) -> float | None:
        """When the file was last read."""
        return self._confirmed_at

    async def run(self) -> None:
        """Read the file, and read it again whenever its folder changes. Only Linux
        tells of that; elsewhere, every two seconds.
        """
        while sys.platform != "linux":
            await self._read()
            await trio.sleep(_RETRY_S)
        while True:
            try:
                with contextlib.closing(FolderWatch(self._folders())) as watch:
                    await self._read()
                    # A file system that others write to may tell nothing.
                    with trio.move_on_after(_READ_AGAIN_S):
                        await watch.changed()
            except OSError as error:
                await trio.lowlevel.checkpoint()  # whoever has ended this may have removed the folder then
                self._tell(f"cannot be watched: {error.strerror}")
                await self._read()
                await trio.sleep(_RETRY_S)

    def _folders(self) -> set[Path]:
        # Kubernetes replaces a link in the same folder; other links lead elsewhere.
        return {self._path.parent, self._path.resolve().parent}

    async def _read(self) -> None:
        try:
            text = await trio.to_thread.run_sync(self._path.read_bytes, abandon_on_cancel=True)
            view = None if text == self._text else read_file(text, self._epoch)
        except OSError as error:
            self._tell(f"cannot be read: {error.strerror}")
        except WrongDocument as error:
            self._tell(str(error))
        else:
            self._confirmed_at = self._clock()  # first, so that a view that is there has an age
            self.problem = ""
            if view is not None:
                self._text = text
                self._epoch += 1
                self._publish(view)

    def _tell(self, problem: str) -> None:
        """Log a problem once, until there is another or none."""
        problem = f"{self._path} {problem}"
        if problem != self.problem:
            self._note(problem)
            _log.warning("the view of the cluster stays as it is: %s", problem)


class EtcdMembership(RunningMembership):
    """A cluster that registers in etcd."""

    def __init__(
        self,
        place: EtcdPlace,
        *,
        clock: Callable[[], float] = trio.current_time,
        random: Random | None = None,
        connect: Connect = connect,
        ask_instance: AskInstance | None = None,
    ) -> None:
        """Raises ConfigError if a file that `place` names cannot be used."""
        super().__init__(clock, f"etcd at {', '.join(with_port(*one) for one in place.endpoints)}")
        random = random or Random()
        self._runner = FlowRunner(EtcdConnections(place, connect), ask_instance=ask_instance or instance_asker(""))
        self._follower = Follower(
            make_session(place, random),
            Layout(place.cluster),
            clock=clock,
            random=random,
            on_view=self._publish,
            on_problem=self._note,
        )

    @property
    def confirmed_at(self) -> float | None:
        """When etcd last said what there is."""
        return self._follower.confirmed_at

    async def run(self) -> None:
        """Follow the cluster in etcd."""
        await self._runner.run(self._follower.run())


def make_session(place: EtcdPlace, random: Random) -> EtcdSession:
    """Return a session with etcd that begins at any of its members.

    Raises:
        ConfigError: the password cannot be read.
    """
    credentials = None
    if place.password_file is not None:
        password = read_token(place.password_file, setting="etcd_password_file", what="password")
        credentials = Credentials(place.user, password)
    members = len(place.endpoints)
    return EtcdSession(members, credentials, first=random.randrange(members))


def make_membership(
    place: FilePlace | EtcdPlace,
    token: str = "",
    tls: "NodeTls" = None,
    *,
    clock: Callable[[], float] = trio.current_time,
    random: Random | None = None,
    connect_etcd: Connect = connect,
    connect_node: ConnectNode = connect_tcp,
    ask_instance: AskInstance | None = None,
) -> RunningMembership:
    """Return the membership for a place. `token` is that of the servers,
    and `tls` is what they are asked with, unless `ask_instance` asks them.

    Raises:
        ConfigError: a file that `place` names cannot be used.
    """
    if isinstance(place, FilePlace):
        return FileMembership(place, clock=clock)
    ask_instance = ask_instance or instance_asker(token, tls, connect=connect_node)
    return EtcdMembership(place, clock=clock, random=random, connect=connect_etcd, ask_instance=ask_instance)
