"""What is wanted of this store beside the others and the machine's limits, and what
came out in one run: each figure is a ratio of two medians of that run.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from peers.work import KIB, Result, Shape

_SINGLES = (Shape(1, 4 * KIB), Shape(1, 64 * KIB))
_BATCH = Shape(64, 64 * KIB)
_BY = {"TCP": "over TCP", "shared memory": "by shared memory"}
_TIMES = {("put", "TCP"): 1.3, ("get", "TCP"): 1.3, ("put", "shared memory"): 1.0, ("get", "shared memory"): 0.6}
"""The most that the median of a single call may be, by that of pymemcache."""
_OF_PEERS, _OF_SOCKETS = 1.5, 0.9
_OF_MEMCPY = {"put": 0.75, "get": 0.8}
_OF_BUFFERS = 0.8
_OF_ONE_CLIENT = 1.0
_OF_COPYING_PROCESSES = 0.8


class Measured(NamedTuple):
    """A figure with two decimals, and whether it is as wanted."""

    what: str
    figure: float
    reached: bool


class Wanted(NamedTuple):
    """What is wanted, and what was measured of it: nothing, where a store is missing or
    was not asked.
    """

    wanted: str
    measured: Sequence[Measured]

    @property
    def lost(self) -> list[str]:
        """Return what is not as wanted."""
        return [one.what for one in self.measured if not one.reached]

    @property
    def verdict(self) -> str:
        """Return it in a word, and name what is lost where that is a part."""
        if not self.measured:
            return "not measured"
        if not self.lost:
            return "reached"
        return "lost" if len(self.lost) == len(self.measured) else f"lost: {', '.join(self.lost)}"

    @property
    def row(self) -> str:
        """Return the row of a table."""
        figures = ", ".join(f"{one.what} {one.figure:.2f}" for one in self.measured)
        return f"| {self.wanted} | {figures} | {self.verdict} |"


def wanted(results: Sequence[Result]) -> list[Wanted]:
    """Return everything that is wanted, with what these results say about it."""
    run = _Run(results)
    return [*_singles(run), *_batches(run), *_several_clients(run)]


def reached(rows: Sequence[Wanted]) -> bool:
    """Say whether something of it was measured, and nothing of that lost."""
    return any(one.measured for one in rows) and not any(one.lost for one in rows)


class _Run:
    """The results by cell and store. What was not measured is None."""

    def __init__(self, results: Sequence[Result]) -> None:
        self._by_cell = {(*one.cell, one.system): one for one in results}
        self.counts = sorted({one.clients for one in results} - {1})
        self.peers = {one.system for one in results if not one.ours and not one.limit}

    def rate(self, operation: str, shape: Shape, clients: int, system: str) -> float | None:
        """Return the calls a second of all clients together."""
        found = self._by_cell.get((operation, shape, clients, system))
        return None if found is None else found.figures["calls_per_s"]

    def best_rate(self, operation: str, shape: Shape) -> float | None:
        """Return the rate of that other store that is the fastest for one client."""
        rates = (self.rate(operation, shape, 1, peer) for peer in self.peers)
        return max((rate for rate in rates if rate is not None), default=None)

    def median_us(self, operation: str, shape: Shape, system: str) -> float | None:
        """Return the median of one client's calls."""
        found = self._by_cell.get((operation, shape, 1, system))
        return None if found is None else found.figures["p50_us"]


def _singles(run: _Run) -> list[Wanted]:
    listed = []
    for (operation, system), most in _TIMES.items():
        figures = {
            str(shape): _ratio(
                run.median_us(operation, shape, system), run.median_us(operation, shape, "memcached, pymemcache")
            )
            for shape in _SINGLES
        }
        sizes = " and ".join(map(str, _SINGLES))
        text = f"{operation} of {sizes} {_BY[system]}: at most {most} times pymemcache's median"
        listed.append(_row(text, figures, most=most))
    return listed


def _batches(run: _Run) -> list[Wanted]:
    of_tcp = {operation: run.rate(operation, _BATCH, 1, "TCP") for operation in ("put", "get")}
    of_peers = {operation: _ratio(rate, run.best_rate(operation, _BATCH)) for operation, rate in of_tcp.items()}
    of_sockets = {
        operation: _ratio(rate, run.rate(operation, _BATCH, 1, "raw sockets")) for operation, rate in of_tcp.items()
    }
    listed = [
        _row(f"{_BATCH} over TCP: at least {_OF_PEERS} times the best other store", of_peers, least=_OF_PEERS),
        _row(f"{_BATCH} over TCP: at least {_OF_SOCKETS} of raw sockets", of_sockets, least=_OF_SOCKETS),
    ]
    for operation, least in _OF_MEMCPY.items():
        copied = _ratio(run.rate(operation, _BATCH, 1, "shared memory"), run.rate(operation, _BATCH, 1, "memcpy"))
        text = f"{operation} of {_BATCH} by shared memory: at least {least} of memcpy"
        listed.append(_row(text, {"1 client": copied}, least=least))
    objects = {
        system: _ratio(run.rate("get", _BATCH, 1, f"{system}, objects"), run.rate("get", _BATCH, 1, system))
        for system in _BY
    }
    text = f"`get_many` of {_BATCH} that returns objects: at least {_OF_BUFFERS} of reading into buffers"
    return [*listed, _row(text, objects, least=_OF_BUFFERS)]


def _several_clients(run: _Run) -> list[Wanted]:
    together = ", ".join(map(str, run.counts)) or "several"
    listed = []
    for shape in (*_SINGLES, _BATCH):
        for operation in ("put", "get"):
            alone = run.rate(operation, shape, 1, "TCP")
            figures = {
                f"{count} clients": _ratio(run.rate(operation, shape, count, "TCP"), alone) for count in run.counts
            }
            text = f"{operation} of {shape} over TCP, {together} clients together: no fewer calls than one alone"
            listed.append(_row(text, figures, least=_OF_ONE_CLIENT))
    for operation in ("put", "get"):
        figures = {
            f"{count} clients": _ratio(
                run.rate(operation, _BATCH, count, "shared memory"), run.rate(operation, _BATCH, count, "memcpy")
            )
            for count in run.counts
        }
        text = f"{operation} of {_BATCH} by shared memory, {together} clients together: at least"
        text += f" {_OF_COPYING_PROCESSES} of as many processes that only copy"
        listed.append(_row(text, figures, least=_OF_COPYING_PROCESSES))
    return listed


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _row(text: str, figures: Mapping[str, float | None], *, least: float = 0.0, most: float = float("inf")) -> Wanted:
    """Compare the figures as they are shown, so that no 0.80 is less than 0.8."""
    shown = {what: round(figure, 2) for what, figure in figures.items() if figure is not None}
    return Wanted(text, [Measured(what, figure, least <= figure <= most) for what, figure in shown.items()])
