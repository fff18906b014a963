"""A router (`infinistore route`), by what it says of its engines: a model of its
samples, its screen, and the same as plain values for `--json`. Pure: answers and a size
in, lines out.

Anything may answer at a URL. What is no list of engines is an error; a figure that is
missing, or is none, is unknown, and texts are cut.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import attrs
from rich.text import Text

from infinistore.errors import StoreUnavailable
from infinistore.monitor import figures
from infinistore.monitor.controls import Controls
from infinistore.monitor.lines import UNICODE, Column, Glyphs, Part, join, line, padded, table
from infinistore.monitor.model import Alarm, Lost
from infinistore.monitor.view import alarm_lines, first_line, keys_line, lost_alarm, lost_part

_LONGEST_TEXT: Final = 300
_LARGEST: Final = 1e15

HELP: Final = (
    ("q, Ctrl-C", "quit"),
    ("r", "reverse the order of the engines"),
    ("/", "show only engines with a text in their URL or role"),
    ("p, space", "pause the screen; samples are still taken"),
    ("+ -", "sample less often, more often"),
    ("?, h", "this help; any key leaves it"),
)


@attrs.frozen(kw_only=True)
class EngineRow:
    """What a router says of one engine. None is unknown."""

    url: str
    role: str
    up: bool
    problem: str
    requests: float | None
    """How many it answers."""
    waiting: float | None
    """How many of these have no first token yet."""
    queue_s: float | None
    link_queue_s: float | None
    busy_ratio: float | None
    first_token_s: float | None
    """The median of the last streams."""
    predicted_first_token_s: float | None
    """The median of what was predicted of these."""
    picks: Mapping[str, float]
    """How many requests it was sent, by the reason."""
    failed: float | None
    requests_per_s: float | None
    """That it was sent."""


@attrs.frozen
class RouterSnapshot:
    """The contents of a screen. A router that does not answer keeps its figures."""

    url: str
    at: datetime | None = None
    policy: str = ""
    engines: Sequence[EngineRow] = ()
    lost: Lost | None = None


class RouterModel:
    """The state of one router: `observe` and `lose` update it, `snapshot` reads it."""

    def __init__(self, url: str) -> None:
        self._snapshot = RouterSnapshot(url)
        self._answers = 0
        self.answered_s: float | None = None
        """When the last sample was taken."""

    @property
    def has_two(self) -> bool:
        """Whether two samples were taken, or none can be."""
        return self._answers > 1 or self._snapshot.lost is not None

    def observe(self, said: Any, *, now_s: float, at: datetime) -> None:
        """Record an answer. `now_s` is monotonic; `at` is the same moment as a date.

        Raises:
            StoreUnavailable: it is none of a router. Nothing has changed.
        """
        url, engines = self._snapshot.url, said.get("engines") if isinstance(said, dict) else None
        if not isinstance(engines, list) or not all(isinstance(one, dict) for one in engines):
            raise StoreUnavailable(f"{url}: this is no router; give the URL that `infinistore route` printed")
        before = {one.url: one.picks for one in self._snapshot.engines}
        passed_s = 0.0 if self.answered_s is None else now_s - self.answered_s
        rows = tuple(_row(one, before, passed_s) for one in engines)
        self._snapshot = RouterSnapshot(url, at, _text(said.get("policy")), rows)
        self._answers += 1
        self.answered_s = now_s

    def lose(self, reason: str, *, now_s: float, at: datetime) -> None:
        """Record that the router did not answer, and why."""
        lost = self._snapshot.lost
        since, attempts = (at, 1) if lost is None else (lost.since, lost.attempts + 1)
        rows = tuple(attrs.evolve(one, requests_per_s=None) for one in self._snapshot.engines)
        self._snapshot = attrs.evolve(self._snapshot, engines=rows, lost=Lost(since, reason, attempts))

    def snapshot(self) -> RouterSnapshot:
        """Return the current snapshot."""
        return self._snapshot


_NUMBERS: Final = (
    *("requests", "waiting", "queue_s", "link_queue_s", "busy_ratio", "first_token_s", "predicted_first_token_s"),
    "failed",
)


def _row(said: Mapping[str, Any], before: Mapping[str, Mapping[str, float]], passed_s: float) -> EngineRow:
    url, picks = _text(said.get("url")), said.get("picks")
    counted = {_text(reason): _number(times) for reason, times in picks.items()} if isinstance(picks, dict) else {}
    now = {reason: times for reason, times in counted.items() if times is not None}
    then = before.get(url)
    # Fewer than before are those of another run of the router.
    per_s = None
    if then is not None and passed_s > 0 and all(times <= now.get(reason, -1) for reason, times in then.items()):
        per_s = (sum(now.values()) - sum(then.values())) / passed_s
    return EngineRow(
        url=url,
        role=_text(said.get("role")),
        up=said.get("up") is True,
        problem=_text(said.get("problem")),
        picks=now,
        requests_per_s=per_s,
        **{name: _number(said.get(name)) for name in _NUMBERS},
    )


def _number(said: object) -> float | None:
    return said if isinstance(said, int | float) and not isinstance(said, bool) and 0 <= said < _LARGEST else None


def _text(said: object) -> str:
    return said[:_LONGEST_TEXT] if isinstance(said, str) else ""


def alarms(snapshot: RouterSnapshot) -> list[Alarm]:
    """What is wrong: the router, or its engines."""
    if snapshot.lost is not None:
        return [lost_alarm(snapshot.lost, snapshot.at)]
    if not snapshot.engines:
        return [Alarm("empty", "warning", "the router has no engines")]
    return [
        Alarm("down", "error", one.problem if one.url in one.problem else f"{one.url} is down: {one.problem}")
        for one in snapshot.engines
        if not one.up
    ]


_TINY: Final = (12, 4)
_ROOMY: Final = 16
LINES_AROUND: Final = 8
"""How many lines a screen of any height has beside those of engines and keys."""
_EMPTY: Final = Text(end="")
_COLUMNS: Final = (
    Column("engine", 0, lambda row: row.url, right=False, keeps_end=True, smallest=21),
    Column("role", 7, lambda row: "" if row.role == "both" else row.role, right=False, rank=7),
    Column("", 4, lambda row: "up" if row.up else "down", right=False),
    Column("open", 5, lambda row: figures.count(row.requests)),
    Column("waiting", 7, lambda row: figures.count(row.waiting)),
    Column("queue", 7, lambda row: _seconds(row.queue_s)),
    Column("loads", 7, lambda row: _seconds(row.link_queue_s), rank=5),
    Column("busy", 6, lambda row: figures.percent(row.busy_ratio), rank=2),
    Column("ttft", 7, lambda row: _seconds(row.first_token_s), rank=1),
    Column("predicted", 9, lambda row: _seconds(row.predicted_first_token_s), rank=6),
    Column("req/s", 6, lambda row: figures.rate(row.requests_per_s), rank=3),
    Column("failed", 6, lambda row: figures.count(row.failed), rank=4),
    Column("sent, by reason", 16, lambda row: _reasons(row.picks), right=False, rank=8),
)


def screen(
    snapshot: RouterSnapshot, controls: Controls, width: int, height: int, glyphs: Glyphs = UNICODE
) -> list[Text]:
    """Return the screen as exactly `height` lines, none wider than `width` cells."""
    if width < _TINY[0] or height < _TINY[1]:
        lines = [line([("too small", "yellow")], width, glyphs)]
    elif controls.help:
        lines = [line([("infinistore monitor", "bold"), (" of a router", "")], width, glyphs), _EMPTY]
        lines += [line([(f"{key:<11}", "bold"), (meaning, "")], width, glyphs) for key, meaning in HELP]
    else:
        lines = _overview(snapshot, controls, width, height, glyphs)
    return padded(lines, height)


def _overview(snapshot: RouterSnapshot, controls: Controls, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    state: list[Part] = [] if snapshot.lost is None else [("  ", ""), lost_part(snapshot.lost)]
    left: list[Part] = [("infinistore ", "bold"), (snapshot.url, "cyan"), *state]
    top = [
        first_line(left, snapshot.at, controls, width, glyphs),
        line(_engines(snapshot), width, glyphs),
        *alarm_lines(alarms(snapshot), "nothing to report", width, 3 if height >= _ROOMY else 1, glyphs),
    ]
    if height >= _ROOMY:
        picks: Counter[str] = Counter()
        for one in snapshot.engines:
            picks.update(one.picks)
        top += [line([("sent      ", "cyan"), (_reasons(picks) or "nothing yet", "")], width, glyphs), _EMPTY]
    rows = [one for one in snapshot.engines if controls.shows(one.url) or controls.shows(one.role)]
    rows = sorted(reversed(rows) if controls.reversed else rows, key=lambda one: one.up)
    seen = rows[: max(0, height - len(top) - 2)]  # the heading, the keys
    body = table(_COLUMNS, seen, width, len(seen) + 1, glyphs, styles=["" if one.up else "red" for one in seen])
    where = f"  {len(seen)} of {len(rows)}" if len(seen) < len(rows) else ""
    footer = keys_line(controls, [("r", "reverse")], width - len(where), glyphs)
    return [*padded(top + body, height - 1), join(footer, Text(where, "yellow"), width - len(where))]


def _engines(snapshot: RouterSnapshot) -> list[Part]:
    number, down = len(snapshot.engines), sum(not one.up for one in snapshot.engines)
    rates = [one.requests_per_s for one in snapshot.engines if one.requests_per_s is not None]
    parts: list[Part] = [("engines   ", "cyan"), (str(number), "bold")]
    if down:
        parts.append((f", {down} down" if down < number else ", none is up", "bold red"))
    return [*parts, (f"  {snapshot.policy}, {figures.rate(sum(rates) if rates else None)} requests/s", "")]


def _seconds(seconds: float | None) -> str:
    return figures.UNKNOWN if seconds is None else f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


def _reasons(picks: Mapping[str, float]) -> str:
    """How often each reason was the reason, the most frequent first."""
    several = sorted(picks.items(), key=lambda one: -one[1])
    return ", ".join(f"{reason} {figures.count(times)}" for reason, times in several)


def document(snapshot: RouterSnapshot) -> dict[str, Any]:
    """Return a snapshot as a JSON object."""
    at, lost = snapshot.at, snapshot.lost
    return {
        "at": None if at is None else at.isoformat(timespec="milliseconds"),
        "url": snapshot.url,
        "state": "routing" if lost is None else "lost",
        "lost_since": None if lost is None else lost.since.isoformat(timespec="milliseconds"),
        "lost_reason": None if lost is None else lost.reason,
        "policy": snapshot.policy,
        "warnings": [attrs.asdict(alarm) for alarm in alarms(snapshot)],
        "engines": [attrs.asdict(one) for one in snapshot.engines],
    }
