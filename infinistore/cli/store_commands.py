"""The commands that are a call or two of a store: `infinistore put`, `get`, `exists`,
`ls`, `rm`, `pin`, `unpin`, `stat`, `evict` and `purge`.

`files.py` stores and reads what is longer than a block. Nodes of a cluster that do not
answer may have keys that a command should have found: it says so, or refuses to call
its work done.
"""

import os
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import attrs
import rich_click as click

from infinistore.cli.failures import NegativeAnswer
from infinistore.cli.files import DEFAULT_BLOCK_BYTES, Manifest, delete_files, open_file, put_file, with_blocks
from infinistore.cli.options import KEY, SIZE, Target, client_options, json_option
from infinistore.cli.output import (
    counted,
    demand_yes,
    is_plain_text,
    note,
    print_json,
    print_line,
    visible,
)
from infinistore.errors import PermissionDenied, StoreUnavailable
from infinistore.sizes import describe_size, format_size

if TYPE_CHECKING:
    from infinistore.blocking import BlockingStore
    from infinistore.statistics import (
        ClusterStatistics,
        DiskTierStatistics,
        ServerDetails,
        ServerStatistics,
        Stats,
        StoreStatistics,
    )


@click.command("put", short_help="Store a file or standard input under a key.")
@click.argument("key", type=KEY)
@click.argument("file", default="-")
@click.option(
    "--block-size", type=SIZE, metavar="SIZE", default=DEFAULT_BLOCK_BYTES,
    help=f"Files larger than this are split into blocks of this size. Default: {format_size(DEFAULT_BLOCK_BYTES)}.",
)  # fmt: skip
@click.option(
    "--ttl", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
    help="Let the key end after so many seconds, as if it were deleted.",
)  # fmt: skip
@click.option("--keep", is_flag=True, help="If the key exists, keep it and exit with 1.")
@json_option
@client_options
def put(*, key: str, file: str, block_size: int, ttl: float | None, keep: bool, as_json: bool, target: Target) -> None:
    """Store FILE under KEY; without FILE, or with -, store standard input.

    A file larger than --block-size becomes the keys KEY#0, KEY#1, ... and a manifest
    under KEY. `get` reassembles it.
    """
    if file == "-" and sys.stdin is None:
        raise click.UsageError("standard input is closed; name a file")
    opened: Any = nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb")  # noqa: SIM115 - entered below
    source: BinaryIO
    with opened as source, target.open() as store:
        stored = put_file(store, key, source, block_size, replace=not keep, ttl_s=ttl)
    if as_json:
        print_json({"key": key, "stored": stored.stored, "size_bytes": stored.size_bytes, "blocks": stored.blocks})
    if not stored.stored:
        raise NegativeAnswer(f"{key!r} is there already and was kept")
    if not as_json:
        blocks = f" in {stored.blocks} blocks" if stored.blocks else ""
        print_line(f"stored {visible(key)}: {describe_size(stored.size_bytes)}{blocks}")


@click.command("get", short_help="Read a key to standard output or a file.")
@click.argument("key", type=KEY)
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=Path),
    help="Write to FILE, replacing it after everything was read and verified. Default: standard output.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Write to a terminal even if it is not plain text.")
@client_options
def get(key: str, output: Path | None, force: bool, target: Target) -> None:
    """Read KEY from the store to standard output or a file. A missing key exits
    with 1.
    """
    with target.open() as store:
        manifest, pieces = open_file(store, key)
        if output is not None:
            _write_file(output, pieces)
        else:
            _write_output(manifest, pieces, force=force)


def _write_output(manifest: Manifest | None, pieces: Iterable[bytes | bytearray], *, force: bool) -> None:
    output = sys.stdout.buffer
    to_terminal = sys.stdout.isatty() and not force
    for piece in pieces:
        if to_terminal and (manifest is not None or not is_plain_text(piece)):
            raise click.UsageError(
                "this is not plain text and would upset the terminal; write it to a file with -o FILE, or add --force"
            )
        rest = memoryview(piece)
        while rest:  # unbuffered (PYTHONUNBUFFERED), a write may take only a part
            rest = rest[output.write(rest) :]
    output.flush()


def _write_file(path: Path, pieces: Iterable[bytes | bytearray]) -> None:
    """Write next to `path` and rename, so that readers never see a partial file."""
    if path.exists() and not path.is_file():  # a device or a pipe cannot be replaced
        with path.open("wb") as device:
            device.writelines(pieces)
        return
    try:
        descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with open(descriptor, "wb") as file:
            file.writelines(pieces)
        os.chmod(beside, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


@click.command("exists", short_help="Report which keys exist.")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True, type=KEY)
@json_option
@client_options
def exists(keys: tuple[str, ...], as_json: bool, target: Target) -> None:
    """Report which KEYs exist. Exits with 1 if one is missing."""
    with target.open() as store:
        found = store.exists_many(list(keys))
    if as_json:
        print_json({"keys": dict(zip(keys, found, strict=True))})
    else:
        for key, present in zip(keys, found, strict=True):
            print_line(f"{'present' if present else 'missing'}\t{visible(key)}")
    if not all(found):
        raise NegativeAnswer


_PAGE_KEYS: Final = 1000


@click.command("ls", short_help="List keys, all or by prefix.")
@click.argument("prefix", default="")
@click.option("--limit", metavar="N", type=click.IntRange(min=1), help="Stop after this many keys. Default: list all.")
@click.option("--after", metavar="KEY", default="", help="Start after this key, to continue an earlier listing.")
@json_option
@client_options
def ls(prefix: str, limit: int | None, after: str, as_json: bool, target: Target) -> None:
    """List the keys that begin with PREFIX, one per line, in code point order.

    Keys are fetched page by page: keys that are added or deleted during the listing may
    or may not appear. Of a cluster, all nodes are asked; what those may have that
    do not answer is not listed, and a note says so.
    """
    with target.open() as store:
        # One key more than asked for tells whether there are more.
        pages = _pages(store, prefix, after, None if limit is None else limit + 1)
        if as_json:
            keys = [key for page in pages for key in page]
            more = limit is not None and len(keys) > limit
            shown = keys[:limit]
            print_json({"keys": shown, "next_after": shown[-1] if more else None})
            _note_silent(store)
            return
        last, left = "", limit
        for page in pages:
            for key in page[:left]:
                print_line(visible(key) if sys.stdout.isatty() else key)
                last = key
            if left is not None and len(page) > left:
                note(f"there are more; go on with --after {last!r}")
                break
            left = None if left is None else left - len(page)
        _note_silent(store)


def _note_silent(store: "BlockingStore") -> None:
    """Tell whose keys of a cluster are not listed, because nobody answered."""
    try:
        cluster = store.stats().cluster if store.is_cluster else None
    except PermissionDenied:  # a tenant without the role monitor is not told
        return
    silent = [] if cluster is None else [node.id for node in cluster.nodes if node.problem]
    if silent:
        note(f"what {', '.join(silent)} may have is not listed: no answer; see `infinistore cluster status`")


def _pages(store: "BlockingStore", prefix: str, after: str, limit: int | None) -> Iterator[list[str]]:
    while limit is None or limit > 0:
        asked = _PAGE_KEYS if limit is None else min(limit, _PAGE_KEYS)
        page: list[str] = store.keys(prefix, limit=asked, after=after)
        yield page
        if len(page) < asked:
            return
        after = page[-1]
        limit = None if limit is None else limit - len(page)


def _arguments(which: str) -> Callable[[Any], Any]:
    """Return what gives a command its arguments; `which` is done to keys by prefix."""

    def add(command: Any) -> Any:
        prefix = click.option(
            "--prefix", metavar="PREFIX", type=KEY, help=f"{which} every key that begins with PREFIX."
        )
        keys = click.argument("keys", metavar="[KEY]...", nargs=-1, type=KEY)
        return keys(prefix(json_option(client_options(command))))

    return add


@click.command("rm", short_help="Delete keys.")
@_arguments("Delete")
def rm(keys: tuple[str, ...], prefix: str | None, as_json: bool, target: Target) -> None:
    """Delete KEYs, or all keys with a prefix. Exits with 1 if a KEY did not exist.

    A file that `put` stored in blocks is deleted with its blocks. With --prefix, exits
    with 3 if a node of a cluster, which may have such keys, does not answer.
    """
    if bool(keys) == bool(prefix):
        raise click.UsageError(
            "name the keys to delete, or give --prefix PREFIX (to delete all, use `infinistore purge`)"
        )
    from infinistore.blocking import delete_by_prefix

    with target.open() as store:
        if prefix is None:
            deleted, lost = delete_files(store, list(dict.fromkeys(keys))), ""
        else:
            deleted, lost = delete_by_prefix(store, prefix)
        asked = len(set(keys)) if prefix is None else deleted
        _report("deleted", deleted, asked, lost, "were not there", as_json=as_json)


@click.command("pin", short_help="Keep keys from being evicted.")
@click.option(
    "--ttl", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
    help="Let the pins end after so many seconds. A key that is pinned for longer stays so.",
)  # fmt: skip
@_arguments("Pin")
def pin(keys: tuple[str, ...], prefix: str | None, ttl: float | None, as_json: bool, target: Target) -> None:
    """Keep KEYs, or all keys with a prefix, from being evicted, until `unpin`, or for
    a time.

    Exits with 1 if a KEY is not in memory, and with --prefix with 3 if a node of a
    cluster does not answer. A file that `put` stored in blocks is pinned with them. All
    pinned keys may take --max-protected-ratio of the pool. A restart forgets all pins.
    """
    pinned = ("pinned", "are not in memory")
    _carry_out(*pinned, lambda store: partial(store.pin, ttl_s=ttl), keys, prefix, as_json=as_json, target=target)


@click.command("unpin", short_help="Let pinned keys be evicted again.")
@_arguments("Unpin")
def unpin(keys: tuple[str, ...], prefix: str | None, as_json: bool, target: Target) -> None:
    """Let KEYs, or all keys with a prefix, be evicted again.

    Exits with 1 if a KEY was not pinned, and with --prefix with 3 if a node of a
    cluster does not answer.
    """
    _carry_out("unpinned", "were not pinned", lambda store: store.unpin, keys, prefix, as_json=as_json, target=target)


def _carry_out(
    done: str,
    why_not: str,
    call_of: "Callable[[BlockingStore], Callable[[Iterable[str]], int]]",
    keys: tuple[str, ...],
    prefix: str | None,
    *,
    as_json: bool,
    target: Target,
) -> None:
    if bool(keys) == bool(prefix):
        raise click.UsageError("name the keys, or give --prefix PREFIX")
    from infinistore.blocking import do_by_prefix

    with target.open() as store:
        call = call_of(store)
        if prefix is None:
            names = with_blocks(store, list(dict.fromkeys(keys)))
            count, asked, lost = call(names), len(names), ""
        else:
            count, lost = do_by_prefix(store, prefix, call)
            asked = count
        _report(done, count, asked, lost, why_not, as_json=as_json)


def _report(done: str, count: int, asked: int, lost: str, why_not: str, *, as_json: bool) -> None:
    """Print of how many keys something was done; and say of which it was not: those of
    nodes that are `lost`, their error in words, and, `why_not`, others that were asked
    for.
    """
    if as_json:
        print_json({done: count, "missing": asked - count})
    else:
        print_line(f"{done} {counted(count, 'key')}")
    if lost:
        remedy = "start these nodes, or take them out of the cluster, and repeat"
        raise StoreUnavailable(f"some keys may not be {done}: {lost}; {remedy}")
    if count < asked:
        raise NegativeAnswer("" if as_json else f"{asked - count} of {asked} keys {why_not}")


@click.command("stat", short_help="Show statistics.")
@click.option(
    "--details", is_flag=True,
    help="With --json: also operations, connections, arenas, and keys by prefix.",
)  # fmt: skip
@json_option
@client_options
def stat(details: bool, as_json: bool, target: Target) -> None:
    """Show the store's statistics, and the transport of this client, on one screen.

    --json has all of them, with the names of `infinistore.Stats`; sizes are in bytes,
    and a suffix of the name is the unit of a time. Disks are there only if the store
    has some.
    """
    if details and not as_json:
        raise click.UsageError("--details are lists: add --json, or see `infinistore monitor`")
    with target.open() as store:
        found = store.stats(details or not as_json)
    if not as_json:
        for heading, parts in _summary(found):
            _print_group(heading, parts)
        return
    statistics = attrs.asdict(found)
    if not details:
        del statistics["details"]
    if statistics["disk"] is None:
        del statistics["disk"]
    print_json(statistics)


_WIDTH: Final = 80
_HEADING: Final = 10
_SHOWN: Final = 6
"""How many kinds of requests, of clients, and of nodes the screen has."""
_WORTH_TELLING: Final = 0.01
"""From which part of the puts on the screen has what a larger pool is worth."""


def _print_group(heading: str, parts: Iterable[str]) -> None:
    """Print what belongs together; a line ends between two parts if it can."""
    whole = [part.replace(" ", "\0") if len(part) < _WIDTH - _HEADING else part for part in parts]
    indent = " " * _HEADING
    for line in textwrap.wrap(
        f"{heading:<{_HEADING}}" + ", ".join(whole),
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ):
        print_line(line.replace("\0", " "))


def _summary(stats: "Stats") -> Iterator[tuple[str, list[str]]]:
    """Yield groups of figures, each with its heading."""
    from infinistore.monitor.figures import duration

    server, details = stats.server, stats.details
    about = [f"transport {stats.transport}: {stats.transport_reason}"]
    if server is not None:
        state = [] if details is None else [details.state]
        about = [*state, f"up {duration(server.uptime_s)}", f"version {server.version}", *about]
    yield "server" if server is not None else "store", about
    yield from _of_store(stats.store)
    if stats.disk is not None:
        yield from _of_disks(stats.disk)
    if server is not None:
        yield from _of_server(server, details)
    if stats.drain is not None:
        moved = stats.drain.moved_groups + stats.drain.skipped_groups
        yield "drain", [stats.drain.state, f"{moved} of {counted(stats.drain.groups, 'group')}"]
    if stats.cluster is not None:
        yield from _of_cluster(stats.cluster)


def _of_store(store: "StoreStatistics") -> Iterator[tuple[str, list[str]]]:
    from infinistore.monitor.figures import count, percent_of, size

    pool = [
        f"{percent_of(store.used_bytes, store.capacity_bytes)} used",
        f"{size(store.used_bytes)} of {size(store.capacity_bytes)}",
        counted(store.keys, "key"),
        f"largest free {size(store.allocator.largest_free_extent_bytes)}",
        f"pinned {size(store.pinned_bytes)} by {counted(store.leases, 'lease')} and {counted(store.holds, 'hold')}",
        f"{counted(store.reservations, 'unfinished put')} with {size(store.reserved_bytes)}",
    ]
    if store.growable_bytes:
        pool.append(f"may grow by {size(store.growable_bytes)}")
    if store.protected_keys:
        pool.append(f"{count(store.protected_keys)} protected keys with {size(store.protected_bytes)}")
    if store.quarantined_bytes:
        pool.append(f"{size(store.quarantined_bytes)} in quarantine")
    if store.avoidable_puts >= _WORTH_TELLING:
        part = percent_of(store.avoidable_puts, 1)
        pool.append(f"{size(store.wanted_capacity_bytes)} would have had {part} of the blocks put lately")
    yield "pool", pool
    reads = store.hits + store.misses
    evicted = {cause.replace("_", " "): number for cause, number in attrs.asdict(store.evicted).items() if number}
    keys = [
        f"{count(reads)} read",
        f"{count(store.hits)} found ({percent_of(store.hits, reads)})",
        f"{count(store.puts)} stored",
        f"{count(store.deleted)} deleted",
        f"{count(store.expired)} expired",
        f"{count(sum(evicted.values()))} evicted" + (f" ({', '.join(evicted)})" if evicted else ""),
    ]
    if store.checksum_drops:
        keys.append(f"{count(store.checksum_drops)} dropped because of their checksum")
    yield "keys", keys


def _of_disks(tier: "DiskTierStatistics") -> Iterator[tuple[str, list[str]]]:
    from infinistore.monitor.figures import count, size

    for disk in tier.disks:
        figures = [
            visible(disk.path),
            disk.state,
            f"{size(disk.used_bytes)} of {size(disk.capacity_bytes)} used",
            counted(disk.keys, "key"),
            f"read {size(disk.read_bytes)}",
            f"written {size(disk.written_bytes)}",
            counted(disk.read_errors + disk.write_errors + disk.damaged_blocks, "error"),
        ]
        yield "disk", [*figures, disk.alarm] if disk.alarm else figures
    yield "", [f"{size(tier.queued_bytes)} wait to be written", f"{count(tier.skipped_blocks)} blocks skipped"]


def _of_server(server: "ServerStatistics", details: "ServerDetails | None") -> Iterator[tuple[str, list[str]]]:
    from infinistore.monitor.figures import count, size

    operations, clients = ([], []) if details is None else (details.operations, details.clients)
    requests = [
        f"{count(server.requests)}",
        counted(server.errors, "error"),
        f"in {size(server.received_bytes)}",
        f"out {size(server.sent_bytes)}",
    ]
    yield "requests", [*requests, *_busiest((one.kind.replace("_", " "), one.count) for one in operations)]
    connections = [
        f"{counted(server.connections_open, 'connection')}",
        f"{count(server.connections_total)} so far",
        f"{count(server.connections_refused)} refused",
    ]
    names = ((f"{visible(one.name)} ({one.transport})", one.requests) for one in clients)
    yield "clients", [*connections, *_busiest(names)]


def _of_cluster(cluster: "ClusterStatistics") -> Iterator[tuple[str, list[str]]]:
    from infinistore.monitor.figures import count, duration

    silent = [f"{visible(node.id)} does not answer: {node.problem}" for node in cluster.nodes if node.problem]
    more = len(silent) - _SHOWN
    yield (
        "cluster",
        [
            counted(len(cluster.nodes), "node"),
            counted(cluster.copies, "copy", "copies"),
            f"view {cluster.epoch}, {duration(cluster.view_age_s)} old",
            f"{count(cluster.lost_reads)} reads and {count(cluster.lost_copies)} copies lost",
            *silent[:_SHOWN],
            *([f"{more} more do not answer"] if more > 0 else []),
        ],
    )


def _busiest(named: Iterable[tuple[str, int]]) -> list[str]:
    """Return the names with the largest sums of requests, each with that."""
    from infinistore.monitor.figures import count

    sums: Counter[str] = Counter()
    for name, requests in named:
        sums[name] += requests
    left = len(sums) - _SHOWN
    return [f"{name} {count(number)}" for name, number in sums.most_common(_SHOWN)] + [f"{left} more"] * (left > 0)


_FRACTION = click.FloatRange(0, 1)


@click.command("evict", short_help="Evict blocks now.")
@click.option(
    "--min", "low", metavar="FRACTION", type=_FRACTION, default=0.6, show_default=True,
    help="Stop when this fraction of the pool is in use.",
)  # fmt: skip
@click.option(
    "--max", "high", metavar="FRACTION", type=_FRACTION, default=0.8, show_default=True,
    help="Do nothing unless more than this fraction is in use.",
)  # fmt: skip
@json_option
@client_options
def evict(low: float, high: float, as_json: bool, target: Target) -> None:
    """Evict the least recently used blocks down to --min, if the pool exceeds --max."""
    if low > high:
        raise click.UsageError(f"--min {low:g} must not be above --max {high:g}")
    with target.open() as store:
        evicted = store.evict(low, high)
    if as_json:
        print_json({"evicted": evicted})
    else:
        print_line(f"evicted {counted(evicted, 'block')}")


@click.command("purge", short_help="Delete every key.")
@click.option("--yes", is_flag=True, help="Do not ask. Required without a terminal.")
@json_option
@client_options
def purge(yes: bool, as_json: bool, target: Target) -> None:
    """Delete every key in the store."""
    demand_yes(f"Delete every key of {target.url}?", yes=yes, warning="this deletes every key")
    with target.open() as store:
        deleted = store.purge()
    if as_json:
        print_json({"deleted": deleted})
    else:
        print_line(f"deleted {counted(deleted, 'key')}")
