"""The screen of a cluster: its nodes, what each does, and the sum; its keys; and the
same as plain values for `--json`. Pure: snapshot and size in, lines out.

The first lines say what the view is and what is wrong; a table has a row for each node
and scrolls so that the selected one is seen; the last row is the sum. Every size gives
exactly `height` lines of at most `width` cells. While a node is open, its screen has
the keys that the screen of a store always has.

In the document, names end in their unit. Unknown values are None.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, Final

import attrs
from rich.text import Text

from infinistore.cluster.membership import Node, NodeState
from infinistore.monitor import figures
from infinistore.monitor.controls import (
    BACKSPACE,
    DOWN,
    END,
    ENTER,
    ESCAPE,
    HOME,
    PAGE_DOWN,
    PAGE_UP,
    UP,
    Controls,
    following,
)
from infinistore.monitor.lines import UNICODE, Column, Glyphs, Part, join, line, padded, table
from infinistore.monitor.model import Alarm, Snapshot
from infinistore.monitor.rates import Rates
from infinistore.monitor.view import alarm_lines, first_line, keys_line
from infinistore.monitor.view import document as store_document
from infinistore.monitor.view import screen as store_screen


@attrs.frozen
class NodeRow:
    """One node. `snapshot` keeps the last figures of a silent one."""

    node: Node
    snapshot: Snapshot
    age_s: float | None = None
    """For how long it has not answered; None if it never has."""
    silent_s: float | None = None
    """For how long it has been silent; None if it answers, or was asked just now."""

    @property
    def answers(self) -> bool:
        """Whether it has answered, and still does."""
        return self.age_s is not None and self.silent_s is None

    @property
    def rates(self) -> Rates | None:
        """Its current rates; None if unknown."""
        return self.snapshot.rates if self.answers else None


@attrs.frozen
class ClusterSnapshot:
    """The contents of a screen."""

    url: str
    at: datetime
    kind: str
    """Where the view comes from: "static", "file" or "etcd"."""
    epoch: int
    copies: int
    view_age_s: float
    """For how long nothing has confirmed the view."""
    problem: str
    """Why there is no newer view; empty without a problem."""
    rows: Sequence[NodeRow] = ()


@attrs.frozen(kw_only=True)
class Total:
    """The sum of the nodes that answer. None is unknown."""

    nodes: int
    answering: int
    weight: int
    """Of all nodes."""
    keys: int | None
    used_bytes: int | None
    capacity_bytes: int | None
    disk_used_bytes: int | None
    disk_capacity_bytes: int | None
    requests: float | None
    received_bytes: float | None
    sent_bytes: float | None
    hit_rate: float | None


def total(rows: Sequence[NodeRow]) -> Total:
    """Add the nodes up."""
    found = [one.snapshot.stats for one in rows if one.answers and one.snapshot.stats is not None]
    rates = [one.rates for one in rows if one.rates is not None]
    disks = [disk for stats in found if stats.disk is not None for disk in stats.disk.disks]
    reads = sum(one.reads for one in rates)
    hits = sum(one.reads * one.hit_rate for one in rates if one.hit_rate is not None)

    def added(of: Callable[[Rates], float]) -> float | None:
        return sum(map(of, rates)) if rates else None

    return Total(
        nodes=len(rows),
        answering=sum(one.answers for one in rows),
        weight=sum(one.node.weight for one in rows),
        keys=_added(one.store.keys for one in found),
        used_bytes=_added(one.store.used_bytes for one in found),
        capacity_bytes=_added(one.store.capacity_bytes for one in found),
        disk_used_bytes=_added(one.used_bytes for one in disks),
        disk_capacity_bytes=_added(one.capacity_bytes for one in disks),
        requests=added(lambda one: one.requests),
        received_bytes=added(lambda one: one.received_bytes),
        sent_bytes=added(lambda one: one.sent_bytes),
        hit_rate=hits / reads if reads > 0 else None,
    )


def _added(values: Iterable[int]) -> int | None:
    several = list(values)
    return sum(several) if several else None


_PAGE_ROWS: Final = 10
_STEPS: Final = {
    UP: -1, DOWN: 1, "k": -1, "j": 1, PAGE_UP: -_PAGE_ROWS, PAGE_DOWN: _PAGE_ROWS,
}  # fmt: skip

HELP: Final = (
    ("q, Ctrl-C", "quit"),
    ("up, down", "select a node; also k and j, page up and page down, home and end"),
    ("Enter", "the screen of the selected node; Esc or Backspace leads back"),
    ("s", "sort nodes by: name, requests, memory"),
    ("r", "reverse the order"),
    ("/", "show only nodes with a text in their name or address"),
    ("p, space", "pause the screen; samples are still taken"),
    ("+ -", "sample less often, more often"),
    ("?, h", "this help; any key leaves it"),
)


class NodeOrder(enum.Enum):
    """Sort orders of nodes; all except the name are descending."""

    NAME = "name"
    REQUESTS = "requests"
    MEMORY = "memory"


@attrs.frozen
class ClusterControls:
    """The user's choices. `screen` has those that every screen has."""

    screen: Controls = attrs.field(factory=Controls)
    order: NodeOrder = NodeOrder.NAME
    selected: str = ""
    """The id of a node; of one that is not shown, the next one by its name counts."""
    opened: str | None = None
    """The node whose screen is shown."""

    def place(self, shown: Sequence[str]) -> int:
        """Return which of the shown nodes is selected."""
        if self.selected in shown:
            return shown.index(self.selected)
        return max(0, min(len(shown) - 1, sum(one < self.selected for one in shown)))

    def press(self, key: str, shown: Sequence[str]) -> "ClusterControls":
        """Return the state after a key; `shown` are the nodes in order, by their id."""
        if self.screen.typing is not None or self.screen.help:
            return self._press_screen(key)
        if self.opened is not None:
            if key == BACKSPACE or (key == ESCAPE and not self.screen.filter):
                return attrs.evolve(self, opened=None, screen=attrs.evolve(self.screen, filter="", in_cluster=False))
            return self._press_screen(key)
        if key == ENTER and shown:
            selected = shown[self.place(shown)]
            # A filter of nodes is none of clients and prefixes.
            screen = attrs.evolve(self.screen, filter="", in_cluster=True)
            return attrs.evolve(self, selected=selected, opened=selected, screen=screen)
        if key in _STEPS or key in (HOME, END):
            return self._move(key, shown)
        if key == "s":
            return attrs.evolve(self, order=following(self.order))
        return self._press_screen(key)

    def _move(self, key: str, shown: Sequence[str]) -> "ClusterControls":
        if not shown:
            return self
        place = {HOME: 0, END: len(shown) - 1}.get(key, self.place(shown) + _STEPS.get(key, 0))
        return attrs.evolve(self, selected=shown[max(0, min(len(shown) - 1, place))])

    def _press_screen(self, key: str) -> "ClusterControls":
        return attrs.evolve(self, screen=self.screen.press(key))


_TINY: Final = (12, 4)
_ROOMY: Final = 16
_EMPTY: Final = Text(end="")
_NODE: Final = (
    Column("", 1, right=False),
    Column("node", 0, lambda row: row.node.id, right=False, keeps_end=True, smallest=15),
    Column("address", 21, lambda row: row.node.address.partition("://")[2], right=False, rank=9, keeps_end=True),
    Column("state", 8, lambda row: row.node.state.value, right=False, rank=1),
    Column("weight", 6, lambda row: str(row.node.weight), rank=4),
)
_FIGURES: Final = (
    Column("used", 6, lambda sums: figures.percent_of(sums.used_bytes, sums.capacity_bytes)),
    Column("of", 8, lambda sums: figures.size(sums.capacity_bytes), rank=7),
    Column("keys", 7, lambda sums: figures.count(sums.keys), rank=8),
    Column("hits", 6, lambda sums: figures.percent(sums.hit_rate), rank=2),
    Column("req/s", 7, lambda sums: figures.rate(sums.requests)),
    Column("in/s", 8, lambda sums: figures.size(sums.received_bytes), rank=3),
    Column("out/s", 8, lambda sums: figures.size(sums.sent_bytes), rank=3),
    Column("disk", 6, lambda sums: figures.percent_of(sums.disk_used_bytes, sums.disk_capacity_bytes), rank=6),
)
"""The columns of a `Total`: of one node, and of all."""
_ANSWER: Final = Column("answer", 6, rank=5)


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
    return padded(lines, height)


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
    """All warnings: silent nodes first, then the view, then those of the nodes."""
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
    selected = [first + number == place for number in range(len(seen))]
    marks = [">" if mine and controls.screen.has_keyboard else "" for mine in selected]
    cells = [[mark, *_cells(one)] for mark, one in zip(marks, seen, strict=True)]
    styles = [_style(one, is_selected=mine) for mine, one in zip(selected, seen, strict=True)]
    columns = (
        _NODE[0],
        attrs.evolve(_NODE[1], title=f"node, by {controls.order.value}"),
        *_NODE[2:],
        *_FIGURES,
        _ANSWER,
    )
    body = table(columns, [*cells, _total_cells(sums)], width, len(seen) + 2, glyphs, styles=[*styles, "bold"])
    where = f"  {first + 1}-{first + len(seen)} of {len(rows)}" if len(seen) < len(rows) else ""
    keys_width = width - len(where)
    footer = keys_line(controls.screen, [("Enter", "open"), ("s", "sort")], keys_width, glyphs)
    return [*padded(top + body, height - 1), join(footer, Text(where, "yellow"), keys_width)]


def _describe_view(snapshot: ClusterSnapshot) -> str:
    copies = "1 copy" if snapshot.copies == 1 else f"{snapshot.copies} copies"
    if snapshot.kind == "static":
        source = "a static view"
    else:
        said = "read" if snapshot.kind == "file" else "confirmed"
        source = f"view of {snapshot.kind}, {said} {figures.duration(snapshot.view_age_s)} ago"
    return f"{source}; {copies} of each block"


def _cells(row: NodeRow) -> list[str]:
    mine = [column.cell(row) for column in _NODE[1:]]
    if row.silent_s is not None:
        return [*mine, _silence(row)]
    if row.snapshot.stats is None:
        return [*mine, "connecting"]
    sums = total([row])
    return [*mine, *(column.cell(sums) for column in _FIGURES), figures.duration(row.age_s or 0.0)]


def _total_cells(sums: Total) -> list[str]:
    name = f"total, {sums.answering} of {sums.nodes}" if sums.answering < sums.nodes else "total"
    return ["", name, "", "", str(sums.weight), *(column.cell(sums) for column in _FIGURES), ""]


def _silence(row: NodeRow) -> str:
    reason = f": {row.snapshot.lost.reason}" if row.snapshot.lost is not None else ""
    return f"silent for {figures.duration(int(row.silent_s or 0.0))}{reason}"


def _style(row: NodeRow, *, is_selected: bool) -> str:
    style = "red" if row.silent_s is not None else "" if row.node.state is NodeState.SERVING else "yellow"
    return f"{style} reverse".strip() if is_selected else style


def document(snapshot: ClusterSnapshot) -> dict[str, Any]:
    """Return a snapshot as a JSON object."""
    sums = attrs.asdict(total(snapshot.rows))
    per_s = {name: sums.pop(name) for name in ("requests", "received_bytes", "sent_bytes")}
    return {
        "at": snapshot.at.isoformat(timespec="milliseconds"),
        "url": snapshot.url,
        "kind": snapshot.kind,
        "epoch": snapshot.epoch,
        "copies": snapshot.copies,
        "view_age_s": snapshot.view_age_s,
        "problem": snapshot.problem,
        "warnings": [attrs.asdict(alarm) for alarm in cluster_alarms(snapshot)],
        "total": sums | {"per_s": per_s},
        "nodes": [_node(row) for row in snapshot.rows],
    }


def _node(row: NodeRow) -> dict[str, Any]:
    node = row.node
    return {
        "id": node.id,
        "address": node.address,
        "state": node.state.value,
        "weight": node.weight,
        "zone": node.zone,
        "answers": row.answers,
        "age_s": row.age_s,
        "silent_s": row.silent_s,
        "server": store_document(row.snapshot),
    }
