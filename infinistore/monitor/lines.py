"""The elements of a screen: lines, tables with fixed columns, sparklines, memory maps.

All lines are built here, and names from servers and clients are sanitised here: no
character that could move the cursor passes.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import Any, Final

import attrs
from rich.cells import cell_len, set_cell_size
from rich.text import Text

Part = tuple[str, str]
"""Text and its style in rich's notation; "" is the terminal's own."""


@attrs.frozen
class Glyphs:
    """The characters to draw with. `shades` and `bars` go from empty to full."""

    bars: str
    shades: str
    ellipsis: str
    is_ascii: bool = False


# No bar fills its cell, or adjacent lines would merge.
UNICODE: Final = Glyphs(bars="▁▂▃▄▅▆▇", shades="·░▒▓█", ellipsis="…")
ASCII: Final = Glyphs(bars="_.-=+*%#", shades=".-+*#", ellipsis="~", is_ascii=True)


def visible(text: str, glyphs: Glyphs = UNICODE) -> str:
    """Return the text with unprintable and unsupported characters escaped."""
    if glyphs.is_ascii:
        text = text.encode("ascii", "backslashreplace").decode("ascii")
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def fit(text: str, width: int, glyphs: Glyphs, *, right: bool = False, keeps_end: bool = False) -> str:
    """Return the text in exactly `width` cells, truncated with an ellipsis or padded.
    With `keeps_end`, it is the beginning that is cut off.
    """
    text = visible(text, glyphs)
    cells = cell_len(text)
    if cells > width and keeps_end and width > 0:
        end = text
        while cell_len(end) > width - 1:
            end = end[1:]
        text, cells = glyphs.ellipsis + end, 1 + cell_len(end)
    elif cells > width:
        return set_cell_size(text, width - 1) + glyphs.ellipsis if width > 0 else ""
    return " " * (width - cells) + text if right else text + " " * (width - cells)


def line(parts: Iterable[Part], width: int, glyphs: Glyphs) -> Text:
    """Return one line of at most `width` cells."""
    made = Text(no_wrap=True, end="")
    room = width
    for text, style in parts:
        shown = visible(text, glyphs)
        cells = cell_len(shown)
        if cells > room:
            made.append(fit(shown, room, glyphs), style or None)
            break
        made.append(shown, style or None)
        room -= cells
    return made


def join(left: Text, right: Text, left_width: int) -> Text:
    """Join two lines; the left one takes `left_width` cells."""
    made = left.copy()
    made.append(" " * max(0, left_width - left.cell_len))
    made.append_text(right)
    return made


@attrs.frozen
class Column:
    """A column of a table.

    With `width` 0, it takes the remaining width. Columns with the highest `rank` are
    dropped first if not all fit.
    """

    title: str
    width: int
    cell: Callable[[Any], str] = lambda row: ""
    """Returns the text of a row's cell."""
    right: bool = True
    rank: int = 0
    keeps_end: bool = False
    """Whether a long text is cut at its beginning, as paths are."""
    smallest: int = 19
    """The least width of a column without one: that of the longest heading."""


def table(
    columns: Sequence[Column],
    rows: Sequence[Any],
    width: int,
    height: int,
    glyphs: Glyphs,
    *,
    styles: Sequence[str] = (),
) -> list[Text]:
    """Return exactly `height` lines: a heading, and as many rows as fit below it.

    A row is anything that the columns have cells of, or a list of cells. If these are
    fewer than the columns, the last one takes the space of those that are missing.
    `styles` are those of the rows.
    """
    shown = list(range(len(columns)))
    while sum((columns[index].width or columns[index].smallest) + 1 for index in shown) - 1 > width and len(shown) > 1:
        shown.remove(max(shown, key=lambda index: (columns[index].rank, index)))
    fixed = sum(columns[index].width for index in shown) + len(shown) - 1
    widths = [columns[index].width or max(0, width - fixed) for index in shown]

    def cells(row: Any) -> str:
        values = row if isinstance(row, list) else [column.cell(row) for column in columns]
        own = len(values) if len(values) == len(columns) else len(values) - 1
        fitted = [
            fit(values[index], cell_width, glyphs, right=columns[index].right, keeps_end=columns[index].keeps_end)
            for index, cell_width in zip(shown, widths, strict=True)
            if index < own
        ]
        return " ".join([*fitted, *values[own:]])

    made = [line([(cells([column.title for column in columns]), "cyan")], width, glyphs)]
    made += [
        line([(cells(row), style)], width, glyphs)
        for row, style in zip(rows[: max(0, height - 1)], chain(styles, repeat("")), strict=False)
    ]
    return padded(made, height)


def padded(lines: Sequence[Text], height: int) -> list[Text]:
    """Return exactly `height` lines: these, as many as fit, and blank ones."""
    return [*lines, *[Text(end="")] * (height - len(lines))][: max(0, height)]


def sparkline(values: Sequence[float | None], width: int, top: float, glyphs: Glyphs) -> str:
    """Return the last `width` values as right-aligned bars; None is a gap.

    `top` is the value of the highest bar. Only zero has the lowest bar.
    """
    last = len(glyphs.bars) - 1

    def bar(value: float | None) -> str:
        if value is None:
            return " "
        if value <= 0 or top <= 0:
            return glyphs.bars[0]
        return glyphs.bars[max(1, min(last, round(min(value, top) / top * last)))]

    return "".join(map(bar, values[-width:] if width > 0 else ())).rjust(width)


def memory_map(fill: Sequence[float], cells: int, glyphs: Glyphs) -> str:
    """Return the usage of equal parts of a span of memory as `cells` shades.

    Only empty parts look empty, and only full parts look full.
    """
    last = len(glyphs.shades) - 1

    def shade(part: float) -> str:
        if part <= 0:
            return glyphs.shades[0]
        return glyphs.shades[last if part >= 0.999 else max(1, min(last - 1, 1 + int(part * (last - 1))))]

    return "".join(shade(part) for part in _resampled(fill, cells))


def _resampled(values: Sequence[float], count: int) -> list[float]:
    """Return `count` averages of equally long sections of `values`."""
    if not values or count <= 0:
        return [0.0] * max(0, count)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)

    def sum_until(position: float) -> float:
        index = min(int(position), len(values) - 1)
        return sums[index] + (position - index) * values[index]

    step = len(values) / count
    return [(sum_until((index + 1) * step) - sum_until(index * step)) / step for index in range(count)]
