"""The monitor of a router (`infinistore route`): a row for each engine, from what the
router says of them; and the same as plain values for `--json`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

import attrs
import trio
from cattrs import Converter
from cattrs.errors import BaseValidationError
from rich.text import Text

from infinistore.errors import InfiniStoreException, StoreUnavailable
from infinistore.host import NO_THREAD
from infinistore.monitor import figures
from infinistore.monitor.app import Pace, now, without_gaps
from infinistore.monitor.controls import Controls
from infinistore.monitor.lines import UNICODE, Column, Glyphs, Part, line, padded, table
from infinistore.monitor.model import Alarm
from infinistore.monitor.terminal import LiveScreen, Terminal
from infinistore.monitor.view import alarm_lines, first_line, keys_line

STATUS_PATH: Final = "/infinistore/engines"
"""Where a router says what its engines do."""
_TINY: Final = (12, 4)
_ALARMS: Final = 3
_WAIT_STEP_S: Final = 0.1
_EMPTY: Final = Text(end="")

HELP: Final = (
    ("q, Ctrl-C", "quit"),
    ("/", "show only engines with a text in their URL or role"),
    ("p, space", "pause the screen; samples are still taken"),
    ("+ -", "sample less often, more often"),
    ("?, h", "this help; any key leaves it"),
)


@attrs.frozen
class RouterSource:
    """The router to watch. `ask` returns its status, blocking; `wait_s` is how long to
    wait for its start.
    """

    url: str
    ask: Callable[[], Any] = attrs.field(repr=False)
    wait_s: float = 0.0


@attrs.frozen
class EngineRow:
    """What a router says of one engine."""

    url: str
    role: str
    up: bool
    problem: str
    requests: int
    """How many it answers."""
    waiting: int
    """How many of these have no first token yet."""
    queue_s: float
    link_queue_s: float
    busy_ratio: float
    first_token_s: float | None
    """The median of the last streams."""
    predicted_first_token_s: float | None
    """The median of what was predicted of these."""
    picks: Mapping[str, int]
    """How many requests it was sent, by the reason."""
    failed: int

    @property
    def picked(self) -> int:
        """How many requests it was sent."""
        return sum(self.picks.values())


@attrs.frozen
class _Status:
    policy: str
    engines: Sequence[EngineRow]


@attrs.frozen
class RouterSnapshot:
    """The contents of a screen. `rates` are requests per second, by engine."""

    url: str
    at: datetime | None = None
    policy: str = ""
    engines: Sequence[EngineRow] = ()
    rates: Mapping[str, float] = attrs.field(factory=dict)
    lost: str = ""
    """Why there is nothing newer; empty if there is."""


class RouterModel:
    """The last two answers of a router."""

    def __init__(self, url: str) -> None:
        self.snapshot = RouterSnapshot(url)
        self.answers = 0
        self._at_s = 0.0

    def observe(self, said: Any, *, now_s: float, at: datetime) -> None:
        """Take an answer.

        Raises:
            StoreUnavailable: it is none of a router.
        """
        try:
            status = _CONVERTER.structure(said, _Status)
        except (BaseValidationError, TypeError, ValueError, ArithmeticError):
            raise StoreUnavailable(f"{self.snapshot.url}: this is no router of this release") from None
        before = {one.url: one.picked for one in self.snapshot.engines}
        passed_s = now_s - self._at_s
        rates = {
            one.url: max(0, one.picked - before[one.url]) / passed_s
            for one in status.engines
            if one.url in before and passed_s > 0
        }
        self._at_s, self.answers = now_s, self.answers + 1
        self.snapshot = RouterSnapshot(self.snapshot.url, at, status.policy, status.engines, rates)

    def lose(self, reason: str) -> None:
        """Note that the router did not answer."""
        self.snapshot = attrs.evolve(self.snapshot, lost=reason)


def _number(value: Any, _: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no measure of anything")
    return number


_CONVERTER: Final = Converter()
_CONVERTER.register_structure_hook(float, _number)


def alarms(snapshot: RouterSnapshot) -> list[Alarm]:
    """What is wrong: the router first, then its engines."""
    found = []
    if snapshot.lost:
        since = f" (figures are of {snapshot.at:%H:%M:%S})" if snapshot.at is not None else ""
        found.append(Alarm("lost", "error", f"{snapshot.lost}{since}"))
    if snapshot.at is not None and not snapshot.engines:
        found.append(Alarm("empty", "warning", "the router has no engines"))
    return found + [Alarm("down", "error", one.problem) for one in snapshot.engines if not one.up]


_COLUMNS: Final = (
    Column("engine", 0, lambda row: row.url, right=False, keeps_end=True, smallest=21),
    Column("role", 7, lambda row: "" if row.role == "both" else row.role, right=False, rank=5),
    Column("state", 5, lambda row: "up" if row.up else "down", right=False),
    Column("open", 6, lambda row: figures.count(row.requests)),
    Column("waiting", 7, lambda row: figures.count(row.waiting)),
    Column("queue", 7, lambda row: _seconds(row.queue_s), rank=1),
    Column("loads", 7, lambda row: _seconds(row.link_queue_s), rank=3),
    Column("busy", 6, lambda row: figures.percent(row.busy_ratio), rank=2),
    Column("ttft", 7, lambda row: _seconds(row.first_token_s), rank=1),
    Column("predicted", 9, lambda row: _seconds(row.predicted_first_token_s), rank=4),
    Column("sent", 7, lambda row: figures.count(row.picked), rank=6),
    Column("failed", 6, lambda row: figures.count(row.failed), rank=3),
)


def _seconds(seconds: float | None) -> str:
    return figures.UNKNOWN if seconds is None else f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


def screen(
    snapshot: RouterSnapshot, controls: Controls, width: int, height: int, glyphs: Glyphs = UNICODE
) -> list[Text]:
    """Return the screen as exactly `height` lines, none wider than `width` cells."""
    if width < _TINY[0] or height < _TINY[1]:
        return padded([line([("too small", "yellow")], width, glyphs)], height)
    if controls.help:
        title: list[Part] = [("infinistore monitor", "bold"), (" of a router", "")]
        lines = [line([(f"{key:<11}", "bold"), (meaning, "")], width, glyphs) for key, meaning in HELP]
        return padded([line(title, width, glyphs), _EMPTY, *lines], height)
    rows = [one for one in snapshot.engines if controls.shows(one.url) or controls.shows(one.role)]
    rate = sum(snapshot.rates.values()) if snapshot.rates else None
    said: list[Part] = [("engines   ", "cyan"), (str(len(snapshot.engines)), "bold")]
    said.append((f"  {snapshot.policy}, {figures.rate(rate)} requests/s", ""))
    top = [
        first_line([("infinistore route ", "bold"), (snapshot.url, "cyan")], snapshot.at, controls, width, glyphs),
        line(said, width, glyphs),
        *alarm_lines(alarms(snapshot), "nothing to report", width, min(_ALARMS, height - 3), glyphs),
    ]
    styles = ["" if one.up else "red" for one in rows]
    body = table(_COLUMNS, rows, width, max(0, height - len(top) - 1), glyphs, styles=styles)
    return [*padded(top + body, height - 1)[: height - 1], keys_line(controls, [], width, glyphs)]


def document(snapshot: RouterSnapshot) -> dict[str, Any]:
    """Return a snapshot as a JSON object."""
    return {
        "at": None if snapshot.at is None else snapshot.at.isoformat(timespec="milliseconds"),
        "url": snapshot.url,
        "policy": snapshot.policy,
        "warnings": [attrs.asdict(alarm) for alarm in alarms(snapshot)],
        "engines": [attrs.asdict(one) | {"requests_per_s": snapshot.rates.get(one.url)} for one in snapshot.engines],
    }


async def _sample(
    source: RouterSource,
    pace: Pace,
    model: RouterModel,
    on_change: Callable[[], None],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Sample for ever. The task has started with the first answer.

    Raises:
        InfiniStoreException: there was never one.
    """
    give_up_s = trio.current_time() + source.wait_s
    while True:
        try:
            said = await trio.to_thread.run_sync(source.ask, abandon_on_cancel=True)
            model.observe(said, now_s=trio.current_time(), at=now())
        except (InfiniStoreException, *NO_THREAD) as error:
            if not model.answers:
                if not isinstance(error, StoreUnavailable) or trio.current_time() >= give_up_s:
                    raise
                await trio.sleep(min(_WAIT_STEP_S, pace.interval_s))
                continue
            model.lose(str(error) or type(error).__name__)
        if model.answers == 1:
            task_status.started()
        on_change()
        await pace.next()


async def watch(
    source: RouterSource, interval_s: float, *, output_fd: int, input_fd: int | None, glyphs: Glyphs
) -> int:
    """Show the live screen. Returns the exit code: 0, or 128 plus a signal's number.

    Raises:
        InfiniStoreException: the router was never reached. The terminal is unchanged.
    """
    model, pace = RouterModel(source.url), Pace(interval_s)
    scene = _RouterScene(model, pace, Controls(interval_s=interval_s, has_keyboard=input_fd is not None), glyphs)
    live = LiveScreen(scene)
    async with trio.open_nursery() as sampling:
        await sampling.start(_sample, source, pace, model, partial(scene.sampled, live.changed))
        with Terminal(output_fd, input_fd) as terminal:
            await live.run(terminal, input_fd)
        sampling.cancel_scope.cancel()
    return live.exit_code


async def take_two(source: RouterSource, interval_s: float) -> RouterSnapshot:
    """Take two samples. Returns the second.

    Raises:
        InfiniStoreException: the router was not reached, or not twice.
    """
    model, pace, taken = RouterModel(source.url), Pace(interval_s), trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(
            _sample, source, pace, model, lambda: taken.set() if model.answers > 1 or model.snapshot.lost else None
        )
        await taken.wait()
        nursery.cancel_scope.cancel()
    if model.snapshot.lost:
        raise StoreUnavailable(model.snapshot.lost)
    return model.snapshot


async def report(source: RouterSource, interval_s: float, write: Callable[[RouterSnapshot], None]) -> None:
    """Call `write` after each sample and each failure. Never returns."""
    model = RouterModel(source.url)
    await _sample(source, Pace(interval_s), model, lambda: write(model.snapshot))


def still(snapshot: RouterSnapshot, interval_s: float, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Return the screen for printing: all engines, and no line of keys."""
    lines = max(height, len(snapshot.engines) + _ALARMS + 4)
    return without_gaps(screen(snapshot, Controls(interval_s=interval_s), width, lines, glyphs)[:-1])


class _RouterScene:
    """The screen of a router, which may be paused."""

    def __init__(self, model: RouterModel, pace: Pace, controls: Controls, glyphs: Glyphs) -> None:
        self._model = model
        self._pace = pace
        self._controls = controls
        self._glyphs = glyphs
        self._frozen: RouterSnapshot | None = None

    @property
    def ended(self) -> bool:
        return self._controls.quit

    def sampled(self, draw: Callable[[], None]) -> None:
        if not self._controls.paused:
            draw()

    def lines(self, width: int, height: int) -> list[Text]:
        return screen(self._frozen or self._model.snapshot, self._controls, width, height, self._glyphs)

    def press(self, key: str) -> bool:
        before, self._controls = self._controls, self._controls.press(key)
        if self._controls.paused != before.paused:
            self._frozen = self._model.snapshot if self._controls.paused else None
        self._pace.interval_s = self._controls.interval_s
        return self._controls != before
