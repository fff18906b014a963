"""The tenants of a server, by its management API: rows of figures, and their part of
the screen. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
from rich.text import Text

from infinistore.monitor import figures
from infinistore.monitor.controls import Controls
from infinistore.monitor.lines import Column, Glyphs, line, padded, table
from infinistore.statistics import TenantStatistics, metric_of

_METRICS: Final = {field.name: metric_of(field) for field in attrs.fields(TenantStatistics)}
_NUMBERS: Final = [name for name, metric in _METRICS.items() if metric is not None]
_SINCE: Final = [name for name, metric in _METRICS.items() if metric is not None and metric.kind == "counter"]
"""The figures that only grow, while the server runs."""


@attrs.frozen
class TenantRow:
    """One tenant. Sizes are in bytes; None is unknown, and no limit in `max_bytes`."""

    tenant: str
    group: str
    connections: int
    keys: int
    used_bytes: int
    pinned_bytes: int
    reserved_bytes: int
    max_bytes: int | None
    refused: int
    """Its connections and requests that were refused, so far."""
    pauses: int
    """How often its rates made one of its connections wait, so far."""
    hit_rate: float | None
    """Of the keys that it has read since the last sample."""
    reads_per_s: float | None
    evicted_per_s: float | None
    refused_per_s: float | None
    pauses_per_s: float | None


@attrs.frozen
class Tenants:
    """All tenants. `problem` says why the rows are outdated, if they are."""

    rows: Sequence[TenantRow] = ()
    problem: str = ""


class TenantsModel:
    """Turns answers of the management API into rows, with rates between two."""

    def __init__(self) -> None:
        self._before: dict[str, Mapping[str, Any]] = {}
        self._at_s = 0.0
        self.tenants = Tenants()
        """The newest rows."""

    def observe(self, told: Mapping[str, Any], now_s: float) -> None:
        """Record an answer to `GET /tenants`. `now_s` is monotonic.

        Raises:
            ValueError: it is no such answer.
        """
        try:
            now = {str(one["tenant"]): one for one in told["tenants"]}
            rows = tuple(self._row(one, now_s - self._at_s) for one in now.values())
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it tells of no tenants: {error!r:.80}") from None
        self._before, self._at_s, self.tenants = now, now_s, Tenants(rows)

    def lose(self, problem: str) -> None:
        """Record that there was no answer. The last rows stay."""
        self.tenants = attrs.evolve(self.tenants, problem=problem)

    def _row(self, one: Mapping[str, Any], elapsed_s: float) -> TenantRow:
        numbers = {name: int(one[name]) for name in _NUMBERS}
        before = self._before.get(str(one["tenant"]))
        since: dict[str, int] | None = None
        if before is not None and elapsed_s > 0:
            since = {name: numbers[name] - int(before[name]) for name in _SINCE}
            if min(since.values()) < 0:  # another run of the server, or another tenant of this name
                since = None

        def per_s(*names: str) -> float | None:
            return None if since is None else sum(since[name] for name in names) / elapsed_s

        reads = 0 if since is None else since["hits"] + since["misses"]
        return TenantRow(
            tenant=str(one["tenant"]),
            group=str(one["group"]),
            max_bytes=None if one["max_bytes"] is None else int(one["max_bytes"]),
            hit_rate=since["hits"] / reads if since is not None and reads else None,
            reads_per_s=per_s("hits", "misses"),
            evicted_per_s=per_s("evicted"),
            refused_per_s=per_s("refused"),
            pauses_per_s=per_s("pauses"),
            **{name: number for name, number in numbers.items() if name not in ("hits", "misses", "evicted")},
        )


def tenant_lines(tenants: Tenants, controls: Controls, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Exactly `height` lines: a heading, the sum of the filtered tenants, and a row for
    each, those with the most in the pool first.
    """
    said = [line([("! ", "yellow"), (tenants.problem, "yellow")], width, glyphs)] if tenants.problem else []
    rows = sorted(
        (row for row in tenants.rows if controls.shows(row.tenant)),
        key=lambda row: (-row.used_bytes, row.tenant),
        reverse=controls.reversed,
    )
    body = table(_COLUMNS, [_sum_cells(rows), *rows], width, height - len(said), glyphs, styles=["bold"])
    return padded([*said, *body], height)


_COLUMNS: Final = (
    Column("tenant, by bytes", 0, lambda row: row.tenant, right=False, smallest=16),
    Column("keys", 7, lambda row: figures.count(row.keys)),
    Column("used", 8, lambda row: figures.size(row.used_bytes)),
    Column("reserved", 8, lambda row: figures.unless_zero(figures.size, row.reserved_bytes), rank=3),
    Column("at most", 8, lambda row: figures.size(row.max_bytes) if row.max_bytes is not None else "", rank=1),
    Column("pinned", 8, lambda row: figures.unless_zero(figures.size, row.pinned_bytes), rank=6),
    Column("hits", 6, lambda row: figures.percent(row.hit_rate)),
    Column("reads/s", 7, lambda row: figures.rate(row.reads_per_s), rank=4),
    Column("evict/s", 7, lambda row: figures.rate(row.evicted_per_s) if row.evicted_per_s != 0 else "", rank=7),
    Column("conns", 5, lambda row: figures.count(row.connections), rank=8),
    Column("waits/s", 7, lambda row: figures.rate(row.pauses_per_s) if row.pauses_per_s != 0 else "", rank=5),
    Column("refused", 7, lambda row: figures.unless_zero(figures.count, row.refused), rank=2),
)


def _sum_cells(rows: Sequence[TenantRow]) -> list[str]:
    """The row of their sum."""
    known = [row.reads_per_s for row in rows if row.reads_per_s is not None]
    return [
        *(f"({len(rows)} of them)", figures.count(sum(row.keys for row in rows))),
        *(figures.size(sum(row.used_bytes for row in rows)), figures.size(sum(row.reserved_bytes for row in rows))),
        *("", figures.size(sum(row.pinned_bytes for row in rows)), "", figures.rate(sum(known) if known else None)),
        *("", figures.count(sum(row.connections for row in rows)), ""),
        figures.count(sum(row.refused for row in rows)),
    ]
