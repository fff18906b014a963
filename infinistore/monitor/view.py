"""The layout of the screen for a terminal size. Pure: snapshot and size in, lines out.

From 60 x 16 on it is the full screen, with two columns from 160 cells on. Below that it
has only the most important figures, and below 12 x 4 only a message. Every size gives
exactly `height` lines of at most `width` cells.
"""

from typing import Final

import attrs
from rich.text import Text

from infinistore.monitor import figures
from infinistore.monitor.controls import HELP, Controls
from infinistore.monitor.lines import UNICODE, Glyphs, Part, join, line, memory_map, sparkline
from infinistore.monitor.model import Snapshot
from infinistore.monitor.sections import (
    activity_lines,
    arena_lines,
    client_lines,
    disk_lines,
    flow_lines,
    footer_line,
    header_line,
    operation_lines,
    pool_line,
    prefix_lines,
    shown_alarms,
    state_part,
    status_lines,
)
from infinistore.monitor.tenants import Tenants, tenant_lines
from infinistore.statistics import DiskTierStatistics

__all__ = ["screen"]

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
    return (lines + [_EMPTY] * (height - len(lines)))[: max(0, height)]


@attrs.define
class _Heights:
    """The heights of variable parts; the gaps are blank lines between all parts or
    none.
    """

    status: int = 1
    arenas: int = 1
    disks: int = 0
    operations: int = 3
    clients: int = 0
    prefixes: int = 0
    gaps: int = 0


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


def _heights(height: int, kinds: int, disks: int) -> _Heights:
    """Distribute the lines.

    The result depends on the size of the screen, the number of kinds of requests so
    far and the number of disks, so that nothing moves when figures change.
    """
    heights = _Heights()
    most = {"operations": kinds + 1, "disks": disks + 1 if disks else 0}
    left = height - _FIXED - heights.status - heights.arenas - heights.operations
    for part, target in _GROWTH:
        has: int = getattr(heights, part)
        more = min(left, min(target, most.get(part, target)) - has)
        if more > 0 and has + more >= _WHOLE.get(part, 0):
            setattr(heights, part, has + more)
            left -= more
    return heights


def _tall(snapshot: Snapshot, controls: Controls, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    heights = _heights(height, len(snapshot.operations), len(snapshot.disks))
    if snapshot.lost is not None and heights.arenas > 1:  # the reason is long, and the map is outdated
        heights.status, heights.arenas = heights.status + 1, heights.arenas - 1
    gap = [_EMPTY] if heights.gaps else []
    lines = [
        header_line(snapshot, controls, width, glyphs),
        *status_lines(snapshot, width, heights.status, glyphs),
        *gap,
        pool_line(snapshot, width, glyphs),
        *arena_lines(snapshot, width, heights.arenas, glyphs),
        *disk_lines(snapshot, width, heights.disks, glyphs),
        *gap,
        *flow_lines(snapshot, width, glyphs),
        *gap,
        *operation_lines(snapshot, width, heights.operations, glyphs),
        *gap,
        *activity_lines(snapshot, width, glyphs),
        *gap,
        *client_lines(snapshot, controls, width, heights.clients, glyphs),
        *gap,
        *prefix_lines(snapshot, controls, width, heights.prefixes, glyphs),
    ]
    return _with_footer(lines, controls, width, height, glyphs)


def _wide(snapshot: Snapshot, controls: Controls, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """The pool and its disks on top; flow and requests on the left, clients and
    prefixes on the right.
    """
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
    left += [_EMPTY] * (room - len(left))
    right += [_EMPTY] * (room - len(right))
    body = [join(one, other, left_width + 3) for one, other in zip(left, right, strict=False)]
    return _with_footer([*top, *body], controls, width, height, glyphs)


def _of_tenants(snapshot: Snapshot, controls: Controls, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """The tenants. What `stats` tells of the pool is what one of them has."""
    gap = [_EMPTY] if height >= _FULL[1] else []
    top = [header_line(snapshot, controls, width, glyphs), *status_lines(snapshot, width, 1, glyphs), *gap]
    tenants = snapshot.tenants or Tenants(problem=_NOT_ASKED)
    lines = [*top, *tenant_lines(tenants, controls, width, height - len(top) - 1, glyphs)]
    return _with_footer(lines, controls, width, height, glyphs)


def _with_footer(lines: list[Text], controls: Controls, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    filled = (lines + [_EMPTY] * height)[: height - 1]
    return [*filled, footer_line(controls, width, glyphs)]


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
