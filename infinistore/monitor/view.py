"""The screen of a store: its parts, each as lines that fit a width, and their layout
for a terminal size; and the same as plain values for `--json`. Pure: snapshot and size
in, lines out.

From 60 x 16 on it is the full screen, with two columns from 160 cells on. Below that it
has only the most important figures, and below 12 x 4 only a message. Every size gives
exactly `height` lines of at most `width` cells.

Numbers have columns of fixed width, so that nothing moves when they change. If a server
does not report a figure, its place says so.

In the document, names end in their unit. An unknown rate is None: after the first
sample, and after the first one of a restarted server.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import attrs
from rich.text import Text

from infinistore.monitor import figures
from infinistore.monitor.controls import HELP, ClientOrder, Controls, PrefixOrder
from infinistore.monitor.lines import (
    UNICODE,
    Column,
    Glyphs,
    Part,
    fit,
    join,
    line,
    memory_map,
    padded,
    sparkline,
    table,
    visible,
)
from infinistore.monitor.model import Alarm, KeptKeys, Lost, Snapshot
from infinistore.monitor.rates import ClientRow, OperationRow, Quantile
from infinistore.monitor.tenants import Tenants, tenant_lines
from infinistore.statistics import ArenaStatistics, DiskTierStatistics, PrefixStatistics, Stats

_STYLES: Final = {"error": "bold red", "warning": "yellow", "notice": ""}
_RESTART_SHOWN: Final = timedelta(minutes=1)
_LABEL: Final = 10
_DISK_STATES: Final = {"off": 0, "read-only": 1, "recovering": 2, "healthy": 3}
_ALWAYS: Final = ("put", "get")
_KINDS: Final = ("put", "get", "match_prefix", "exists", "delete", "release_hold", "list_keys", "evict", "purge")


def state_part(snapshot: Snapshot) -> Part:
    """The state of the server in a word or two."""
    if snapshot.lost is not None:
        return lost_part(snapshot.lost)
    if snapshot.stats is None:
        return "connecting", "dim"
    state = _state(snapshot.stats)
    return state, "green" if state == "serving" else "yellow"


def lost_part(lost: Lost) -> Part:
    """The state of who does not answer."""
    return f"NO ANSWER since {lost.since:%H:%M:%S}", "bold red"


def _state(stats: Stats) -> str:
    return stats.details.state if stats.details is not None else "serving"


def header_line(snapshot: Snapshot, controls: Controls, width: int, glyphs: Glyphs) -> Text:
    """Address, state and uptime of the server; interval and age of the figures."""
    left: list[Part] = [("infinistore ", "bold"), (snapshot.url, "cyan"), ("  ", ""), state_part(snapshot)]
    if snapshot.stats is not None and snapshot.stats.server is not None and snapshot.lost is None:
        left.append((f"  up {figures.duration(snapshot.stats.server.uptime_s)}", ""))
    return first_line(left, snapshot.at, controls, width, glyphs)


def first_line(left: Sequence[Part], at: datetime | None, controls: Controls, width: int, glyphs: Glyphs) -> Text:
    """`left`, then the interval and the age of the figures."""
    right: list[Part] = [(" PAUSED ", "reverse")] if controls.paused else []
    right.append((f"  every {figures.duration(controls.interval_s)}", "dim"))
    right.append((f"  {at:%H:%M:%S}" if at is not None else "", ""))
    right_width = sum(len(text) for text, _ in right)
    left_width = max(0, width - right_width)
    return join(line(left, left_width, glyphs), line(right, width - left_width, glyphs), left_width)


def shown_alarms(snapshot: Snapshot) -> list[Alarm]:
    """All warnings, including the monitor's own about a lost or restarted server."""
    found: list[Alarm] = []
    if snapshot.lost is not None:
        found.append(lost_alarm(snapshot.lost, snapshot.at))
    elif snapshot.restarted_at and snapshot.at and snapshot.at - snapshot.restarted_at < _RESTART_SHOWN:
        text = f"another process serves; seen at {snapshot.restarted_at:%H:%M:%S}{_cost(snapshot.kept)}"
        found.append(Alarm("restarted", "notice", text))
    return found + list(snapshot.alarms if snapshot.lost is None else ())


def lost_alarm(lost: Lost, at: datetime | None) -> Alarm:
    """The warning about who does not answer; `at` is when the figures were taken."""
    times = "once" if lost.attempts == 1 else f"{figures.count(lost.attempts)} times"
    figures_of = f"; figures are of {at:%H:%M:%S}" if at is not None else ""
    return Alarm("lost", "error", f"{lost.reason} (tried {times}{figures_of})")


def _cost(kept: KeptKeys | None) -> str:
    """The keys that a restart has lost, in words."""
    if kept is None or kept.after >= kept.before:
        return ""
    if not kept.after:
        return f". All {figures.count(kept.before)} keys are gone"
    return f". Of {figures.count(kept.before)} keys, {figures.count(kept.after)} are left"


def status_lines(snapshot: Snapshot, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Exactly `height` lines of warnings, the worst first."""
    found = shown_alarms(snapshot)
    calm = "nothing to report" if snapshot.stats is not None else "waiting for the first answer"
    return alarm_lines(found, calm, width, height, glyphs)


def alarm_lines(found: Sequence[Alarm], calm: str, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Exactly `height` lines of warnings, one each; `calm` is said if there is none.
    Where nobody answers, the reason matters most, and is shown in full.
    """
    if found and found[0].kind == "lost" and height > 1:
        said = visible(found[0].text, glyphs)
        wrapped = textwrap.wrap(said, max(1, width - 2), max_lines=height, placeholder=glyphs.ellipsis)
        reason = [
            line([("  " if index else "! ", "bold red"), (text, "bold red")], width, glyphs)
            for index, text in enumerate(wrapped)
        ]
        return padded(reason, height)
    made = [line([("! ", _STYLES[one.severity]), (one.text, _STYLES[one.severity])], width, glyphs) for one in found]
    if not found:
        made = [line([(calm, "dim")], width, glyphs)]
    if len(made) > height > 0:
        more = f"  +{len(made) - height} more"
        kept = found[height - 1]
        style = _STYLES[kept.severity]
        last = line([("! ", style), (kept.text, style)], width - len(more), glyphs)
        made = [*made[: height - 1], join(last, Text(more, "yellow"), width - len(more))]
    return padded(made, height)


def pool_line(snapshot: Snapshot, width: int, glyphs: Glyphs) -> Text:
    """The usage of the pool in numbers."""
    if snapshot.stats is None:
        return line([(fit("pool", _LABEL, glyphs), "cyan"), (figures.UNKNOWN, "")], width, glyphs)
    store = snapshot.stats.store
    used = figures.percent_of(store.used_bytes, store.capacity_bytes)
    largest = figures.size(store.allocator.largest_free_extent_bytes)
    parts: list[Part] = [
        (fit("pool", _LABEL, glyphs), "cyan"),
        (f"{used:>7}", "bold"),
        (f"  {figures.size(store.used_bytes):>8} of {figures.size(store.capacity_bytes):>8}", ""),
        (f"  {figures.count(store.keys):>7} keys", ""),
        ("  largest free", "dim"),
        (f" {largest:>8}", ""),
    ]
    if store.growable_bytes:
        parts += [("  may grow", "dim"), (f" {figures.size(store.growable_bytes):>8}", "")]
    if width >= 120:
        parts += [("  allocator ", "dim"), (store.allocator.name, ""), ("  over ", "dim")]
        parts += [(snapshot.stats.transport, ""), (f" ({snapshot.stats.transport_reason})", "dim")]
    return line(parts, width, glyphs)


def arena_lines(snapshot: Snapshot, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Exactly `height` lines: the arenas as a map of memory."""
    cells = max(1, width - _LABEL - 8)
    if snapshot.stats is None or height <= 0:
        return [Text(end="")] * height
    store, details = snapshot.stats.store, snapshot.stats.details
    if details is None or not details.arenas:  # one bar, filled from the left
        used = store.used_bytes / store.capacity_bytes if store.capacity_bytes else 0.0
        full = round(used * cells)
        bar = glyphs.shades[-1] * full + glyphs.shades[0] * (cells - full)
        made = [_map_row("in use", bar, used, width, glyphs)]
    elif len(details.arenas) == 1:
        made = _spread_arena(details.arenas[0], cells, min(height, 4), width, glyphs)
    else:
        a_row = -(-len(details.arenas) // height)
        groups = [details.arenas[first : first + a_row] for first in range(0, len(details.arenas), a_row)]
        made = [_arena_row(group, cells, width, glyphs) for group in groups]
    return padded(made, height)


def _map_row(label: str, cells: str, used: float | None, width: int, glyphs: Glyphs) -> Text:
    percent = figures.percent(used) if used is not None else ""
    return line([(fit(label, _LABEL, glyphs), "dim"), (cells, "cyan"), (f" {percent:>7}", "")], width, glyphs)


def _spread_arena(arena: ArenaStatistics, cells: int, rows: int, width: int, glyphs: Glyphs) -> list[Text]:
    shades = memory_map(arena.fill, cells * rows, glyphs)
    used = arena.used_bytes / arena.length_bytes if arena.length_bytes else 0.0
    return [
        _map_row("arena 0" if row == 0 else "", shades[row * cells : (row + 1) * cells], used if row == 0 else None,
                 width, glyphs)
        for row in range(rows)
    ]  # fmt: skip


def _arena_row(arenas: Sequence[ArenaStatistics], cells: int, width: int, glyphs: Glyphs) -> Text:
    first, last = arenas[0].index, arenas[-1].index
    label = f"arena {first}" if first == last else f"{first} to {last}"
    each = (cells - (len(arenas) - 1)) // len(arenas)
    averages = [arena.used_bytes / arena.length_bytes if arena.length_bytes else 0.0 for arena in arenas]
    if each >= 1:
        shades = " ".join(memory_map(arena.fill, each, glyphs) for arena in arenas)
    else:
        shades = memory_map(averages, cells, glyphs)
    length = sum(arena.length_bytes for arena in arenas)
    used = sum(arena.used_bytes for arena in arenas) / length if length else 0.0
    return _map_row(label, shades.ljust(cells), used, width, glyphs)


def disk_lines(snapshot: Snapshot, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Exactly `height` lines: a heading, and a row per disk, the worst state first."""
    tier = snapshot.stats.disk if snapshot.stats is not None else None
    waiting = figures.size(tier.queued_bytes if tier is not None else None)
    columns = (
        Column(f"disk, {waiting} due", 0, lambda row: row.path, right=False, keeps_end=True),
        Column("state", 10, lambda row: row.state, right=False),
        Column("used", 6, lambda row: figures.percent_of(row.used_bytes, row.capacity_bytes), rank=1),
        Column("of", 8, lambda row: figures.size(row.capacity_bytes), rank=4),
        Column("read/s", 8, lambda row: figures.size(row.read_bytes_per_s)),
        Column("write/s", 8, lambda row: figures.size(row.written_bytes_per_s)),
        Column("hits/s", 7, lambda row: figures.rate(row.hits_per_s), rank=3),
        Column("queue", 6, lambda row: figures.unless_zero(figures.count, row.queue), rank=2),
        Column("errors", 6, lambda row: figures.unless_zero(figures.count, row.errors)),
    )
    rows = sorted(snapshot.disks, key=lambda row: _DISK_STATES.get(row.state, 0))
    return table(columns, rows, width, height, glyphs)


def flow_lines(snapshot: Snapshot, width: int, glyphs: Glyphs) -> list[Text]:
    """Three lines: bytes in, bytes out, and hits, now and as history."""
    now = snapshot.rates
    spark = max(0, width - _LABEL - 11 - 18)
    shown = list(snapshot.history)[-spark:] if spark else []
    span = figures.duration(sum(point.span_s for point in shown)) if shown else ""
    lines = []
    for label, value, values in (
        ("in", now.received_bytes if now else None, [point.received_bytes for point in shown]),
        ("out", now.sent_bytes if now else None, [point.sent_bytes for point in shown]),
    ):
        peak = max((one for one in values if one is not None), default=0.0)
        note = f"  peak {figures.size_rate(peak):>10}" if peak else ""
        lines.append(_flow_line(label, figures.size_rate(value), sparkline(values, spark, peak, glyphs), note))
    rates = [point.hit_rate for point in shown]
    hits = figures.percent(now.hit_rate if now else None)
    lines.append(_flow_line("hits", hits, sparkline(rates, spark, 1.0, glyphs), f"  last {span:>10}" if span else ""))
    return [line(parts, width, glyphs) for parts in lines]


def _flow_line(label: str, value: str, bars: str, note: str) -> list[Part]:
    return [(f"{label:<{_LABEL}}", "cyan"), (f"{value:>10}", "bold"), (" ", ""), (bars, "green"), (note, "dim")]


def operation_lines(snapshot: Snapshot, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Exactly `height` lines: a heading, and a row per kind of request."""
    span = snapshot.latency_span_s
    took = "since start" if span is None else f"over {figures.duration(max(1, round(span)))}"
    columns = (
        Column("requests", 14, lambda row: row.kind.replace("_", " "), right=False),
        Column("a second", 9, lambda row: figures.rate(row.per_s)),
        Column("bytes/s", 10, lambda row: figures.unless_zero(figures.size, row.bytes_per_s), rank=2),
        Column("errors/s", 8, lambda row: figures.unless_zero(figures.rate, row.errors_per_s), rank=1),
        Column("p50", 7, lambda row: figures.latency(row.p50)),
        Column("p90", 7, lambda row: figures.latency(row.p90), rank=3),
        Column("p99", 7, lambda row: figures.latency(row.p99)),
        Column(took, 0, right=False, rank=4),
    )
    if snapshot.stats is not None and snapshot.stats.details is None:
        return _untold("requests by kind", snapshot, width, height, glyphs)
    return table(columns, _chosen_operations(snapshot, height - 1), width, height, glyphs)


def _chosen_operations(snapshot: Snapshot, most: int) -> list[OperationRow]:
    """Puts, gets, and the most frequent of the other kinds, in a fixed order."""
    order = [*_ALWAYS, *snapshot.busiest, *(row.kind for row in snapshot.operations)]
    chosen = sorted(snapshot.operations, key=lambda row: order.index(row.kind))[: max(0, most)]
    return sorted(chosen, key=lambda row: (_KINDS.index(row.kind) if row.kind in _KINDS else len(_KINDS), row.kind))


def activity_lines(snapshot: Snapshot, width: int, glyphs: Glyphs) -> list[Text]:
    """Two lines: evictions and deletions, and pins."""
    evicted = snapshot.rates.evicted if snapshot.rates is not None else {}
    first: list[Part] = [(f"{'evicted/s':<{_LABEL}}", "cyan")]
    for name, cause in (
        ("on demand", "on_demand"),
        ("fragmented", "fragmentation"),
        ("periodic", "periodic"),
        ("manual", "manual"),
    ):
        first += [(f"  {name}", "dim"), (f"{figures.rate(evicted.get(cause)):>7}", "")]
    second: list[Part] = [(f"{'pinned':<{_LABEL}}", "cyan")]
    if snapshot.stats is not None:
        store = snapshot.stats.store
        second += [(f" {figures.size(store.pinned_bytes):>8}", "")]
        for name, number in (("leases", store.leases), ("holds", store.holds), ("writes", store.reservations)):
            second += [(f"  {name}", "dim"), (f"{figures.count(number):>6}", "")]
        second += [(" of", "dim"), (f" {figures.size(store.reserved_bytes):>8}", "")]
    return [line(first, width, glyphs), line(second, width, glyphs)]


def client_lines(snapshot: Snapshot, controls: Controls, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Exactly `height` lines: a heading, and the filtered and sorted clients."""
    if snapshot.stats is not None and snapshot.stats.details is None:
        return _untold("clients", snapshot, width, height, glyphs)
    figure = _CLIENT_FIGURES[controls.client_order]
    rows = sorted(
        (row for row in snapshot.clients if controls.shows(row.name)),
        key=lambda row: (-figure(row), row.name),
        reverse=controls.reversed,
    )
    columns = (
        Column(f"client, by {controls.client_order.value}", 0, lambda row: row.name, right=False),
        Column("conns", 5, lambda row: figures.count(row.connections), rank=2),
        Column("over", 4, lambda row: row.transport, right=False, rank=4),
        Column("requests/s", 10, lambda row: figures.rate(row.requests_per_s), rank=1),
        Column("in", 10, lambda row: figures.size_rate(row.received_bytes_per_s)),
        Column("out", 10, lambda row: figures.size_rate(row.sent_bytes_per_s)),
        Column("pinned", 8, lambda row: figures.unless_zero(figures.size, row.pinned_bytes), rank=3),
        Column("errors", 7, lambda row: figures.unless_zero(figures.count, row.errors), rank=5),
    )
    return table(columns, rows, width, height, glyphs)


_CLIENT_FIGURES: Final[Mapping[ClientOrder, Callable[[ClientRow], float]]] = {
    ClientOrder.TRAFFIC: lambda row: row.recent_bytes_per_s,
    ClientOrder.REQUESTS: lambda row: row.recent_requests_per_s,
    ClientOrder.PINNED: lambda row: row.pinned_bytes,
    ClientOrder.ERRORS: lambda row: row.errors,
    ClientOrder.NAME: lambda row: 0,
}


def prefix_lines(snapshot: Snapshot, controls: Controls, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Exactly `height` lines: a heading, and the filtered and sorted prefixes."""
    if snapshot.stats is not None and snapshot.stats.details is None:
        return _untold("keys by prefix", snapshot, width, height, glyphs)
    known = snapshot.stats.details.prefixes if snapshot.stats is not None and snapshot.stats.details is not None else []
    figure = _PREFIX_FIGURES[controls.prefix_order]
    rows = sorted(
        (one for one in known if controls.shows(one.prefix)),
        key=lambda one: (-figure(one), one.prefix),
        reverse=controls.reversed,
    )
    total = sum(one.payload_bytes for one in known)
    columns = (
        Column(
            f"prefix, by {controls.prefix_order.value}", 0, lambda one: one.prefix or "(no separator)", right=False
        ),
        Column("keys", 10, lambda one: figures.count(one.keys)),
        Column("bytes", 10, lambda one: figures.size(one.payload_bytes)),
        Column("share", 8, lambda one: figures.percent_of(one.payload_bytes, total), rank=1),
        Column(
            "+-", 8, lambda one: figures.percent(one.payload_error_bytes / one.payload_bytes)
            if one.payload_error_bytes else "", rank=2,
        ),
    )  # fmt: skip
    return table(columns, rows, width, height, glyphs)


_PREFIX_FIGURES: Final[Mapping[PrefixOrder, Callable[[PrefixStatistics], int]]] = {
    PrefixOrder.BYTES: lambda one: one.payload_bytes,
    PrefixOrder.KEYS: lambda one: one.keys,
    PrefixOrder.NAME: lambda one: 0,
}


def _untold(what: str, snapshot: Snapshot, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    server = snapshot.stats.server if snapshot.stats is not None else None
    release = f" ({server.version})" if server is not None else ""
    said = line([(what, "cyan"), (f"  not told by this server{release}; a newer one does", "dim")], width, glyphs)
    return padded([said], height)


def footer_line(controls: Controls, width: int, glyphs: Glyphs) -> Text:
    """The keys, or the filter that is being typed."""
    back = [("Esc", "back")] if controls.in_cluster else []
    other = [] if controls.in_cluster else [("t", "store" if controls.tenants else "tenants")]
    return keys_line(controls, [*back, ("s", "sort"), *other], width, glyphs)


def keys_line(controls: Controls, own: Sequence[tuple[str, str]], width: int, glyphs: Glyphs) -> Text:
    """The keys, `own` among those of all screens, or the filter that is being typed."""
    if controls.typing is not None:
        hint = "  Enter keeps it, Esc drops it"
        return line([("filter: ", "cyan"), (controls.typing, "bold"), ("_", "blink"), (hint, "dim")], width, glyphs)
    if not controls.has_keyboard:
        return line([("no keys: standard input is no terminal. Ctrl-C quits", "dim")], width, glyphs)
    parts: list[Part] = []
    if controls.filter:
        parts.append((f'only "{controls.filter}"   ', "yellow"))
    if controls.reversed:
        parts.append(("reversed   ", "yellow"))
    pause = "go on" if controls.paused else "pause"
    for key, meaning in (("q", "quit"), ("?", "help"), *own, ("/", "filter"), ("p", pause), ("+ -", "interval")):
        if sum(len(text) for text, _ in parts) + len(key) + 1 + len(meaning) > width:
            break  # omit partial words
        parts += [(f"{key} ", "bold"), (f"{meaning}   ", "dim")]
    return line(parts, width, glyphs)


_FULL: Final = (60, 16)
_TINY: Final = (12, 4)
_TWO_COLUMNS: Final = 160
_EMPTY: Final = Text(end="")
_NOT_ASKED: Final = "start the monitor with --manage-url to see the tenants, and --token-file of an operator"


def screen(snapshot: Snapshot, controls: Controls, width: int, height: int, glyphs: Glyphs = UNICODE) -> list[Text]:
    """Return the screen as exactly `height` lines, none wider than `width` cells."""
    if width < _TINY[0] or height < _TINY[1]:
        lines = [line([("too small", "yellow")], width, glyphs)]
    elif controls.help:
        lines = _help(width, glyphs)
    elif controls.tenants:
        lines = _of_tenants(snapshot, controls, width, height, glyphs)
    elif width < _FULL[0] or height < _FULL[1]:
        lines = _reduced(snapshot, controls, width, height, glyphs)
    elif width >= _TWO_COLUMNS:
        lines = _wide(snapshot, controls, width, height, glyphs)
    else:
        lines = _tall(snapshot, controls, width, height, glyphs)
    return padded(lines, height)


_LEAST: Final = {"status": 1, "arenas": 1, "disks": 0, "operations": 3, "clients": 0, "prefixes": 0, "gaps": 0}
"""The heights of the variable parts on the smallest screen. The gaps are blank lines
between all parts or none.
"""
_FIXED: Final = 8  # header, pool, flow (3), activity (2), footer
_GAPS: Final = 6
# The parts in the order of growth, with limits; a table needs at least two lines.
_GROWTH: Final = (
    ("disks", 3), ("clients", 2), ("prefixes", 2), ("operations", 5), ("disks", 5), ("clients", 4), ("arenas", 2),
    ("prefixes", 3), ("operations", 6), ("clients", 5), ("prefixes", 5), ("disks", 9), ("gaps", _GAPS),
    ("status", 3), ("arenas", 4),
    ("operations", 9), ("clients", 9), ("prefixes", 9), ("operations", 12), ("clients", 20), ("prefixes", 20),
    ("arenas", 8), ("clients", 40), ("prefixes", 1000),
)  # fmt: skip
_WHOLE: Final = {"gaps": _GAPS, "clients": 2, "prefixes": 2, "disks": 2}


def _heights(height: int, kinds: int, disks: int) -> dict[str, int]:
    """Distribute the lines.

    The result depends on the size of the screen, the number of kinds of requests so
    far and the number of disks, so that nothing moves when figures change.
    """
    heights = dict(_LEAST)
    most = {"operations": kinds + 1, "disks": disks + 1 if disks else 0}
    left = height - _FIXED - sum(heights.values())
    for part, target in _GROWTH:
        more = min(left, min(target, most.get(part, target)) - heights[part])
        if more > 0 and heights[part] + more >= _WHOLE.get(part, 0):
            heights[part] += more
            left -= more
    return heights


def _tall(snapshot: Snapshot, controls: Controls, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    heights = _heights(height, len(snapshot.operations), len(snapshot.disks))
    if snapshot.lost is not None and heights["arenas"] > 1:  # the reason is long, and the map is outdated
        heights["status"] += 1
        heights["arenas"] -= 1
    gap = [_EMPTY] if heights["gaps"] else []
    lines = [
        header_line(snapshot, controls, width, glyphs),
        *status_lines(snapshot, width, heights["status"], glyphs),
        *gap,
        pool_line(snapshot, width, glyphs),
        *arena_lines(snapshot, width, heights["arenas"], glyphs),
        *disk_lines(snapshot, width, heights["disks"], glyphs),
        *gap,
        *flow_lines(snapshot, width, glyphs),
        *gap,
        *operation_lines(snapshot, width, heights["operations"], glyphs),
        *gap,
        *activity_lines(snapshot, width, glyphs),
        *gap,
        *client_lines(snapshot, controls, width, heights["clients"], glyphs),
        *gap,
        *prefix_lines(snapshot, controls, width, heights["prefixes"], glyphs),
    ]
    return _with_footer(lines, controls, width, height, glyphs)


def _wide(snapshot: Snapshot, controls: Controls, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Pool and disks on top; requests on the left, clients on the right."""
    gap = [_EMPTY] if height >= 24 else []
    arenas = 1 if height < 24 else 2 if height < 40 else 4
    disks = min(len(snapshot.disks) + 1, max(2, height // 6)) if snapshot.disks else 0
    top = [
        header_line(snapshot, controls, width, glyphs),
        *status_lines(snapshot, width, 1 if height < 30 else 3, glyphs),
        *gap,
        pool_line(snapshot, width, glyphs),
        *arena_lines(snapshot, width, arenas, glyphs),
        *disk_lines(snapshot, width, disks, glyphs),
        *gap,
    ]
    left_width = min(100, (width - 3) // 2)
    right_width = width - left_width - 3
    room = height - len(top) - 1
    operations = max(1, min(12, room - 5 - 2 * len(gap)))
    clients = (room - len(gap) + 1) // 2
    left = [
        *flow_lines(snapshot, left_width, glyphs),
        *gap,
        *operation_lines(snapshot, left_width, operations, glyphs),
        *gap,
        *activity_lines(snapshot, left_width, glyphs),
    ]
    right = [
        *client_lines(snapshot, controls, right_width, clients, glyphs),
        *gap,
        *prefix_lines(snapshot, controls, right_width, room - clients - len(gap), glyphs),
    ]
    rows = zip(padded(left, room), padded(right, room), strict=True)
    body = [join(one, other, left_width + 3) for one, other in rows]
    return _with_footer([*top, *body], controls, width, height, glyphs)


def _of_tenants(snapshot: Snapshot, controls: Controls, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """The tenants. The pool is left out: `stats` has only the part of one of them."""
    gap = [_EMPTY] if height >= _FULL[1] else []
    top = [header_line(snapshot, controls, width, glyphs), *status_lines(snapshot, width, 1, glyphs), *gap]
    tenants = snapshot.tenants or Tenants(problem=_NOT_ASKED)
    lines = [*top, *tenant_lines(tenants, controls, width, height - len(top) - 1, glyphs)]
    return _with_footer(lines, controls, width, height, glyphs)


def _with_footer(lines: list[Text], controls: Controls, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    return [*padded(lines, height - 1), footer_line(controls, width, glyphs)]


def _reduced(snapshot: Snapshot, controls: Controls, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """The most important figures, one per line, for a small terminal."""
    state: list[Part] = [state_part(snapshot)]
    if controls.paused:
        state.insert(0, ("PAUSED ", "reverse"))
    rows: list[list[Part]] = [state]
    alarms = shown_alarms(snapshot)
    if alarms:
        more = f" +{len(alarms) - 1}" if len(alarms) > 1 else ""
        rows.append([(f"!{more} ", "yellow"), (alarms[0].text, "yellow")])
    else:
        rows.append([("nothing to report", "dim")])
    rows += _reduced_figures(snapshot, width, glyphs)
    rows = rows[: height - 1]
    lines = [line(parts, width, glyphs) for parts in rows]
    if height > len(lines) + 2:
        lines.insert(0, line([(snapshot.url, "cyan")], width, glyphs))
    return _with_footer(lines, controls, width, height, glyphs)


def _reduced_figures(snapshot: Snapshot, width: int, glyphs: Glyphs) -> list[list[Part]]:
    stats, rates = snapshot.stats, snapshot.rates
    if stats is None:
        return []
    store = stats.store
    used = store.used_bytes / store.capacity_bytes if store.capacity_bytes else 0.0
    cells = max(0, width - 18)
    shown = list(snapshot.history)[-cells:] if cells else []
    received, sent = [point.received_bytes for point in shown], [point.sent_bytes for point in shown]
    hits = [point.hit_rate for point in shown]
    drawn = (
        ("pool", figures.percent(used), _level(used, cells, glyphs)),
        *(_reduced_disks(stats.disk, cells, glyphs) if stats.disk is not None else ()),
        ("in", figures.size_rate(rates.received_bytes if rates else None), _bars(received, cells, glyphs)),
        ("out", figures.size_rate(rates.sent_bytes if rates else None), _bars(sent, cells, glyphs)),
        ("hits", figures.percent(rates.hit_rate if rates else None), sparkline(hits, cells, 1.0, glyphs)),
        ("req/s", figures.rate(rates.requests if rates else None), ""),
        ("evict/s", figures.rate(sum(rates.evicted.values()) if rates else None), ""),
        ("keys", figures.count(store.keys), ""),
    )
    return [
        [(f"{label:<7}", "cyan"), (f"{value:>10}", "bold"), (f" {bars}" if bars else "", "green")]
        for label, value, bars in drawn
    ]


def _reduced_disks(tier: DiskTierStatistics, cells: int, glyphs: Glyphs) -> list[tuple[str, str, str]]:
    capacity = sum(one.capacity_bytes for one in tier.disks)
    used = sum(one.used_bytes for one in tier.disks) / capacity if capacity else 0.0
    return [("disks", figures.percent(used), _level(used, cells, glyphs))]


def _level(used: float, cells: int, glyphs: Glyphs) -> str:
    return memory_map([1.0] * round(100 * used) + [0.0] * (100 - round(100 * used)), cells, glyphs)


def _bars(values: list[float | None], cells: int, glyphs: Glyphs) -> str:
    return sparkline(values, cells, max((one for one in values if one is not None), default=0.0), glyphs)


def _help(width: int, glyphs: Glyphs) -> list[Text]:
    lines = [line([("infinistore monitor", "bold")], width, glyphs), _EMPTY]
    lines += [line([(f"{key:<11}", "bold"), (meaning, "")], width, glyphs) for key, meaning in HELP]
    lines += [
        _EMPTY,
        line([("A map shows each part of an arena, from free to full: ", ""), (glyphs.shades, "cyan")], width, glyphs),
        line([("in and out count payload. p50, p90 and p99 are of the histogram's buckets,", "")], width, glyphs),
        line([("with < or > where only a bound is known.", "")], width, glyphs),
    ]
    return lines


def document(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as a JSON object."""
    stats, lost, rates = snapshot.stats, snapshot.lost, snapshot.rates
    return {
        "at": snapshot.at.isoformat(timespec="milliseconds") if snapshot.at is not None else None,
        "url": snapshot.url,
        "state": "lost" if lost is not None or stats is None else _state(stats),
        "lost_since": lost.since.isoformat(timespec="milliseconds") if lost is not None else None,
        "lost_reason": lost.reason if lost is not None else None,
        "restarts": snapshot.restarts,
        "warnings": [attrs.asdict(alarm) for alarm in shown_alarms(snapshot)],
        "elapsed_s": rates.elapsed_s if rates is not None else None,
        "per_s": attrs.asdict(rates, filter=_is_per_s) if rates is not None and lost is None else None,
        "hit_rate": rates.hit_rate if rates is not None else None,
        "latency_span_s": snapshot.latency_span_s,
        "operations": [attrs.asdict(row, value_serializer=_plain) for row in snapshot.operations],
        "clients": [attrs.asdict(row) for row in snapshot.clients],
        "stats": _stats(stats) if stats is not None else None,
        **_tenants(snapshot),
        **({"disks": [attrs.asdict(row) for row in snapshot.disks]} if snapshot.disks else {}),
    }


def _tenants(snapshot: Snapshot) -> dict[str, Any]:
    if snapshot.tenants is None:
        return {}
    problem = snapshot.tenants.problem or None
    return {"tenants": [attrs.asdict(row) for row in snapshot.tenants.rows], "tenants_problem": problem}


def _stats(stats: Stats) -> dict[str, Any]:
    """`disk` is there only if the store has disks."""
    return {name: value for name, value in attrs.asdict(stats).items() if name != "disk" or value is not None}


def _is_per_s(field: "attrs.Attribute[Any]", value: object) -> bool:
    return field.name not in ("elapsed_s", "hit_rate", "reads")


def _plain(record: object, field: object, value: object) -> object:
    """A value in JSON. `bound` is "<" or ">" if it is only a bound, else empty."""
    return {"s": value.value_s, "bound": value.bound} if isinstance(value, Quantile) else value
