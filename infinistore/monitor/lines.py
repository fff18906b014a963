"""The pieces that a screen is made of: lines that fit, tables with fixed columns, sparklines, maps of memory.

Every line is built here, so this is where what a server or a client may have written into a name is made harmless: no
character that could move the cursor gets through.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import attrs
from rich.cells import cell_len, set_cell_size
from rich.text import Text

__all__ = [
    "ASCII", "UNICODE", "Column", "Glyphs", "Part", "fit", "join", "line", "memory_map", "sparkline", "table",
    "visible",
]  # fmt: skip

Part = tuple[str, str]
"""Text and its style, as rich names styles; "" is the terminal's own."""


@attrs.frozen
class Glyphs:
    """The characters to draw with. `shades` and `bars` go from empty to full; a bar is never empty."""

    bars: str
    shades: str
    ellipsis: str
    is_ascii: bool = False


# No bar fills its cell: the lines above each other would run together.
UNICODE: Final = Glyphs(bars="▁▂▃▄▅▆▇", shades="·░▒▓█", ellipsis="…")
ASCII: Final = Glyphs(bars="_.-=+*%#", shades=".-+*#", ellipsis="~", is_ascii=True)


def visible(text: str, glyphs: Glyphs = UNICODE) -> str:
    """Return the text with everything escaped that does not print, or that the terminal has no character for."""
    if glyphs.is_ascii:
        text = text.encode("ascii", "backslashreplace").decode("ascii")
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def fit(text: str, width: int, glyphs: Glyphs, *, right: bool = False) -> str:
    """Return the text in exactly `width` cells: cut with an ellipsis, or filled up with blanks."""
    text = visible(text, glyphs)
    cells = cell_len(text)
    if cells > width:
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
    """Put two lines side by side; the left one takes `left_width` cells."""
    made = left.copy()
    made.append(" " * max(0, left_width - left.cell_len))
    made.append_text(right)
    return made


@attrs.frozen
class Column:
    """A column of a table. `width` 0: it takes what the others leave. The columns of the highest `rank` go first when
    there is no room for all."""

    title: str
    width: int
    right: bool = True
    rank: int = 0


_SMALLEST_NAME: Final = 19  # room for the longest heading


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, height: int, glyphs: Glyphs
) -> list[Text]:
    """Return exactly `height` lines: a heading and as many rows as fit below it. A row has one cell for each column."""
    shown = list(range(len(columns)))
    while sum((columns[index].width or _SMALLEST_NAME) + 1 for index in shown) - 1 > width and len(shown) > 1:
        shown.remove(max(shown, key=lambda index: (columns[index].rank, index)))
    fixed = sum(columns[index].width for index in shown) + len(shown) - 1
    widths = [columns[index].width or max(0, width - fixed) for index in shown]

    def cells(values: Sequence[str]) -> str:
        fitted = (
            fit(values[index], cell_width, glyphs, right=columns[index].right)
            for index, cell_width in zip(shown, widths, strict=True)
        )
        return " ".join(fitted)

    made = [line([(cells([column.title for column in columns]), "cyan")], width, glyphs)]
    made += [line([(cells(row), "")], width, glyphs) for row in rows[: max(0, height - 1)]]
    made += [Text(end="")] * (height - len(made))
    return made[:height]


def sparkline(values: Sequence[float | None], width: int, top: float, glyphs: Glyphs) -> str:
    """Return the last `width` values as bars, flush right; `top` is the highest bar, None is a gap.

    Only zero has the lowest bar, so that a little can be told from nothing.
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
    """Return how full each part of a span of memory is, as `cells` shades; the parts are of equal length.

    Only what is empty looks empty, and only what is full looks full.
    """
    last = len(glyphs.shades) - 1

    def shade(part: float) -> str:
        if part <= 0:
            return glyphs.shades[0]
        return glyphs.shades[last if part >= 0.999 else max(1, min(last - 1, 1 + int(part * (last - 1))))]

    return "".join(shade(part) for part in _resampled(fill, cells))


def _resampled(values: Sequence[float], count: int) -> list[float]:
    """`count` averages of equally long stretches of `values`."""
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
