"""`infinistore selftest`: checks a store over each transport."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import attrs
import rich_click as click

from infinistore.addresses import DEFAULT_SERVICE_PORT, default_socket_path, is_loopback
from infinistore.cli.options import Target, client_options, json_option, unix_url
from infinistore.cli.output import note, print_json, print_table
from infinistore.errors import ChecksumMismatch, DiskFailed, InfiniStoreException, PermissionDenied
from infinistore.kept_errors import KeptError

if TYPE_CHECKING:
    from infinistore.blocking import BlockingStore
    from infinistore.statistics import DiskStatistics

_SIZES_BYTES = (1, 4096, 65_537)
"""Less than a unit, a whole number of small units, and not a whole number."""


@attrs.frozen
class _Check:
    path: str
    check: str
    ok: bool
    elapsed_us: int
    error: str


@click.command("selftest", short_help="Check that a store works.")
@click.option("--embedded", is_flag=True, help="Check a store in this process, without a server.")
@json_option
@client_options
def command(embedded: bool, as_json: bool, target: Target) -> None:
    """Write, look up, read, compare and delete a few blocks over each transport.

    The transports are that of --url and, if the server is on this machine, its Unix
    socket. If the store has disks, the blocks must also become durable, unless the
    token lacks the role monitor, without which disks are not shown. The exit code
    is that of the first failed check. After a failure, the remaining checks of that
    transport are skipped.
    """
    checks: list[_Check] = []
    failures: list[KeptError] = []
    notes: list[str] = []
    for name, opened in _paths(target, embedded=embedded):
        checks += _check_path(name, opened, failures, notes)
    for text in dict.fromkeys(notes):
        note(text)
    if as_json:
        print_json({"ok": not failures, "checks": [attrs.asdict(check) for check in checks]})
    else:
        print_table(
            ("path", "check", "result", "us", "error"),
            [
                (check.path, check.check, "ok" if check.ok else "failed", str(check.elapsed_us), check.error)
                for check in checks
            ],
            numbers=("us",),
        )
    if failures:
        raise failures[0].again()


def _paths(
    target: Target, *, embedded: bool
) -> Iterator[tuple[str, Callable[[], "AbstractContextManager[BlockingStore]"]]]:
    """Yield the name of each transport, and a function that opens a store over it."""
    if embedded:
        from infinistore import blocking

        yield "embedded", lambda: blocking.open_store(pool_bytes=1 << 20)
        return
    yield target.url, target.open
    url = urlsplit(target.url)
    if url.scheme in ("infinistore", "infinistores", "tcp") and is_loopback(url.hostname or ""):
        path = default_socket_path(url.port or DEFAULT_SERVICE_PORT)
        if path.is_socket():
            by_socket = unix_url(str(path), url.query)
            yield by_socket, attrs.evolve(target, url=by_socket).open


def _check_path(
    name: str,
    opened: "Callable[[], AbstractContextManager[BlockingStore]]",
    failures: list[KeptError],
    notes: list[str],
) -> Iterator[_Check]:
    """Yield the result of each check; append the failure that ended them, if any."""
    start = time.perf_counter()
    check = "connect"

    def done(error: str = "") -> _Check:
        nonlocal start
        begun, start = start, time.perf_counter()
        return _Check(name, check, not error, round((start - begun) * 1e6), error)

    prefix = f"infinistore-selftest/{secrets.token_hex(16)}/"
    values = {f"{prefix}{size}": secrets.token_bytes(size) for size in _SIZES_BYTES}
    try:
        with opened() as store:
            yield done()
            check = "statistics"
            try:
                disks = _disks(store, notes)
                for check, run in _checks(store, prefix, values, disks):  # noqa: B007  (`done` reads it)
                    run()
                    yield done()
            except InfiniStoreException:
                with suppress(InfiniStoreException):
                    store.delete(values)
                raise
    except InfiniStoreException as error:
        failures.append(KeptError(error))
        yield done(f"{type(error).__name__}: {error}")


def _disks(store: "BlockingStore", notes: list[str]) -> "list[DiskStatistics]":
    """Return the disks of the store, as far as this client may know of them."""
    try:
        disk = store.stats().disk
    except PermissionDenied as error:
        notes.append(f"whether blocks become durable was not checked: {error}")
        return []
    return [] if disk is None else disk.disks


def _checks(
    store: "BlockingStore", prefix: str, values: dict[str, bytes], disks: "list[DiskStatistics]"
) -> list[tuple[str, Callable[[], Any]]]:
    keys = list(values)
    some_are_there = [*keys, prefix + "missing"], [True] * len(keys) + [False]

    def get_into() -> None:
        buffers = {key: bytearray(len(value)) for key, value in values.items()}
        lengths = store.get_many_into(buffers)
        _same("lengths", lengths, list(map(len, values.values())))
        _same("bytes", buffers, values)

    def match() -> None:
        matched = store.match_prefix(some_are_there[0], hold_s=5)
        _same("number of keys", int(matched), len(keys))
        _same("answer", store.release_hold(matched.hold), True)

    def flush() -> None:
        durable = store.flush(keys)
        alarms = [f"{disk.path}: {disk.alarm or disk.state}" for disk in disks if disk.state in ("read-only", "off")]
        if durable != len(keys) and alarms:
            raise DiskFailed("; ".join(alarms))
        _same("number of durable keys", durable, len(keys))

    return [
        ("put", lambda: _same("skipped keys", store.put_many(values), [])),
        *([("flush to disk", flush)] if disks else []),
        ("exists", lambda: _same("answer", store.exists_many(some_are_there[0]), some_are_there[1])),
        ("get", lambda: _same("bytes", store.get_many(keys), list(values.values()))),
        ("get into memory", get_into),
        ("match and hold a prefix", match),
        ("list keys", lambda: _same("keys", store.keys(prefix), sorted(keys))),
        ("delete", lambda: _same("count", store.delete(keys), len(keys))),
        ("is gone", lambda: _same("answer", store.exists_many(keys), [False] * len(keys))),
    ]


def _same(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise ChecksumMismatch(f"the {what} that came back: not as expected")
