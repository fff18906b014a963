"""The layout of a cluster's screen for a terminal size. Pure: snapshot and size in,
lines out.

The first lines say what the view is and what is wrong; a table has a row for each node
and scrolls so that the selected one is seen; the last row is the sum. Every size gives
exactly `height` lines of at most `width` cells.
"""

from typing import Final

import attrs
from rich.text import Text

from infinistore.cluster.membership import NodeState
from infinistore.monitor import figures
from infinistore.monitor.cluster.controls import HELP, ClusterControls, NodeOrder
from infinistore.monitor.cluster.model import ClusterSnapshot, NodeRow, Total, total
from infinistore.monitor.lines import UNICODE, Column, Glyphs, Part, join, line, table
from infinistore.monitor.model import Alarm
from infinistore.monitor.view import alarm_lines, first_line, keys_line
from infinistore.monitor.view import screen as store_screen
from infinistore.statistics import Stats

__all__ = ["cluster_alarms", "screen", "shown_rows"]

_TINY: Final = (12, 4)
_ROOMY: Final = 16
_EMPTY: Final = Text(end="")
_COLUMNS: Final = (
    Column("", 1, right=False),
    Column("node", 0, right=False, keeps_end=True, smallest=15),
    Column("address", 21, right=False, rank=9, keeps_end=True),
    Column("state", 8, right=False, rank=1),
    Column("weight", 6, rank=4),
    Column("used", 6),
    Column("of", 8, rank=7),
    Column("keys", 7, rank=8),
    Column("hits", 6, rank=2),
    Column("req/s", 7),
    Column("in/s", 8, rank=3),
    Column("out/s", 8, rank=3),
    Column("disk", 6, rank=6),
    Column("answer", 6, rank=5),
)


def screen(
    snapshot: ClusterSnapshot, controls: ClusterControls, width: int, height: int, glyphs: Glyphs = UNICODE
) -> list[Text]:
    """Return the screen as exactly `height` lines, none wider than `width` cells."""
    opened = next((one for one in snapshot.rows if one.node.id == controls.opened), None)
    if opened is not None:
        name = opened.node.id if opened.node.id in opened.node.address else f"{opened.node.id} {opened.node.address}"
        return store_screen(attrs.evolve(opened.snapshot, url=name), controls.screen, width, height, glyphs)
    if width < _TINY[0] or height < _TINY[1]:
        lines = [line([("too small", "yellow")], width, glyphs)]
    elif controls.screen.help:
        lines = [line([("infinistore monitor", "bold"), (" of a cluster", "")], width, glyphs), _EMPTY]
        lines += [line([(f"{key:<11}", "bold"), (meaning, "")], width, glyphs) for key, meaning in HELP]
    else:
        lines = _overview(snapshot, controls, width, height, glyphs)
    return (lines + [_EMPTY] * (height - len(lines)))[: max(0, height)]


def shown_rows(snapshot: ClusterSnapshot, controls: ClusterControls) -> list[NodeRow]:
    """Return the rows that the filter lets through, in their order."""
    wanted = controls.screen
    rows = [one for one in snapshot.rows if wanted.shows(one.node.id) or wanted.shows(one.node.address)]

    def figure(row: NodeRow) -> float:
        stats, rates = row.snapshot.stats, row.rates
        if controls.order is NodeOrder.MEMORY and row.answers and stats is not None:
            return -stats.store.used_bytes
        if controls.order is NodeOrder.REQUESTS and rates is not None:
            return -rates.requests
        return 0.0

    return sorted(rows, key=lambda row: (figure(row), row.node.id), reverse=wanted.reversed)


def cluster_alarms(snapshot: ClusterSnapshot) -> list[Alarm]:
    """What is wrong: silent nodes first, then the view, then what nodes warn of."""
    silent = [one for one in snapshot.rows if one.silent_s is not None]
    found = [Alarm("silent", "error", f"{one.node.id} is {_silence(one)}") for one in silent]
    if snapshot.problem:
        found.append(Alarm("view", "warning", f"the view stays as it is: {snapshot.problem}"))
    if not snapshot.rows:
        found.append(Alarm("empty", "warning", "the cluster has no nodes; start a server with --cluster"))
    elif not any(one.node.weight and one.node.state is not NodeState.DRAINING for one in snapshot.rows):
        found.append(Alarm("empty", "warning", "no node takes writes: each drains, or has no weight"))
    theirs = [
        attrs.evolve(alarm, text=f"{one.node.id}: {alarm.text}")
        for one in snapshot.rows
        if one.answers
        for alarm in one.snapshot.alarms
    ]
    return found + [one for severity in ("error", "warning", "notice") for one in theirs if one.severity == severity]


def _overview(
    snapshot: ClusterSnapshot, controls: ClusterControls, width: int, height: int, glyphs: Glyphs
) -> list[Text]:
    sums = total(snapshot.rows)
    silent = sum(one.silent_s is not None for one in snapshot.rows)
    view: list[Part] = [("nodes     ", "cyan"), (str(sums.nodes), "bold")]
    if silent:
        view.append((f", {silent} silent" if silent < sums.nodes else ", none answers", "bold red"))
    view.append((f"  {_describe_view(snapshot)}", ""))
    warnings = 1 if height < _ROOMY else 3
    gap = [_EMPTY] if height >= _ROOMY else []
    top = [
        first_line([("infinistore ", "bold"), (snapshot.url, "cyan")], snapshot.at, controls.screen, width, glyphs),
        line(view, width, glyphs),
        *alarm_lines(cluster_alarms(snapshot), "nothing to report", width, warnings, glyphs),
        *gap,
    ]
    rows = shown_rows(snapshot, controls)
    room = max(0, height - len(top) - 3)  # the heading, the sum, the keys
    place = controls.place([one.node.id for one in rows])
    first = max(0, min(place - room // 2, len(rows) - room))
    seen = rows[first : first + room]
    cells = [_cells(one, is_selected=first + number == place) for number, one in enumerate(seen)]
    styles = [_style(one, is_selected=first + number == place) for number, one in enumerate(seen)]
    columns = (_COLUMNS[0], attrs.evolve(_COLUMNS[1], title=f"node, by {controls.order.value}"), *_COLUMNS[2:])
    if not controls.screen.has_keyboard:
        cells = [["", *row[1:]] for row in cells]
    body = table(columns, [*cells, _total_cells(sums)], width, len(seen) + 2, glyphs, styles=[*styles, "bold"])
    filled = (top + body + [_EMPTY] * height)[: height - 1]
    where = f"  {first + 1}-{first + len(seen)} of {len(rows)}" if len(seen) < len(rows) else ""
    keys_width = width - len(where)
    footer = keys_line(controls.screen, [("Enter", "open"), ("s", "sort")], keys_width, glyphs)
    return [*filled, join(footer, Text(where, "yellow"), keys_width)]


def _describe_view(snapshot: ClusterSnapshot) -> str:
    copies = "1 copy" if snapshot.copies == 1 else f"{snapshot.copies} copies"
    if snapshot.kind == "static":
        source = "a static view"
    else:
        said = "read" if snapshot.kind == "file" else "confirmed"
        source = f"view of {snapshot.kind}, {said} {figures.duration(snapshot.view_age_s)} ago"
    return f"{source}; {copies} of each block"


def _cells(row: NodeRow, *, is_selected: bool) -> list[str]:
    node, stats, rates = row.node, row.snapshot.stats, row.rates
    mine = [">" if is_selected else "", node.id, node.address.partition("://")[2], node.state.value, str(node.weight)]
    if row.silent_s is not None:
        return [*mine, _silence(row)]
    if stats is None:
        return [*mine, "connecting"]
    store = stats.store
    return [
        *mine,
        figures.percent(store.used_bytes / store.capacity_bytes if store.capacity_bytes else None),
        figures.size(store.capacity_bytes),
        figures.count(store.keys),
        figures.percent(rates.hit_rate if rates else None),
        figures.rate(rates.requests if rates else None),
        figures.size(rates.received_bytes if rates else None),
        figures.size(rates.sent_bytes if rates else None),
        _used_disk(stats),
        figures.duration(row.age_s or 0.0),
    ]


def _used_disk(stats: Stats) -> str:
    if stats.disk is None:
        return figures.UNKNOWN
    capacity = sum(one.capacity_bytes for one in stats.disk.disks)
    return figures.percent(sum(one.used_bytes for one in stats.disk.disks) / capacity if capacity else None)


def _total_cells(sums: Total) -> list[str]:
    name = f"total, {sums.answering} of {sums.nodes}" if sums.answering < sums.nodes else "total"
    part = sums.used_bytes / sums.capacity_bytes if sums.used_bytes is not None and sums.capacity_bytes else None
    disk = (
        sums.disk_used_bytes / sums.disk_capacity_bytes
        if sums.disk_used_bytes is not None and sums.disk_capacity_bytes
        else None
    )
    return [
        *("", name, "", "", str(sums.weight), figures.percent(part), figures.size(sums.capacity_bytes)),
        *(figures.count(sums.keys), figures.percent(sums.hit_rate), figures.rate(sums.requests)),
        *(figures.size(sums.received_bytes), figures.size(sums.sent_bytes), figures.percent(disk), ""),
    ]


def _silence(row: NodeRow) -> str:
    reason = f": {row.snapshot.lost.reason}" if row.snapshot.lost is not None else ""
    return f"silent for {figures.duration(int(row.silent_s or 0.0))}{reason}"


def _style(row: NodeRow, *, is_selected: bool) -> str:
    style = "red" if row.silent_s is not None else "" if row.node.state is NodeState.SERVING else "yellow"
    return f"{style} reverse".strip() if is_selected else style
