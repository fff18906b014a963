"""The contract of movers as a test suite, for any transport that a store can be told to
use.

With pytest, in a test file of the package that brings the transport, which must be
installed:

    from infinistore.mover_contract import MoverContract

    class TestLoopback(MoverContract):
        transport = "loopback"

Without pytest, `broken_rules(TestLoopback)` returns what failed.

Each test runs a server in a thread of this process, and a blocking store on it. This
module needs Hypothesis (`pip install hypothesis`). Nothing else in InfiniStore imports
this module.
"""

import itertools
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, ClassVar

import hypothesis
import trio
import trio.testing
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from infinistore.allocators.contract import ContractViolation, require
from infinistore.blocking import BlockingStore, open_store
from infinistore.client.extension import Environment
from infinistore.config import ServerConfig
from infinistore.errors import BufferTooSmall, ChecksumMismatch, KeyNotFound, StoreUnavailable
from infinistore.host import start_thread
from infinistore.protocol.messages import NO_CHECKSUM
from infinistore.server.composition import run_server
from infinistore.server.server import Server
from infinistore.transports.sockets.blocking_streams import connect_tcp, connect_unix

__all__ = ["ContractViolation", "MoverContract", "broken_rules"]

_KEYS = [f"key/{i}" for i in range(6)]
_SIZES = st.one_of(st.integers(1, 300), st.sampled_from([4096, 65_536, 65_537, 200_000]))
_CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.dictionaries(st.sampled_from(_KEYS), _SIZES), st.booleans()),
        st.tuples(st.just("get"), st.lists(st.sampled_from(_KEYS)), st.booleans()),
        st.tuples(st.just("delete"), st.sets(st.sampled_from(_KEYS)), st.just(False)),
    ),
    max_size=12,
)
_BLOCKS = {f"block/{i}": bytes([i]) * size for i, size in enumerate([1, 64, 100_000, 5000, 65_537, 100_000])}


class MoverContract:
    """The tests that every mover passes. Name the transport in a subclass."""

    transport: ClassVar[str]
    """The name of the transport: what the option `transport` of `open_store` takes."""

    settings: ClassVar[hypothesis.settings | None] = None
    """How much Hypothesis tries; None: as its profile says."""

    options: ClassVar[dict[str, Any]] = {}
    """Further options of the stores, such as `inline_bytes=0`."""

    shown_as: ClassVar[str] = ""
    """What statistics call the transport, if not by its name."""

    def surroundings(self) -> AbstractContextManager[object]:
        """Return what has to be entered around each test: a device, say."""
        return nullcontext()

    @contextmanager
    def serving(self) -> "Iterator[_Serving]":
        """Run a server, with 16 MiB in units of 1 KiB and batches of at most 64
        keys.
        """
        with self.surroundings(), _running_server() as running:
            yield _Serving(running, {"transport": self.transport, **self.options})

    def test_the_statistics_name_it(self) -> None:
        """What was asked for is in use."""
        with self.serving() as serving, serving.open() as store:
            found = store.stats().transport
            require(found == (self.shown_as or self.transport), "statistics name the transport", found)

    def test_calls_in_any_order_agree_with_a_dict(self) -> None:
        """Puts that replace or skip, reads of what is there and missing, of any
        size.
        """
        numbers = itertools.count()

        @hypothesis.settings(self.settings, deadline=None)
        @hypothesis.given(_CALLS)
        def check(calls: list[Any]) -> None:
            store.purge()
            model: dict[str, bytes] = {}
            for kind, what, flag in calls:
                if kind == "put":
                    items = {
                        key: next(numbers).to_bytes(8, "big") * (n // 8) + b"." * (n % 8) for key, n in what.items()
                    }
                    skipped = sorted(store.put_many(items, replace=flag))
                    expected = [] if flag else sorted(items.keys() & model.keys())
                    require(skipped == expected, "a put without replace skips what is there", skipped)
                    model |= {key: items[key] for key in items.keys() - set(expected)}
                elif kind == "get":
                    _check_read(store, what, model, into=flag)
                else:
                    require(store.delete(sorted(what)) == len(what & model.keys()), "a delete counts what was there")
                    model = {key: model[key] for key in model.keys() - what}

        with self.serving() as serving, serving.open() as store:
            check()

    def test_a_batch_of_many_blocks_arrives(self) -> None:
        """More than one request takes."""
        items = {f"many/{i}": i.to_bytes(4, "big") * (1 + i % 50) for i in range(300)}
        with self.serving() as serving, serving.open() as store:
            store.put_many(items)
            _check_read(store, [*items, "missing", *reversed(items)], items, into=False)
            serving.require_nothing_kept("a batch that is done leaves nothing reserved or leased")

    def test_a_buffer_that_is_too_small_is_an_error_and_stays_as_it_is(self) -> None:
        """So do the others of its batch, and what is behind a block."""
        with self.serving() as serving, serving.open() as store:
            store.put_many({"a": b"a" * 100_000, "b": b"b" * 70_000})
            small, large = bytearray(99_999), bytearray(80_000)
            try:
                store.get_many_into([("b", large), ("a", small)])
            except BufferTooSmall:
                require(not any(small) and not any(large), "buffers stay as they are if one is too small")
            else:
                require(False, "a buffer that is too small is an error")
            require(store.get_into("b", large) == 70_000, "the stored length is returned")
            require(not any(large[70_000:]), "the rest of a buffer stays as it is")
            serving.require_nothing_kept("a read that was refused leaves nothing leased")

    def test_all_or_nothing_names_what_is_missing(self) -> None:
        """`KeyNotFound` for the whole batch."""
        with self.serving() as serving, serving.open() as store:
            store.put("a", b"a" * 100_000)
            try:
                store.get_many_into([("a", bytearray(100_000)), ("gone", bytearray(9))], all_or_nothing=True)
            except KeyNotFound as error:
                require("gone" in str(error), "the error names the missing key", error)
            else:
                require(False, "with all_or_nothing a missing key is an error")

    def test_blocks_are_stored_with_their_checksums(self) -> None:
        """And without, if the store does not verify."""
        with self.serving() as serving:
            for verify in ("always", "never"):
                with serving.open(verify=verify) as store:
                    store.put_many(_BLOCKS)
                    expected = [
                        xxh3_64_intdigest(data) if verify == "always" else NO_CHECKSUM for data in _BLOCKS.values()
                    ]
                    found = serving.look(lambda: serving.with_lease(list(_BLOCKS), lambda lease: lease.checksums))
                    require(found == expected, f"with verify={verify} the checksums are right", found)

    def test_corrupt_bytes_are_found(self) -> None:
        """By each read that verifies; the server forgets the block then."""
        with self.serving() as serving, serving.open() as store:
            for size in (10, 100_000):
                store.put_many({"sound": bytes(size), "corrupt": bytes(size)})
                serving.look(lambda: serving.with_lease(["corrupt"], lambda lease: serving.corrupt(lease.extents)))
                try:
                    store.get_many(["sound", "corrupt"])
                except ChecksumMismatch as error:
                    require("corrupt" in str(error), "the error names the corrupt block", error)
                else:
                    require(False, "a read finds bytes that are not those that were written")
                require(store.exists_many(["sound", "corrupt"]) == [True, False], "the server forgets a corrupt block")
                serving.require_nothing_kept("a read of corrupt bytes leaves nothing leased")

    def test_leased_bytes_do_not_change(self) -> None:
        """Although their keys are deleted and the pool is filled anew."""
        with self.serving() as serving, serving.open() as store:
            store.put_many(_BLOCKS)
            with store.lease(list(_BLOCKS)) as views:
                store.delete(list(_BLOCKS))
                for i in range(40):
                    store.put(f"filler/{i}", bytes(1_000_000))
                found = [view is not None and bytes(view) for view in views]
                require(found == list(_BLOCKS.values()), "leased bytes do not change")
                del views
            serving.require_nothing_kept("a lease that was left keeps nothing")

    def test_a_reservation_is_stored_or_given_back(self) -> None:
        """At the end of its block, or when that raises."""
        with self.serving() as serving, serving.open() as store:
            sizes = {key: len(data) for key, data in _BLOCKS.items()}
            with suppress(ZeroDivisionError), store.reserve(sizes):
                raise ZeroDivisionError
            require(not any(store.exists_many(sizes)), "a reservation whose block raises stores nothing")
            with store.reserve(sizes) as views:
                for view, data in zip(views, _BLOCKS.values(), strict=True):
                    view[:] = data
            _check_read(store, list(_BLOCKS), _BLOCKS, into=True)
            del views, view
            serving.require_nothing_kept("a reservation that is over keeps nothing")

    def test_a_call_that_ends_anywhere_leaves_nothing_behind(self) -> None:
        """Whether its stream breaks or it is interrupted, before any send or
        receive.
        """
        with self.serving() as serving:
            for kind in (StoreUnavailable, KeyboardInterrupt):
                for after in itertools.count():
                    fault = _Fault(kind, after)
                    with (
                        serving.open(environment=Environment(connect=fault.connect), lazy=True) as store,
                        serving.open() as other,
                    ):
                        other.purge()
                        with suppress(StoreUnavailable, KeyboardInterrupt):
                            store.put_many(_BLOCKS)
                        present = other.exists_many(_BLOCKS)
                        require(all(present) or not any(present), "a put is stored as a whole or not at all", after)
                        with suppress(StoreUnavailable, KeyboardInterrupt):
                            store.get_many(list(_BLOCKS))
                        serving.require_nothing_kept("a call that ended in the middle leaves nothing behind")
                        other.put_many(_BLOCKS)
                        _check_read(other, list(_BLOCKS), _BLOCKS, into=False)
                    if not fault.struck:
                        break

    def test_a_server_that_ends_is_an_error(self) -> None:
        """`StoreUnavailable`, for whatever comes next."""
        with self.serving() as serving, serving.open() as store:
            store.put_many(_BLOCKS)
            serving.stop()
            for call in (lambda: store.get_many(list(_BLOCKS)), lambda: store.put("a", bytes(100_000))):
                try:
                    call()
                except StoreUnavailable:
                    continue
                require(False, "without a server a call is an error")

    def test_nothing_is_left_of_a_store_that_is_closed(self) -> None:
        """The server has no client then."""
        with self.serving() as serving:
            with serving.open() as store:
                store.put_many(_BLOCKS)
                store.get_many(list(_BLOCKS))
            serving.wait_until(lambda core: core.clients == 0, "the connections of a closed store are closed")
            serving.require_nothing_kept("a closed store keeps nothing")


def broken_rules(contract: type[MoverContract]) -> dict[str, str]:
    """Run the suite without pytest. Return the tests that failed, by name, and how;
    empty if the contract is kept."""
    found: dict[str, str] = {}
    for name in dir(contract):
        if name.startswith("test_"):
            try:
                getattr(contract(), name)()
            except Exception as error:  # noqa: BLE001 - whatever a mover raises
                found[name] = f"{type(error).__name__}: {error}"
    return found


def _check_read(store: BlockingStore, keys: list[str], model: dict[str, bytes], *, into: bool) -> None:
    expected = [model.get(key) for key in keys]
    if not into:
        found = [None if value is None else bytes(value) for value in store.get_many(keys)]
        require(found == expected, "a read returns what was written, None for what is missing", keys)
        return
    buffers = [bytearray(len(data or b"") + number % 2) for number, data in enumerate(expected)]
    lengths = store.get_many_into(list(zip(keys, buffers, strict=True)))
    read = [None if n is None else bytes(buffer[:n]) for n, buffer in zip(lengths, buffers, strict=True)]
    require(read == expected, "a read into buffers has what was written, None for what is missing", keys)


class _Serving:
    """A server, and what the tests look at."""

    def __init__(self, running: "_Running", options: dict[str, Any]) -> None:
        self._running = running
        self._options = options
        self._core: Any = running.server.context.core
        self.url = f"infinistore://127.0.0.1:{running.server.addresses.port}"

    def open(self, **options: Any) -> AbstractContextManager[BlockingStore]:
        return open_store(self.url, **{**self._options, **options})

    def stop(self) -> None:
        self._running.stop()

    def look(self, function: Callable[[], Any]) -> Any:
        """Run a function where the server's store may be looked at."""
        return trio.from_thread.run_sync(function, trio_token=self._running.token)

    def with_lease(self, keys: list[str], function: Callable[[Any], Any]) -> Any:
        client = self._core.open_client("contract")
        try:
            return function(self._core.lease(client, keys))
        finally:
            self._core.close_client(client)

    def corrupt(self, extents: Any) -> None:
        for view in self._core.pool.views(extents, writable=True):
            view[len(view) // 2] ^= 0xFF

    def require_nothing_kept(self, what: str) -> None:
        self.wait_until(lambda core: not (core.reservations or core.leases or core.quarantined_bytes), what)

    def wait_until(self, holds: Callable[[Any], bool], what: str) -> None:
        """Require that the server's statistics come to what they should be, once it has
        done all that there was to do.
        """

        async def look() -> bool:
            for _ in range(10):
                if holds(self._core.statistics()):
                    return True
                await trio.testing.wait_all_tasks_blocked(0.02)
            return holds(self._core.statistics())

        require(trio.from_thread.run(look, trio_token=self._running.token), what)


class _Running:
    server: Server
    token: trio.lowlevel.TrioToken

    def __init__(self) -> None:
        self._scope = trio.CancelScope()
        self.ready = threading.Event()
        self.thread = threading.Thread(target=trio.run, args=(self._run,), daemon=True)

    async def _run(self) -> None:
        def listening(server: Server) -> None:
            self.server, self.token = server, trio.lowlevel.current_trio_token()
            self.ready.set()

        with tempfile.TemporaryDirectory() as folder, self._scope:
            config = ServerConfig(
                host="127.0.0.1",
                service_port=0,
                manage_port=None,
                prealloc_bytes=16 * 1024 * 1024,
                minimal_allocate_bytes=1024,
                max_batch_keys=64,
                unix_socket=f"{folder}/socket",
            )
            try:
                await run_server(config, on_listening=listening)
            finally:
                self.ready.set()

    def stop(self) -> None:
        with suppress(trio.RunFinishedError):
            trio.from_thread.run_sync(self._scope.cancel, trio_token=self.token)
        self.thread.join()


@contextmanager
def _running_server() -> Iterator[_Running]:
    running = _Running()
    start_thread(running.thread)
    running.ready.wait()
    try:
        yield running
    finally:
        running.stop()


class _Fault:
    """Raises an error once, instead of the send or receive after so many, on any stream
    of a store.
    """

    def __init__(self, kind: type[BaseException], after: int) -> None:
        self._kind = kind
        self._left = after
        self.struck = False

    def connect(self, address: Any, deadline: float) -> "_FaultyStream":
        if address.path:
            return _FaultyStream(connect_unix(address.path, deadline), self.strike)
        return _FaultyStream(connect_tcp(address.host, address.port, deadline), self.strike)

    def strike(self) -> None:
        self._left -= 1
        if self._left == -1:
            self.struck = True
            raise self._kind("the contract broke the stream here")


class _FaultyStream:
    """A stream that asks before it sends or receives. What it lacks is the stream's
    own.
    """

    def __init__(self, stream: Any, strike: Callable[[], None]) -> None:
        self.__dict__.update(_stream=stream, _strike=strike)

    def __getattr__(self, name: str) -> Any:
        if name in ("send_all", "receive_into", "receive_descriptors"):
            try:
                self._strike()
            except StoreUnavailable:  # a broken stream gives nothing more
                self._stream.socket.shutdown(socket.SHUT_RDWR)
                raise
        return getattr(self._stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._stream, name, value)
