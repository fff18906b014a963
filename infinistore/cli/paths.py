"""The measurements of `infinistore doctor --to`: each transport to a server.

They never evict other blocks: they write at most some MiB, and nothing to a server that
is so full that it might evict. Their time is bounded by the seconds per figure and the
deadline of each call. The keys are deleted at the end, also after a failure.
"""

import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import attrs

from infinistore.addresses import is_loopback
from infinistore.cli.measure import Client, Plan, Step, percentiles, run
from infinistore.cli.options import Target
from infinistore.doctor import Finding, Level
from infinistore.errors import AuthenticationFailed, InfiniStoreException, PermissionDenied, VersionMismatch

if TYPE_CHECKING:
    from infinistore.blocking import BlockingStore

_TOPIC: Final = "server"
_BLOCK_BYTES: Final = 65536
_BATCHES: Final = (64, 16, 4)
_FULL: Final = 0.8
"""The pool usage above which a server evicts by default."""


@attrs.frozen
class MeasuredPath:
    """The result of one transport.

    Rates are bytes of payload per second; None was not measured.
    """

    path: str
    finding: Finding
    transport: str = ""
    reason: str = ""
    batch: int | None = None
    """Blocks of 64 KiB per call."""
    put_bytes_per_s: float | None = None
    get_bytes_per_s: float | None = None
    lookup_p50_us: float | None = None
    """`exists` of one key: the round trip time."""
    lookup_p99_us: float | None = None
    get_p50_us: float | None = None
    """Get of one block of 4 KiB."""


def steps(target: Target) -> int:
    """Maximum number of progress reports of `measure_paths`."""
    return len(_paths(target))


def measure_paths(target: Target, seconds: float, report: Callable[[str], None]) -> list[MeasuredPath]:
    """Try each transport to the server of `target`, and measure those that work.

    Failures of the server or the network are part of the result.

    Raises:
        ConfigError: the URL or the token file is invalid; `Target.check` detects that.
    """
    measured: list[MeasuredPath] = []
    for path in _paths(target):
        report(path)
        measured.append(_measure_path(path, target, seconds))
        if measured[0].finding.level is Level.BAD:  # the other transports lead to the same server
            break
    return measured


def _paths(target: Target) -> list[str]:
    """The transports; every server must answer on the first one."""
    return ["unix", "shm"] if _by_socket(target) else ["tcp", "shm", "rdma"]


def _by_socket(target: Target) -> bool:
    """Whether the URL names a Unix socket."""
    parts = urlsplit(target.url)
    return parts.scheme == "unix" or (parts.scheme == "shm" and not parts.netloc)


def _over(target: Target, path: str) -> Target:
    if _by_socket(target):
        return attrs.evolve(target, url=f"{path}://{target.url.partition('://')[2]}")
    return target.over(path)


def _measure_path(path: str, target: Target, seconds: float) -> MeasuredPath:
    try:
        with _over(target, path).open() as store:
            figures = _figures(store, seconds)
    except InfiniStoreException as error:
        return MeasuredPath(path, _failed(path, error, target))
    if not figures["transport"]:
        figures["transport"] = "unknown"
        text = "what room the pool has is not for this tenant to know: only lookups were measured"
        return MeasuredPath(
            path, Finding(_TOPIC, path, Level.WARNING, text, "a token with the role monitor"), **figures
        )
    if figures["put_bytes_per_s"] is None:
        text = "the pool is so full that a put might evict what is there: only lookups were measured"
        return MeasuredPath(path, Finding(_TOPIC, path, Level.WARNING, text, "a larger pool, or later"), **figures)
    return MeasuredPath(path, Finding(_TOPIC, path, Level.GOOD, "works"), **figures)


def _figures(store: "BlockingStore", seconds: float) -> dict[str, Any]:
    try:
        stats = store.stats()
    except PermissionDenied:
        stats = None
    name = f"infinistore-doctor/{secrets.token_hex(8)}"
    lookups = _p50_and_p99_us(lambda: store.exists(name), seconds)
    figures: dict[str, Any] = {
        "transport": "" if stats is None else stats.transport,
        "reason": "" if stats is None else stats.transport_reason,
        "batch": None,
        "put_bytes_per_s": None,
        "get_bytes_per_s": None,
        "lookup_p50_us": lookups[0],
        "lookup_p99_us": lookups[1],
        "get_p50_us": None,
    }
    if stats is None:
        return figures
    room_bytes = int(_FULL * stats.store.capacity_bytes) - stats.store.used_bytes
    # Twice: a put of a key that is there takes new room before it gives back the old.
    batch = next((batch for batch in _BATCHES if 2 * batch * _BLOCK_BYTES <= room_bytes), None)
    if batch is not None:
        figures["batch"] = batch
        large, small = Plan((_BLOCK_BYTES,), batch, 1, seconds), Plan((4096,), 1, 1, seconds)
        figures |= _rates(Client(store, name, large), large)
        figures["get_p50_us"] = _latency(Client(store, name, small), small)
    return figures


def _rates(client: Client, plan: Plan) -> dict[str, float]:
    length = plan.batch * plan.sizes_bytes[0]
    found = {}
    try:
        for name, make in (("put_bytes_per_s", client.put), ("get_bytes_per_s", client.get)):
            times, elapsed_s = run([make(plan, plan.sizes_bytes[0])], plan.seconds)
            found[name] = len(times) * length / elapsed_s
    finally:
        _delete(client, plan)
    return found


def _latency(client: Client, plan: Plan) -> float:
    try:
        client.put(plan, plan.sizes_bytes[0])()
        return _p50_and_p99_us(client.get(plan, plan.sizes_bytes[0]), plan.seconds)[0]
    finally:
        _delete(client, plan)


def _delete(client: Client, plan: Plan) -> None:
    """Delete keys; ignore errors, which would hide the first failure."""
    with suppress(InfiniStoreException):
        client.store.delete(client.keys(plan))


def _p50_and_p99_us(step: Step, seconds: float) -> tuple[float, float]:
    times, _ = run([step], seconds)
    p50, p99 = percentiles(times)
    return p50 * 1e6, p99 * 1e6


def _failed(path: str, error: InfiniStoreException, target: Target) -> Finding:
    if path not in {"unix", "tcp"}:
        return _without(path, str(error), target)
    if isinstance(error, AuthenticationFailed):
        remedy = "give the server's token with --token-file FILE"
    elif isinstance(error, VersionMismatch):
        remedy = "install the same version here and there"
    else:
        remedy = (
            "look on its host: `infinistore stat`, its log, whether it listens beyond 127.0.0.1 (--host), a firewall; "
            "or take a longer --deadline"
        )
    return Finding(_TOPIC, path, Level.BAD, str(error) or type(error).__name__, remedy)


def _without(path: str, text: str, target: Target) -> Finding:
    """The result for an unusable transport if another one works."""
    if path == "shm" and not _by_socket(target) and not is_loopback(urlsplit(target.url).hostname or ""):
        return Finding(
            _TOPIC, path, Level.GOOD, "only for clients on the server's own host" + (f": {text}" if text else "")
        )
    remedy = "see the lines on RDMA above, and the server's log: it says why it serves without"
    if path == "shm":
        remedy = "run the client as the server's user, with the same XDG_RUNTIME_DIR; containers: share that folder"
    return Finding(_TOPIC, path, Level.WARNING, text or "cannot be used", remedy)
