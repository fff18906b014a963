"""Every kind of store that there is, opened the same way, for tests that hold for all
of them.

A new client or transport is one more line in `STORES`. Asynchronous stores are used
through their loop as if they were blocking, so that one test, and one rule machine,
does for all.
"""

import tempfile
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeAlias, cast
from unittest import mock

import attrs
import pytest
import trio

import infinistore
from infinistore.blocking import BlockingStore
from infinistore.client import AsyncStore
from infinistore.client.extension import Environment
from infinistore.config import ServerConfig
from infinistore.core import StoreCore
from infinistore.protocol.server_connection import ServerConnection
from infinistore.protocol.versions import MINOR, OFFER, Capability, Offer
from infinistore.server.session import handshake
from tests.clients.dresses import DRESSES, opened
from tests.clients.event_loops import Loops, LoopThread, as_blocking
from tests.server.running import RunningServer, running_server, simulated_server
from tests.transports.fake_rdma import fabric_in_use
from tests.transports.memory_network import MemoryStream, random_chunks

__all__ = [
    "EMBEDDED",
    "REMOTE",
    "STORES",
    "Loops",
    "Opened",
    "damage",
    "differing",
    "servers_lack",
    "servers_offer",
    "shorten_deadline",
    "simulated_store",
    "when_idle",
]

_EVERYTHING = 1 << 40


def servers_lack(missing: Capability) -> AbstractContextManager[object]:
    """Servers that are started within cannot do this, as those of an older release."""
    return servers_offer(Offer(MINOR, OFFER.capabilities & ~missing))


def servers_offer(offer: Offer) -> AbstractContextManager[object]:
    """Servers that are started within say that they are of another release."""
    return mock.patch.object(handshake, "ServerConnection", partial(ServerConnection, offer=offer))


def shorten_deadline(store: Any, deadline_s: float) -> None:
    """From now on, calls of this remote store end after so long: those before had as
    long as a slow machine needs.
    """
    store.calls.options = attrs.evolve(store.calls.options, deadline_s=deadline_s)


@attrs.frozen
class Opened:
    """A store that is open. `look` runs a function where the core may be looked at: in
    its loop, when that is idle.

    `batch_keys` is how many keys one request takes; the store splits what is longer.
    """

    store: BlockingStore
    core: StoreCore
    look: Callable[[Callable[[], Any]], Any]
    batch_keys: int
    server: RunningServer | None = None


def damage(core: StoreCore, *keys: str, byte: int = 0) -> None:
    """Change a byte of each of these blocks behind the store's back."""
    core.commit_written()
    for key in keys:
        entry = core.index.get(key)
        assert entry is not None
        core.pool.view(entry[:3])[byte] ^= 1


Opener: TypeAlias = Callable[[Loops, ServerConfig, dict[str, Any], int], AbstractContextManager[Opened]]
"""Opens a store, with the settings of its server, its own options, and a seed for how a
simulated network splits.
"""


def _embedded_options(config: ServerConfig, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "pool_bytes": config.prealloc_bytes,
        "minimal_allocate_bytes": config.minimal_allocate_bytes,
        "disk": list(map(str, config.disks)),
        "disk_admission": config.disk_admission,
        "disk_wait_s": config.disk_wait_s,
        **options,
    }


def _embedded(dress: str) -> Opener:
    @contextmanager
    def opener(loops: Loops, config: ServerConfig, options: dict[str, Any], seed: int) -> Iterator[Opened]:
        with opened(loops, dress, None, **_embedded_options(config, options)) as store:
            core: StoreCore = store.embedded.core  # type: ignore[attr-defined]
            look = (lambda function: function()) if dress == "threads" else getattr(loops, dress).run_sync
            yield Opened(store, core, look, _EVERYTHING)

    return opener


async def when_idle(function: Callable[[], Any]) -> Any:
    """Run a function in this loop. A server that has sent a reply may have a little
    left to do: let it.
    """
    await trio.testing.wait_all_tasks_blocked()
    return function()


def looker(loops: Loops) -> Callable[[Callable[[], Any]], Any]:
    return lambda function: loops.trio.run(when_idle, function)


def _address(server: RunningServer, config: ServerConfig, options: dict[str, Any]) -> str:
    if "device" in options:
        return f"rdma://127.0.0.1:{server.server.addresses.port}"
    scheme = "shm" if "inline_bytes" in options else "unix"
    return server.url if config.unix_socket == "off" else f"{scheme}://{server.unix_path}"


def _remote(dress: str) -> Opener:
    @contextmanager
    def opener(loops: Loops, config: ServerConfig, options: dict[str, Any], seed: int) -> Iterator[Opened]:
        with (
            loops.trio.entered(lambda: running_server(config)) as server,
            opened(loops, dress, _address(server, config, options), **options) as store,
        ):
            yield Opened(store, server.core, looker(loops), config.max_batch_keys, server)

    return opener


def _shared(opener: Opener) -> Opener:
    """The same by shared memory, and every block by it, however short."""

    @contextmanager
    def wrapped(loops: Loops, config: ServerConfig, options: dict[str, Any], seed: int) -> Iterator[Opened]:
        with tempfile.TemporaryDirectory() as folder:
            config = attrs.evolve(config, unix_socket=f"{folder}/store.sock")
            with opener(loops, config, {"inline_bytes": 0, **options}, seed) as store:
                yield store

    return wrapped


def _by_rdma(opener: Opener) -> Opener:
    """The same by RDMA between devices of this process, with little staging, so that
    what is long goes in pieces.
    """

    @contextmanager
    def wrapped(loops: Loops, config: ServerConfig, options: dict[str, Any], seed: int) -> Iterator[Opened]:
        given = {"device": "fake1", "inline_bytes": 0, "staging_bytes": 16 * 1024, **options}
        with fabric_in_use(), opener(loops, config, given, seed) as store:
            yield store

    return wrapped


@contextmanager
def _simulated(loops: Loops, config: ServerConfig, options: dict[str, Any], seed: int) -> Iterator[Opened]:
    with loops.trio.entered(lambda: simulated_store(config, options, seed=seed)) as (store, server):
        yield Opened(as_blocking(store, loops.trio), server.core, looker(loops), config.max_batch_keys, server)


@asynccontextmanager
async def simulated_store(
    config: ServerConfig | None = None, options: dict[str, Any] | None = None, *, seed: int = 1
) -> AsyncGenerator[tuple[AsyncStore, RunningServer], None]:
    """The Trio client and the server as they are, in a simulated network that splits
    what is sent anywhere.
    """
    async with simulated_server(config, random_chunks(seed)) as server:
        listener = server.listener
        assert listener is not None

        async def connect(*_: object) -> MemoryStream:
            await trio.lowlevel.checkpoint()
            return listener.connect_stream()

        async with infinistore.open_store(
            "tcp://simulated", environment=Environment(connect=connect), **(options or {})
        ) as store:
            yield store, server


EMBEDDED: dict[str, Opener] = {f"embedded-{dress}": _embedded(dress) for dress in DRESSES}
REMOTE: dict[str, Opener] = {
    **{dress: _remote(dress) for dress in DRESSES},
    "simulated": _simulated,
    **{f"shm-{dress}": _shared(_remote(dress)) for dress in DRESSES},
    **{f"rdma-{dress}": _by_rdma(_remote(dress)) for dress in DRESSES},
}
STORES: dict[str, Opener] = {**EMBEDDED, **REMOTE}

_DIFFERING = ("embedded-threads", "threads", "shm-trio", "rdma-asyncio")
"""Each way that blocks take, and each driver."""


def differing(kinds: Iterable[str], *chosen: str) -> list[Any]:
    """These kinds as parameters of examples. What a call does depends on the way that
    its blocks take, and not on who drives it, so that one kind for each way does, or
    those that are `chosen`; the rest are nightly.
    """
    return [kind if kind in (chosen or _DIFFERING) else pytest.param(kind, marks=pytest.mark.nightly) for kind in kinds]


class _Silent(BlockingStore):
    def _call(self, request: Any) -> Any:
        raise AssertionError("something was sent")


class _SilentAsync(AsyncStore):
    async def _call(self, request: Any) -> Any:
        raise AssertionError("something was sent")


SILENT = {"blocking": _Silent(), "async": as_blocking(_SilentAsync(), cast(LoopThread, trio))}
"""Stores for what is refused before anything is sent: whatever they send is an
error.
"""
