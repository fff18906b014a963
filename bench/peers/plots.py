"""What came of `bench/compare.py`, drawn: SVGs for light and for dark pages."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from peers.work import KIB, Result, Shape

_BATCH = Shape(64, 64 * KIB)
_SMALL = Shape(1, 4 * KIB)
_COLOURS = {
    "light": {"text": "#1f2933", "ours": "#00796b", "theirs": "#b0652c", "limit": "#8894a0"},
    "dark": {"text": "#e4e7eb", "ours": "#4db6ac", "theirs": "#e0a06b", "limit": "#7b8794"},
}
_MARKS = "os^DvPX*<>"


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw the rates of batches with one client, and what more clients do to them and
    to single blocks; return the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for theme, colours in _COLOURS.items():
        settings = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), colours["text"])
        settings |= {"axes.edgecolor": colours["text"], "svg.hashsalt": "infinistore", "font.size": "9"}
        with mpl.rc_context(settings):
            written += [
                _save(_batches(results, colours), folder / f"performance-batches-{theme}.svg"),
                _save(_clients(results, colours), folder / f"performance-clients-{theme}.svg"),
            ]
    return written


def _save(figure: plt.Figure, path: Path) -> Path:
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return path


def _kind(result: Result) -> str:
    return "limit" if result.limit else "ours" if result.ours else "theirs"


def _batches(results: Sequence[Result], colours: dict[str, str]) -> plt.Figure:
    """A bar for each store that copies: put and get of a batch by one client."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for panel, operation in zip(panels, ("put", "get"), strict=True):
        some = [r for r in results if r.cell == (operation, _BATCH, 1) and r.system not in ("lease", "memcpy")]
        some.sort(key=lambda result: result.bytes_per_s)
        bars = panel.barh(
            [result.system for result in some],
            [result.bytes_per_s / 1e9 for result in some],
            color=[colours[_kind(result)] for result in some],
        )
        panel.bar_label(bars, fmt="%.1f", padding=3, color=colours["text"])
        panel.set_title(f"{operation} {_BATCH}, 1 client, GB/s", color=colours["text"])
        _plain(panel)
    return figure


def _clients(results: Sequence[Result], colours: dict[str, str]) -> plt.Figure:
    """A line for each store: what all clients get together, by their number."""
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.6), layout="constrained")
    shown = ((_BATCH, "put", "GB/s"), (_BATCH, "get", "GB/s"), (_SMALL, "get", "thousand a second"))
    for panel, (shape, operation, unit) in zip(panels, shown, strict=True):
        puts = [r.system for r in results if r.operation == "put" and r.system not in ("memcpy", "embedded")]
        names = dict.fromkeys(puts)
        for number, name in enumerate(names):
            some = sorted(
                (r for r in results if (r.operation, r.shape, r.system) == (operation, shape, name)),
                key=lambda result: result.clients,
            )
            if some:
                rates = [r.bytes_per_s / 1e9 if shape is _BATCH else r.figures["calls_per_s"] / 1e3 for r in some]
                style = "--" if some[0].limit else "-"
                panel.plot(
                    [r.clients for r in some],
                    rates,
                    style,
                    marker=_MARKS[number % len(_MARKS)],
                    color=colours[_kind(some[0])],
                    label=name,
                    linewidth=1,
                    markersize=4,
                )
        counts = sorted({r.clients for r in results})
        panel.set_xscale("log", base=2)
        panel.set_xticks(counts, [str(count) for count in counts])
        panel.set_xlabel("clients")
        panel.set_ylim(bottom=0)
        panel.set_title(f"{operation} {shape}, {unit}", color=colours["text"])
        _plain(panel)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def _plain(panel: Axes) -> None:
    panel.patch.set_alpha(0)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
