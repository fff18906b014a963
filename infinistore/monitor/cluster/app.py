"""The monitor of a cluster: follows it, and shows its screen."""

from collections.abc import Callable
from functools import partial
from typing import Final

import trio
from rich.text import Text

from infinistore.cluster.locate import ClusterUrl
from infinistore.errors import StoreUnavailable
from infinistore.monitor.app import Source
from infinistore.monitor.cluster.sampling import ClusterWatch
from infinistore.monitor.cluster_view import ClusterControls, ClusterSnapshot, screen, shown_rows
from infinistore.monitor.controls import Controls
from infinistore.monitor.lines import Glyphs
from infinistore.monitor.terminal import LiveScreen, Terminal

__all__ = ["report", "still", "take_two", "watch"]

_TICK_S: Final = 1.0
"""Ages grow, even if nobody answers."""
_VIEW_S: Final = 5.0
"""How long the first view is waited for, unless another time is given."""
_LINES_AROUND: Final = 10


async def watch(
    source: Source, cluster: ClusterUrl, interval_s: float, *, output_fd: int, input_fd: int | None, glyphs: Glyphs
) -> int:
    """Show the live screen. Returns the exit code: 0, or 128 plus a signal's number.

    Raises:
        InfiniStoreException: nobody says who is in the cluster. The terminal is
            unchanged.
    """
    watched = ClusterWatch(source, cluster, interval_s)
    scene = _ClusterScene(watched, Controls(interval_s=interval_s, has_keyboard=input_fd is not None), glyphs)
    live = LiveScreen(scene)
    watched.on_change = partial(scene.changed, live.changed)
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(watched.run, wait_s=_patience_s(source)))
        nursery.start_soon(_tick, watched)
        with Terminal(output_fd, input_fd) as terminal:
            await live.run(terminal, input_fd)
        nursery.cancel_scope.cancel()
    return live.exit_code


async def take_two(source: Source, cluster: ClusterUrl, interval_s: float) -> ClusterSnapshot:
    """Sample each node twice. Returns what was found.

    Raises:
        InfiniStoreException: nobody says who is in the cluster.
        StoreUnavailable: no node answers.
    """
    watched = ClusterWatch(source, cluster, interval_s)
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(watched.run, wait_s=_patience_s(source)))
        done = trio.Event()
        watched.on_change = lambda node_id: done.set() if watched.all_sampled else None
        watched.on_change("")
        await done.wait()
        snapshot = watched.snapshot()
        nursery.cancel_scope.cancel()
    lost = [one.snapshot.lost for one in snapshot.rows if one.snapshot.lost is not None]
    if lost and not any(one.answers for one in snapshot.rows):
        raise StoreUnavailable(lost[0].reason)
    return snapshot


async def report(
    source: Source, cluster: ClusterUrl, interval_s: float, write: Callable[[ClusterSnapshot], None]
) -> None:
    """Call `write` once in each interval. Never returns."""
    watched = ClusterWatch(source, cluster, interval_s)
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(watched.run, wait_s=_patience_s(source)))
        while True:
            await trio.sleep(interval_s)
            write(watched.snapshot())


def still(snapshot: ClusterSnapshot, interval_s: float, width: int, glyphs: Glyphs) -> list[Text]:
    """Return the screen for printing: with all nodes, and without the line of keys."""
    controls = ClusterControls(Controls(interval_s=interval_s, has_keyboard=False))
    lines = screen(snapshot, controls, width, len(snapshot.rows) + _LINES_AROUND, glyphs)[:-1]
    kept = [text for before, text in zip(["", *(one.plain for one in lines)], lines, strict=False) if before or text]
    return kept if not kept or kept[-1].plain else kept[:-1]


def _patience_s(source: Source) -> float:
    return max(source.wait_s, source.deadline_s or _VIEW_S)


async def _tick(watched: ClusterWatch) -> None:
    while True:
        await trio.sleep(min(_TICK_S, watched.interval_s))
        watched.on_change("")


class _ClusterScene:
    """The screen of a cluster, or of one of its nodes."""

    def __init__(self, watched: ClusterWatch, controls: Controls, glyphs: Glyphs) -> None:
        self._watched = watched
        self._controls = ClusterControls(controls)
        self._glyphs = glyphs
        self._frozen: ClusterSnapshot | None = None

    @property
    def ended(self) -> bool:
        return self._controls.screen.quit

    def changed(self, draw: Callable[[], None], node_id: str) -> None:
        """Draw the screen if it shows this node alone, or the cluster, and is not
        paused. Rows are drawn with the next tick, however many nodes there are.
        """
        if self._frozen is None and node_id in ("", self._controls.opened):
            draw()

    def _snapshot(self) -> ClusterSnapshot:
        return self._frozen or self._watched.snapshot()

    def lines(self, width: int, height: int) -> list[Text]:
        return screen(self._snapshot(), self._controls, width, height, self._glyphs)

    def press(self, key: str) -> bool:
        before = self._controls
        shown = [one.node.id for one in shown_rows(self._snapshot(), before)]
        self._controls = now = before.press(key, shown)
        if now.screen.paused != before.screen.paused:
            self._frozen = self._watched.snapshot() if now.screen.paused else None
        if now.opened != before.opened:
            self._watched.open(now.opened)
        if now.screen.interval_s != before.screen.interval_s:
            self._watched.interval_s = now.screen.interval_s
        return now != before
