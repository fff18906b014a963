"""`register_server`: a server inside the caller's process, and its requests.

The original ran its server in the caller's uvloop. This one runs in a separate thread
with a Trio loop, so that neither waits for the other's callbacks. It still shares the
interpreter with the caller. For speed, run a separate process: `infinistore`, or
`python -m infinistore.server`.
"""

import asyncio
import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar
from urllib.parse import quote

import attrs
import trio

from infinistore.addresses import own_address, with_port
from infinistore.blocking import BlockingStore, open_store
from infinistore.config import ServerConfig
from infinistore.errors import InvalidRequest, StoreUnavailable
from infinistore.host import start_thread
from infinistore.kept_errors import KeptError
from infinistore.secret_files import read_token
from infinistore.server import ServerAddresses, serve

_T = TypeVar("_T")
_log = logging.getLogger("infinistore.dropin")
_registered: "list[RegisteredServer]" = []
"""The servers of this process. The original's functions use the latest one."""


def register_server(loop: asyncio.AbstractEventLoop | None, config: ServerConfig) -> "RegisteredServer":
    """Start a server in this process. Returns when it listens.

    It stops when `stop()` of the returned object is called, when `loop` is gone (closed
    and unreferenced), and when the process ends. The loop does not have to run. As in
    the original, the caller serves the management port; `purge_kv_map`,
    `get_kvmap_len` and `evict_cache` implement its requests.

    Raises:
        ConfigError: a setting, a port or a path is invalid.
        OutOfMemory: the machine has no memory for the pool.
        StoreUnavailable: the process cannot start another thread.
    """
    server = RegisteredServer(config)
    _registered.append(server)
    if loop is not None:
        weakref.finalize(loop, server.request_stop).atexit = False
    return server


def get_kvmap_len() -> int:
    """Return the number of keys of this process's server.

    Raises:
        StoreUnavailable: this process has no server.
    """
    return _server().ask(lambda store: store.stats().store.keys)


def purge_kv_map() -> int:
    """Delete every key of this process's server. Returns how many there were.

    Raises:
        StoreUnavailable: this process has no server.
    """
    return _server().ask(lambda store: store.purge())


def evict_cache(min_threshold: float, max_threshold: float) -> int:
    """Evict down to `min_threshold` if more than `max_threshold` of the pool is in use.

    Both are fractions of the pool, from 0 to 1. Returns the number of evicted blocks.

    Raises:
        InvalidRequest: the thresholds are not in this order, or not from 0 to 1.
        StoreUnavailable: this process has no server.
    """
    if not 0 <= min_threshold < max_threshold <= 1:
        raise InvalidRequest(
            f"min_threshold must be less than max_threshold, both between 0 and 1, not {min_threshold} and"
            f" {max_threshold}"
        )
    return _server().ask(lambda store: store.evict(min_threshold, max_threshold))


def _server() -> "RegisteredServer":
    for server in reversed(_registered):
        if server.running:
            return server
    raise StoreUnavailable("no server runs in this process; call register_server(loop, config) first")


class RegisteredServer:
    """A server in a thread of this process, from its construction until `stop`."""

    def __init__(self, config: ServerConfig) -> None:
        # Management is left out: a program of the original serves its own on that port.
        self._config = attrs.evolve(config, manage_port=None)
        self._ready = threading.Event()
        self._addresses: ServerAddresses | None = None
        self._failure: KeptError | None = None
        self._scope = trio.CancelScope()
        self._trio_token: trio.lowlevel.TrioToken | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="infinistore-server", daemon=True)
        start_thread(self._thread)
        try:
            self._ready.wait()
        except BaseException:  # Ctrl-C, while it takes its memory
            self.request_stop()
            raise
        if self._failure is not None:
            self._thread.join()
            raise self._failure.again()
        atexit.register(self.stop)  # while daemon threads still run

    @property
    def addresses(self) -> ServerAddresses:
        """Where clients can reach it."""
        assert self._addresses is not None
        return self._addresses

    @property
    def running(self) -> bool:
        """Whether it is running."""
        return self._thread.is_alive()

    def ask(self, question: Callable[[BlockingStore], _T]) -> _T:
        """Call a function with a store that is connected to it."""
        token = read_token(self._config.token_file) if self._config.token_file else ""
        with open_store(self._url(), token=token) as store:
            return question(store)

    def stop(self) -> None:
        """Stop the server and wait until its memory is freed. Idempotent."""
        self.request_stop()
        self._thread.join()
        atexit.unregister(self.stop)
        if self in _registered:
            _registered.remove(self)

    def request_stop(self) -> None:
        """As `stop`, without waiting."""
        if self._trio_token is not None and self._process == os.getpid():  # a forked child has no such thread
            with suppress(trio.RunFinishedError):
                self._trio_token.run_sync_soon(self._scope.cancel)

    def _run(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:  # noqa: BLE001 - handed on to who waits for the server, or logged
            self._failure = KeptError(error)
            if self._addresses is not None:
                _log.exception("the server of this process has failed")
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._trio_token = trio.lowlevel.current_trio_token()
        with self._scope:
            await serve(self._config, task_status=self)

    def started(self, value: ServerAddresses | None = None) -> None:
        """Trio's task status: the server reports its addresses once it listens."""
        self._addresses = value
        self._ready.set()

    def _url(self) -> str:
        if self.addresses.unix_socket is not None:
            return f"unix://{quote(str(self.addresses.unix_socket))}"
        host, port = self.addresses.tcp[0]
        return f"tcp://{with_port(own_address(host), port)}"
