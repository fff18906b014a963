"""What came of `bench/compare.py`, in Markdown: a table for each operation and number
of clients, what several clients get together, the rows that this store loses, and what
is wanted of it beside what came out.
"""

import importlib.metadata
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from peers.systems import SYSTEMS
from peers.wanted import wanted
from peers.work import Result, Shape

_PACKAGES = ("redis", "hiredis", "pymemcache", "pylibmc", "mooncake-transfer-engine-non-cuda", "numpy", "trio")
_PROGRAMS = ("redis-server", "memcached")
_SINGLE_IN_US = 64 * 1024
"""Up to this size a single block is shown by its time, and else by its rate."""


class Run(NamedTuple):
    """Where and how it was measured."""

    machine: str
    versions: Mapping[str, str]
    command: str
    seconds: int = 0


def versions() -> dict[str, str]:
    """Return the versions of what takes part."""
    found = {}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    for program in _PROGRAMS:
        if path := shutil.which(program):
            done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            found[program] = done.stdout.strip().splitlines()[0]
    return found


def markdown(
    run: Run,
    results: Sequence[Result],
    memory: Mapping[str, int],
    failures: Mapping[str, str],
    left_out: Sequence[str] = (),
) -> str:
    """Return the report."""
    parts = [_where(run)]
    for operation in dict.fromkeys(result.operation for result in results):
        for clients in dict.fromkeys(result.clients for result in results if result.operation == operation):
            some = [result for result in results if (result.operation, result.clients) == (operation, clients)]
            parts.append(f"## {operation}, {_clients(clients)}\n\n{_table(some)}")
    if processor := _processor(results):
        parts.append(f"## CPU seconds a GB, client + server, 1 client\n\n{processor}")
    if together := _together(results):
        parts.append(f"## Calls a second of all clients together, by those of one alone\n\n{together}")
    if copied := _beside_copies(results):
        parts.append(f"## Shared memory by as many processes that only copy\n\n{copied}")
    if memory:
        rows = [f"| {name} | {taken / 2**20:.0f} MiB |" for name, taken in memory.items()]
        title = "## Memory of the server beside 256 MiB in blocks of 64 KiB\n"
        parts.append("\n".join([title, *_head("store", "memory"), *rows]))
    parts.append(f"## Rows that are lost\n\n{_lost(results)}")
    if rows := [one.row for one in wanted(results) if one.measured]:
        parts.append("\n".join(["## Wanted and measured\n", *_head("wanted", "measured", ""), *rows]))
    if not_measured := [*(f"- {what}: {why}" for what, why in failures.items()), *(f"- {what}" for what in left_out)]:
        parts.append("\n".join(["## Not measured\n", *not_measured]))
    return "\n\n".join(parts) + "\n"


def _where(run: Run) -> str:
    listed = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return f"`bench/compare.py {run.command}`, {run.seconds} s. {run.machine}. {listed}."


def _table(results: Sequence[Result]) -> str:
    """Return a table with a row for each store and a column for each shape. The best of
    ours and the best of the others are bold.
    """
    shapes = list(dict.fromkeys(result.shape for result in results))
    rows = _head("store", *(f"{shape}, {_unit(shape)}" for shape in shapes))
    best = {id(one) for shape in shapes for one in _best(result for result in results if result.shape == shape)}
    for system in _systems(results):
        cells = []
        for shape in shapes:
            one = next((r for r in results if (r.system, r.shape) == (system, shape)), None)
            cells.append("" if one is None else f"**{_figure(one)}**" if id(one) in best else _figure(one))
        rows.append(f"| {system} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _best(results: Iterable[Result]) -> list[Result]:
    listed = [result for result in results if not result.limit]
    kinds = ([result for result in listed if result.ours is ours] for ours in (True, False))
    return [max(some, key=lambda result: result.figures["calls_per_s"]) for some in kinds if some]


def _systems(results: Iterable[Result]) -> list[str]:
    """Return the names of stores, in the order in which they are listed."""
    there = {result.system for result in results}
    return [system.name for system in SYSTEMS if system.name in there]


def _clients(count: int) -> str:
    return "1 client" if count == 1 else f"{count} clients"


def _unit(shape: Shape) -> str:
    return "us p50 / p99" if _in_us(shape) else "GB/s"


def _in_us(shape: Shape) -> bool:
    return shape.blocks == 1 and shape.size <= _SINGLE_IN_US


def _figure(result: Result) -> str:
    if _in_us(result.shape):
        return f"{result.figures['p50_us']:.0f} / {result.figures['p99_us']:.0f}"
    return f"{result.bytes_per_s / 1e9:.2f}"


def _processor(results: Sequence[Result]) -> str:
    some = [result for result in results if result.clients == 1 and result.operation in ("put", "get")]
    columns = list(dict.fromkeys((result.operation, result.shape) for result in some if not _in_us(result.shape)))
    if not columns:
        return ""
    rows = _head("store", *(f"{operation} {shape}" for operation, shape in columns))
    for system in _systems(some):
        by_column = {(r.operation, r.shape): r.figures for r in some if r.system == system}
        cells = [
            f"{by_column[c]['client_cpu_s_per_gb']:.2f} + {by_column[c]['server_cpu_s_per_gb']:.2f}"
            if c in by_column
            else ""
            for c in columns
        ]
        rows.append(f"| {system} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _together(results: Sequence[Result]) -> str:
    """Return what becomes of our rates with more clients; what falls is bold."""
    counts = sorted({result.clients for result in results} - {1})
    rates = {(*one.cell, one.system): one.figures["calls_per_s"] for one in results if one.ours}
    rows = _head("what", "store", *map(_clients, counts))
    for operation, shape, clients, system in rates:
        several = [rates.get((operation, shape, count, system)) for count in counts]
        if clients == 1 and any(several):
            alone = rates[operation, shape, 1, system]
            cells = ["" if rate is None else f"{rate / alone:.2f}" for rate in several]
            cells = [f"**{cell}**" if cell.startswith("0") else cell for cell in cells]
            rows.append(f"| {operation} {shape} | {system} | {' | '.join(cells)} |")
    return "\n".join(rows) if len(rows) > 2 else ""


def _beside_copies(results: Sequence[Result]) -> str:
    """Return how our batches by shared memory compare with memcpy in as many processes."""
    copies = {result.cell: result.bytes_per_s for result in results if result.system == "memcpy"}
    mapped = [one for one in results if one.system.startswith("shared memory") and one.shape.blocks > 1]
    counts = sorted({result.clients for result in mapped})
    ratios = {(*one.cell, one.system): one.bytes_per_s / copies[one.cell] for one in mapped if one.cell in copies}
    rows = _head("what", "how", *map(_clients, counts))
    for operation, shape, system in dict.fromkeys((one.operation, one.shape, one.system) for one in mapped):
        found = [ratios.get((operation, shape, count, system)) for count in counts]
        if any(found):
            cells = ["" if ratio is None else f"{ratio:.2f}" for ratio in found]
            rows.append(f"| {operation} {shape} | {system} | {' | '.join(cells)} |")
    return "\n".join(rows) if len(rows) > 2 else ""


def _lost(results: Sequence[Result]) -> str:
    """List where the best of the others is better than the best of ours that copies, as
    they do.
    """
    rows = _head("what", "ours", "theirs", "ours / theirs")
    for cell in dict.fromkeys(result.cell for result in results):
        copying = [r for r in results if r.cell == cell and r.system not in ("lease", "embedded")]
        if len(best := _best(copying)) == 2:
            ours, theirs = best
            ratio = ours.figures["calls_per_s"] / theirs.figures["calls_per_s"]
            if ratio < 1:
                what = f"{ours.operation} {ours.shape}, {_clients(ours.clients)}"
                named = [f"{one.system} {_figure(one)} {_unit(one.shape)}" for one in best]
                rows.append(f"| {what} | {named[0]} | {named[1]} | {ratio:.2f} |")
    return "\n".join(rows) if len(rows) > 2 else "None."


def _head(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
