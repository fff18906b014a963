"""The monitor of a cluster: follows it, asks each of its nodes periodically, and shows
its screen (`cluster_view.py`).

A node is asked by a task of its own, so that one that does not answer delays no other.
Only the node whose screen is shown is asked for its details, which cost more.
"""

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Final
from urllib.parse import urlencode

import attrs
import trio
from rich.text import Text

from infinistore.cluster.locate import ClusterUrl, EtcdPlace, FilePlace, StaticPlace
from infinistore.cluster.membership import Node, StaticMembership
from infinistore.cluster_io.memberships import RunningMembership, make_membership
from infinistore.cluster_io.probing import credentials
from infinistore.errors import StoreUnavailable
from infinistore.monitor.app import Pace, Source, now, sample, without_gaps
from infinistore.monitor.cluster_view import ClusterControls, ClusterSnapshot, NodeRow, screen, shown_rows
from infinistore.monitor.controls import Controls
from infinistore.monitor.lines import Glyphs
from infinistore.monitor.model import Model
from infinistore.monitor.terminal import LiveScreen, Terminal

_VIEW_S: Final = 5.0
"""The longest wait for the first view, unless the source has another time."""
_LATE_S: Final = 1.0
"""How much later than it is due an answer may come before its node counts as silent."""


@attrs.define(eq=False)
class _Watched:
    """One node that is asked."""

    node: Node
    model: Model
    pace: Pace
    asked_s: float
    """When it was asked for the first time."""
    has_left: bool = False
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)


class ClusterWatch:
    """The nodes of a cluster and their samples. `source` has the options."""

    def __init__(self, source: Source, cluster: ClusterUrl, interval_s: float) -> None:
        """Raises ConfigError if a file that the URL names cannot be used."""
        self.on_change: Callable[[str], None] = lambda node_id: None
        """Called with the id of a node that has answered or failed to, and with an
        empty one after a change of the view.
        """
        self._source = source
        self._cluster = cluster
        self._interval_s = interval_s
        self._options = f"?{urlencode(cluster.options)}" if cluster.options else ""
        place = cluster.place
        # What a membership logs, the screen says, too.
        logging.getLogger("infinistore.cluster").addHandler(logging.NullHandler())
        self._membership: StaticMembership | RunningMembership = (
            StaticMembership(place.nodes, copies=place.copies)
            if isinstance(place, StaticPlace)
            else make_membership(place, *credentials(cluster.options, source.token))
        )
        self._watched: dict[str, _Watched] = {}
        self._opened: str | None = None
        self._has_new_view = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow the cluster until cancelled. The task has started when it knows one
        view.

        Raises:
            StoreUnavailable: there is none within the times of the source.
        """
        membership = self._membership
        wait_s = max(self._source.wait_s, self._source.deadline_s or _VIEW_S)
        async with trio.open_nursery() as nursery:
            if isinstance(membership, RunningMembership):
                membership.add_listener(lambda view: self._has_new_view.set())
                nursery.start_soon(membership.run)
                with trio.move_on_after(wait_s):
                    await self._has_new_view.wait()
                membership.wait_known(0.0 if membership.view.epoch >= 0 else wait_s)
            task_status.started()
            while True:
                self._has_new_view = trio.Event()
                self._follow(nursery)
                self.on_change("")
                await self._has_new_view.wait()

    def _follow(self, nursery: trio.Nursery) -> None:
        """Ask the nodes of the newest view, and no others."""
        nodes = {node.id: node for node in self._membership.view.nodes}
        for node_id, watched in list(self._watched.items()):
            node = nodes.get(node_id)
            if node is not None and node.address == watched.node.address:
                watched.node, watched.has_left = node, False
            elif node_id == self._opened and node is None:
                watched.has_left = True  # whoever looks at it shall see its end
            else:
                self._forget(watched)
        for node in nodes.values():
            if node.id not in self._watched:
                watched = _Watched(node, Model(node.address), Pace(self._interval_s), trio.current_time())
                self._watched[node.id] = watched
                nursery.start_soon(self._ask, watched)

    def _forget(self, watched: _Watched) -> None:
        watched.scope.cancel()
        del self._watched[watched.node.id]

    async def _ask(self, watched: _Watched) -> None:
        with watched.scope:
            await sample(
                attrs.evolve(self._source, url=watched.node.address + self._options),
                watched.pace,
                watched.model,
                lambda: self.on_change(watched.node.id),
                with_details=lambda: watched.node.id == self._opened,
                may_be_away=True,
            )

    def open(self, node_id: str | None) -> None:
        """Ask one node, or none, for details, too."""
        before = self._watched.get(self._opened or "")
        self._opened = node_id
        if before is not None and before.has_left and before.node.id != node_id:
            self._forget(before)
        if node_id in self._watched:
            self._watched[node_id].pace.hurry()

    @property
    def interval_s(self) -> float:
        """Seconds between two questions to a node."""
        return self._interval_s

    @interval_s.setter
    def interval_s(self, interval_s: float) -> None:
        self._interval_s = interval_s
        for watched in self._watched.values():
            watched.pace.interval_s = interval_s

    @property
    def all_sampled(self) -> bool:
        """Whether each node was sampled twice, or does not answer."""
        return all(watched.model.has_two for watched in self._watched.values())

    def snapshot(self) -> ClusterSnapshot:
        """Return the current snapshot."""
        membership = self._membership
        view = membership.view
        age_s = membership.age_s
        return ClusterSnapshot(
            url=str(self._cluster),
            at=now(),
            kind=_KINDS[type(self._cluster.place)],
            epoch=view.epoch,
            copies=view.copies,
            view_age_s=0.0 if math.isinf(age_s) else age_s,
            problem=membership.problem if isinstance(membership, RunningMembership) else "",
            rows=[self._row(self._watched[node_id]) for node_id in sorted(self._watched)],
        )

    def _row(self, watched: _Watched) -> NodeRow:
        now_s = trio.current_time()
        snapshot = watched.model.snapshot()
        answered_s = watched.model.answered_s
        age_s = None if answered_s is None else now_s - answered_s
        quiet_s = now_s - watched.asked_s if age_s is None else age_s
        is_silent = snapshot.lost is not None or quiet_s > self._interval_s + _LATE_S
        return NodeRow(watched.node, snapshot, age_s, quiet_s if is_silent else None)


_KINDS = {StaticPlace: "static", FilePlace: "file", EtcdPlace: "etcd"}


_TICK_S: Final = 1.0
"""The screen is drawn this often at least: ages grow without answers."""
_LINES_AROUND: Final = 10


async def watch(
    source: Source, cluster: ClusterUrl, interval_s: float, *, output_fd: int, input_fd: int | None, glyphs: Glyphs
) -> int:
    """Show the live screen. Returns the exit code: 0, or 128 plus a signal's number.

    Raises:
        InfiniStoreException: there is no view of the cluster. The terminal is
            unchanged.
    """
    watched = ClusterWatch(source, cluster, interval_s)
    scene = _ClusterScene(watched, Controls(interval_s=interval_s, has_keyboard=input_fd is not None), glyphs)
    live = LiveScreen(scene)
    watched.on_change = partial(scene.changed, live.changed)
    async with trio.open_nursery() as nursery:
        await nursery.start(watched.run)
        nursery.start_soon(_tick, watched)
        with Terminal(output_fd, input_fd) as terminal:
            await live.run(terminal, input_fd)
        nursery.cancel_scope.cancel()
    return live.exit_code


async def take_two(source: Source, cluster: ClusterUrl, interval_s: float) -> ClusterSnapshot:
    """Sample each node twice. Returns their snapshot.

    Raises:
        InfiniStoreException: there is no view of the cluster.
        StoreUnavailable: no node answers.
    """
    watched = ClusterWatch(source, cluster, interval_s)
    async with trio.open_nursery() as nursery:
        await nursery.start(watched.run)
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
        await nursery.start(watched.run)
        while True:
            await trio.sleep(interval_s)
            write(watched.snapshot())


def still(snapshot: ClusterSnapshot, interval_s: float, width: int, glyphs: Glyphs) -> list[Text]:
    """Return the screen for printing: with all nodes, and without the line of keys."""
    controls = ClusterControls(Controls(interval_s=interval_s, has_keyboard=False))
    return without_gaps(screen(snapshot, controls, width, len(snapshot.rows) + _LINES_AROUND, glyphs)[:-1])


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
