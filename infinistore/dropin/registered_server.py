"""`register_server`: a server inside the caller's process, and what can be asked of it.

The original ran its server in the caller's uvloop. Here it runs in a thread of its own, with a Trio loop, so that
neither waits for the other's callbacks; it shares the interpreter with the caller all the same. A server that is to be
fast is a process of its own: `infinistore`, or `python -m infinistore.server`.
"""

import asyncio
import atexit
import ipaddress
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

from infinistore.blocking import BlockingStore, open_store
from infinistore.config import ServerConfig, read_token
from infinistore.errors import InvalidRequest, StoreUnavailable
from infinistore.server import ServerAddresses, serve

__all__ = ["RegisteredServer", "evict_cache", "get_kvmap_len", "purge_kv_map", "register_server"]

_T = TypeVar("_T")
_log = logging.getLogger("infinistore.dropin")
_registered: "list[RegisteredServer]" = []
"""The servers of this process. The functions of the original name none, so they mean the latest."""


def register_server(loop: asyncio.AbstractEventLoop | None, config: ServerConfig) -> "RegisteredServer":
    """Start a server in this process; return when it listens.

    It stops when `stop()` of what is returned is called, when `loop` is gone (closed, and no longer referred to), and
    when the process ends. The loop does not have to run. The management port is left to the caller, as it was by the
    original; requests that the original answered there are `purge_kv_map`, `get_kvmap_len` and `evict_cache`.

    Raises:
        ConfigError: a setting, a port or a path that cannot be used.
        OutOfMemory: the machine has no memory for the pool.
    """
    server = RegisteredServer(config)
    _registered.append(server)
    if loop is not None:
        weakref.finalize(loop, server.request_stop).atexit = False
    return server


def get_kvmap_len() -> int:
    """Return how many keys the server of this process has.

    Raises:
        StoreUnavailable: there is none.
    """
    return _server().ask(lambda store: store.stats().store.keys)


def purge_kv_map() -> int:
    """Delete every key of the server of this process; returns how many there were.

    Raises:
        StoreUnavailable: there is none.
    """
    return _server().ask(lambda store: store.purge())


def evict_cache(min_threshold: float, max_threshold: float) -> int:
    """If more than `max_threshold` of the pool is in use, evict cold blocks until at most `min_threshold` is.

    Both are parts of the pool, from 0 to 1. Returns how many blocks went.

    Raises:
        InvalidRequest: the thresholds are not in this order, or not between 0 and 1.
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
    """A server that runs in a thread of this process, from when it is made until `stop`."""

    def __init__(self, config: ServerConfig) -> None:
        # Management is left out: a program of the original serves its own on that port.
        self._config = attrs.evolve(config, manage_port=None)
        self._ready = threading.Event()
        self._addresses: ServerAddresses | None = None
        self._failure: BaseException | None = None
        self._scope = trio.CancelScope()
        self._trio_token: trio.lowlevel.TrioToken | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="infinistore-server", daemon=True)
        self._thread.start()
        try:
            self._ready.wait()
        except BaseException:  # Ctrl-C, while it takes its memory
            self.request_stop()
            raise
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        atexit.register(self.stop)  # while daemon threads still run

    @property
    def addresses(self) -> ServerAddresses:
        """Where it can be reached."""
        assert self._addresses is not None
        return self._addresses

    @property
    def running(self) -> bool:
        """Whether it still serves."""
        return self._thread.is_alive()

    def ask(self, question: Callable[[BlockingStore], _T]) -> _T:
        """Put a question to its store."""
        token = read_token(self._config.token_file) if self._config.token_file else ""
        with open_store(self._url(), token=token) as store:
            return question(store)

    def stop(self) -> None:
        """Close its connections, give its memory back, and wait until it has. Any number of times."""
        self.request_stop()
        self._thread.join()
        atexit.unregister(self.stop)
        if self in _registered:
            _registered.remove(self)

    def request_stop(self) -> None:
        """As `stop`, but do not wait."""
        if self._trio_token is not None and self._process == os.getpid():  # a forked child has no such thread
            with suppress(trio.RunFinishedError):
                self._trio_token.run_sync_soon(self._scope.cancel)

    def _run(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:  # noqa: BLE001 - handed on to who waits for the server, or logged
            self._failure = error
            if self._addresses is not None:
                _log.exception("the server of this process has failed")
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._trio_token = trio.lowlevel.current_trio_token()
        with self._scope:
            await serve(self._config, task_status=self)

    def started(self, value: ServerAddresses | None = None) -> None:
        """What Trio calls a task status: the server tells its addresses once it listens."""
        self._addresses = value
        self._ready.set()

    def _url(self) -> str:
        if self.addresses.unix_socket is not None:
            return f"unix://{quote(str(self.addresses.unix_socket))}"
        host, port = self.addresses.tcp[0]
        if ipaddress.ip_address(host).is_unspecified:
            host = "::1" if ":" in host else "127.0.0.1"
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
