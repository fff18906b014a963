"""`infinistore serve`, and plain `infinistore`: run a server until it is stopped.

Allocating the pool takes up to 1 s per GiB, which is reported. A server that is told to
stop before it serves ends at once, and in good order. Once it serves, it takes the
signals itself, and drains.
"""

import faulthandler
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import rich_click as click

from infinistore.addresses import with_port
from infinistore.cli.failures import INTERRUPTED, announcing, innermost, session_of
from infinistore.cli.log_format import set_up_logging
from infinistore.cli.options import json_option, server_options
from infinistore.cli.output import note, print_json, print_line
from infinistore.errors import ConfigError, OutOfMemory
from infinistore.sizes import DefaultSize, describe_size

if TYPE_CHECKING:
    from types import FrameType

    import trio

    from infinistore.config import ServerConfig
    from infinistore.service_manager import ServiceManager


_GARBAGE_OBJECTS = 10_000
_FILES = ("tenants", "tls_cert", "tls_client_ca", "tls_key", "tls_peer_ca", "token_file", "peer_token_file")
"""Settings whose files are read when the server starts."""
SHARD_COMMAND = (sys.executable, "-P", "-m", "infinistore.cli.shard")
"""Starts a shard, with the descriptor of its link as one more argument."""


@click.command("serve", short_help="Run a server.")
@click.option(
    "--config", "file", metavar="FILE", panel="Options",
    help="YAML file with one setting per line: flags without --, with _ for -. Default: $INFINISTORE_CONFIG.",
)  # fmt: skip
@click.option(
    "--check",
    is_flag=True,
    panel="Options",
    help="Check the settings, and the tokens, tenants, certificates, cluster file and disks that they name, and exit.",
)
@server_options
@json_option
@click.pass_context
def command(
    context: click.Context, file: str | None, check: bool, settings: Mapping[str, object], as_json: bool
) -> None:
    """Run a server. It prints one line when it listens.

    On Ctrl-C or SIGTERM, it finishes running requests and stops.

    Each flag can also be an environment variable (--service-port:
    INFINISTORE_SERVICE_PORT) or a key in --config FILE (service_port). The command line
    takes precedence over the environment, and the environment over the file. --no-
    before its name turns off a flag without a value.
    """
    with ending_at_sigterm(), _telling_in_json(check and as_json):
        from infinistore.config import kubernetes_port, load_server_config

        config = load_server_config(settings, file=file)
        session_of(context).wants_tracebacks = config.log_level == "debug"
        if warning := kubernetes_port():
            note(warning)
        set_up_logging(config.log_level, config.log_format)
        try:
            if check:
                _check(config, as_json=as_json)
            else:
                _run(config, as_json=as_json)
        except* ConfigError as group:
            raise ConfigError(_with_source(innermost(group), settings, file)) from None


def _with_source(problem: BaseException, settings: Mapping[str, object], file: str | None) -> str:
    """Return the problem of a file that a setting names, with where it names it."""
    from infinistore.config import ServerConfig, source_of

    name, colon, what = str(problem).partition(": ")
    key = name.removeprefix("--").replace("-", "_")
    if not colon or key not in _FILES:
        return str(problem)
    file = file or os.environ.get("INFINISTORE_CONFIG") or None
    return f"{source_of(ServerConfig, key, settings, os.environ, file) or name}: {what}"


@contextmanager
def _telling_in_json(wanted: bool) -> Iterator[None]:
    """Print a problem of the settings as JSON, too, if that is `wanted`."""
    try:
        yield
    except* ConfigError as group:
        if wanted:
            _print_checked(innermost(group), ())
        raise


def _print_checked(problem: BaseException | None, notes: Iterable[str]) -> None:
    print_json({"ok": problem is None, "problem": problem and str(problem), "notes": list(notes)})


def _check(config: "ServerConfig", *, as_json: bool) -> None:
    """Read what a server reads before it opens a port and takes memory, and change
    nothing.
    """
    from infinistore.allocators import allocator_class
    from infinistore.eviction import eviction_class
    from infinistore.server import check_files

    allocator_class(config.allocator)
    eviction_class(config.eviction)
    check_files(config)
    notes = [*_check_cluster(config), *_check_disks(config)]
    if as_json:
        _print_checked(None, notes)
        return
    for one in notes:
        note(one)
    print_line("the settings and the files that they name can be used")


def _check_cluster(config: "ServerConfig") -> Iterator[str]:
    from infinistore.cluster.documents import WrongDocument, read_file
    from infinistore.cluster.locate import FilePlace, parse_cluster_url

    place = parse_cluster_url(config.cluster).place if config.cluster is not None else None
    if not isinstance(place, FilePlace):
        return
    try:
        view = read_file(place.path.read_bytes(), epoch=0)
    except OSError as error:
        raise ConfigError(f"--cluster: {place.path} cannot be read: {error.strerror}") from None
    except WrongDocument as error:
        raise ConfigError(f"--cluster: {place.path} {error}") from None
    ids = [node.id for node in view.nodes]
    if config.shards == 1 and config.node_id is not None and config.node_id not in ids:
        yield f"{place.path} does not list {config.node_id} (--node-id), but {', '.join(ids) or 'nobody'}"


def _check_disks(config: "ServerConfig") -> Iterator[str]:
    if config.disks:
        from infinistore.disk_io import check_folder

        has_parts = config.shards > 1 or config.tenants is not None
        yield from filter(None, (check_folder(disk.folder, has_parts=has_parts) for disk in config.disks))


def _run(config: "ServerConfig", *, as_json: bool) -> None:
    from infinistore.allocators import prepare_process
    from infinistore.eviction import eviction_class

    prepare_process(config.allocator)  # first: it may re-execute this process
    eviction_class(config.eviction)  # an error of it is known before anything is open
    if config.numa_node is not None:
        from infinistore.host import bind_process

        bind_process(config.numa_node)  # before there are threads and shards, which inherit it
    import trio

    from infinistore.service_manager import ServiceManager

    manager = ServiceManager.from_environment(os.environ, os.getpid())
    if manager.watchdog_s:
        faulthandler.enable()  # so that the log says where it hung
    interrupts: list[int] = []
    try:
        trio.run(_serve, config, as_json, manager, interrupts)
    except* OutOfMemory as group:
        raise ConfigError(f"--prealloc-size: {innermost(group)}") from group
    if interrupts:
        raise KeyboardInterrupt  # the server has ended as at SIGTERM; the shell is told that it was Ctrl-C


async def _serve(config: "ServerConfig", as_json: bool, manager: "ServiceManager", interrupts: list[int]) -> None:
    import trio

    from infinistore import server

    run = partial(server.serve, config) if config.shards == 1 else partial(server.serve_shards, config, SHARD_COMMAND)
    taking = trio.CancelScope()

    class Serving:
        """Is told where the server listens, unless it is stopped before."""

        def started(self, addresses: Any) -> None:
            _note_interrupts(interrupts)  # first: from now on, the server takes the signals
            taking.cancel()
            calm_the_garbage_collector()
            with announcing():
                _announce(config, addresses, as_json=as_json)
            manager.ready()

    async with trio.open_nursery() as watching:
        async with trio.open_nursery() as nursery:
            await watching.start(stop_at_signal, nursery.cancel_scope, interrupts)
            nursery.start_soon(manager.beat)
            goes_on = config.take_over or bool(manager.kept)
            nursery.start_soon(partial(tell_of_taking, config.prealloc_bytes, taking, goes_on=goes_on))
            await run(handle_signals=True, service_manager=manager, task_status=Serving())
            nursery.cancel_scope.cancel()  # the beats
        watching.cancel_scope.cancel()


def calm_the_garbage_collector() -> None:
    """Run the garbage collector less often, and never on the current objects.

    A batch of 64 blocks creates and drops some hundred tuples. By default, a search for
    cycles among them delayed every few batches. They have no cycles: the store keeps
    strings and tuples of integers.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE_OBJECTS)


def _note_interrupts(interrupts: list[int]) -> None:
    """Record a Ctrl-C, for which the server drains as for SIGTERM."""
    handler = signal.getsignal(signal.SIGINT)

    def remember(number: int, frame: "FrameType | None") -> None:
        interrupts.append(number)
        if callable(handler):
            handler(number, frame)

    signal.signal(signal.SIGINT, remember)


def _announce(config: "ServerConfig", addresses: Any, *, as_json: bool) -> None:
    urls = _urls("tcp" if config.tls_cert is None else "infinistores", addresses.tcp)
    pool_bytes = addresses.pool_bytes or config.prealloc_bytes
    if addresses.unix_socket is not None:
        urls.append(f"unix://{addresses.unix_socket}")
    management = _urls("http" if config.tls_cert is None else "https", addresses.management)
    if as_json:
        print_json(
            {
                "listening": urls,
                "management": management,
                "pool_bytes": pool_bytes,
                "shards": config.shards,
                "allocator": config.allocator,
                "numa_node": config.numa_node,
            }
        )
    else:
        pool = describe_size(pool_bytes)
        also = f"; management on {' and '.join(management)}" if management else ""
        parts = f" in {config.shards} shards" if config.shards > 1 else ""
        node = "" if config.numa_node is None else f" on NUMA node {config.numa_node}"
        print_line(f"listening on {' and '.join(urls)}, with a pool of {pool}{node}{parts} ({config.allocator}){also}")


def _urls(scheme: str, addresses: Iterable[tuple[str, int]]) -> list[str]:
    return [f"{scheme}://{with_port(host, port)}" for host, port in addresses]


_END_S: Final = 3.0
"""What a start has to end in good order. A thread that takes a large pool does not
listen; then the process ends without.
"""


@contextmanager
def ending_at_sigterm() -> Iterator[None]:
    """While nothing runs in Trio, and nothing is held, end this process at SIGTERM
    without an error. Main thread only.
    """

    def end(number: int, frame: "FrameType | None") -> None:
        os._exit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def stop_at_signal(
    starting: "trio.CancelScope", interrupts: list[int], *, task_status: "trio.TaskStatus[None]"
) -> None:
    """Cancel a start at SIGTERM or SIGINT, which is added to `interrupts`. Another
    signal, or a start that does not end in time, ends the process as it is.

    What takes the signals later, as a server that serves, has them.
    """
    import trio

    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        number = await anext(signals)
        if number == signal.SIGINT:
            interrupts.append(number)
        starting.cancel()
        with trio.move_on_after(_END_S):
            await anext(signals)
        os._exit(INTERRUPTED if interrupts else 0)


_log = logging.getLogger("infinistore.server")
_SILENT_S: Final = 0.2  # what takes no longer, or fails at once, needs no word
_REFRESH_S: Final = 0.25
_BLOCK_BYTES: Final = 512


async def tell_of_taking(
    pool_bytes: int,
    scope: "trio.CancelScope",
    taken_bytes: Callable[[], int] | None = None,
    *,
    goes_on: bool = False,
) -> None:
    """Report the allocation of a pool in the log, or with progress on a terminal.

    It runs until the caller cancels `scope`. `taken_bytes` returns how much is taken so
    far. A server that `goes_on` with the pool of another, if there is one, has the size
    of that unless somebody has chosen one: it is not reported.
    """
    import trio

    is_open = goes_on and isinstance(pool_bytes, DefaultSize)
    what = "taking the pool" if is_open else f"taking a pool of {describe_size(pool_bytes)}"
    if isinstance(pool_bytes, DefaultSize) and not is_open:
        what += ", the default here (--prealloc-size chooses another size)"
    with scope:
        await trio.sleep(_SILENT_S)
        if not sys.stderr.isatty():  # each line there is JSON
            _log.info("taking the pool", extra={} if is_open else {"pool_bytes": pool_bytes})
            return
        try:
            while True:
                share = min(100, 100 * (taken_bytes or first_arena_bytes)() // pool_bytes)
                sys.stderr.write(f"\rinfinistore: {what}" + ("" if is_open else f": {share} %"))
                sys.stderr.flush()
                await trio.sleep(_REFRESH_S)
        finally:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def first_arena_bytes() -> int:
    """Return the size of the first arena of this process, and of its shards, so far."""
    taken = 0
    for process in ("self", *_children()):
        with suppress(OSError):
            for entry in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):
                    if os.readlink(entry).startswith("/memfd:infinistore-arena-0"):
                        taken += os.stat(entry).st_blocks * _BLOCK_BYTES
    return taken


def _children() -> Iterator[str]:
    """Return the processes that threads of this one have started."""
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that is gone, or a kernel that does not tell
            yield from file.read_text(encoding="ascii").split()
