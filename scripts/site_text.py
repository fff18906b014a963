"""Text that the site shows otherwise than the repository: what site_hooks.py does to it.

It needs no MkDocs, so that the ordinary tests can try it.
"""

import re
from collections.abc import Callable
from html import escape, unescape

FILE_NAME = re.compile(r"\[`?(?:[\w.-]+/)*([\w.-]+\.md)`?\]\(([^)#\s:]+)((?:#[^)\s]*)?)\)")
"""A link whose text is the name of a page's file."""
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
ROW = re.compile(r"^ *\|.*$", re.MULTILINE)
CODE = re.compile(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)")
PRE = re.compile(r"(<pre\b.*?</pre>)", re.DOTALL)
INLINE = re.compile(r"<code>([^<]+)</code>")
WORD = re.compile(r"[^\s&;]+")
FLAG = re.compile(r"(?<=[\s(])--[a-z][a-z-]*(?=[^<>]*<)")
"""A flag in a text of HTML that is not marked as code."""
SHORT = 32
"""So many characters of code fit on a line of a phone."""
NARROW = 40
"""So many fit beside each other in a table there."""
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
TABLE_ROW = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
CELL = re.compile(r"<(t[dh])([^>]*)>(.*?)</\1>", re.DOTALL)


def with_titles(markdown: str, title_of: Callable[[str], str | None]) -> str:
    """Show the title of a page instead of its file's name, where that is the text of a link.

    `title_of` takes the path in the link; None leaves the link as it is.
    """

    def titled(found: "re.Match[str]") -> str:
        name, path, fragment = found.groups()
        title = title_of(path) if path.rpartition("/")[2] == name else None
        return f"[{title}]({path}{fragment})" if title else found[0]

    return FILE_NAME.sub(titled, markdown)


def title(markdown: str) -> str | None:
    """The title of a page."""
    found = TITLE.search(markdown)
    return found[1].strip() if found else None


def with_pipes(markdown: str) -> str:
    r"""Write `|` for `\|` in code in tables.

    GitHub wants the backslash there. Python-Markdown would show it, and needs none.
    """
    return ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), markdown)


def with_whole_names(html: str) -> str:
    """Let names break where a reader would: a flag not after its hyphens, a long name after a mark."""
    parts = PRE.split(html)
    parts[::2] = [INLINE.sub(lambda code: f"<code>{WORD.sub(_word, code[1])}</code>", part) for part in parts[::2]]
    parts[::2] = [FLAG.sub(r'<span class="whole">\g<0></span>', part) for part in parts[::2]]
    return "".join(parts)


def _word(found: "re.Match[str]") -> str:
    word = found[0]
    if len(word) > SHORT // 2:
        word = re.sub(r"(?<=\w)([_./:=,]+)(?=\w)", r"\1<wbr>", word)
    return f'<span class="whole">{word}</span>' if "-" in word and len(found[0]) <= SHORT else word


def with_labels(html: str) -> str:
    """Mark the tables that are too wide for a phone, and name the column in each of their cells.

    The style sheet shows a row as a list of its cells there.
    """
    return TABLE.sub(lambda found: _labelled(found[0]), html)


def _labelled(table: str) -> str:
    rows = [[_text(cell[3]) for cell in CELL.finditer(row)] for row in TABLE_ROW.findall(table)]
    columns = list(zip(*rows, strict=False))
    widths = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    wordy = len(columns) > 2 and any(len(cell) > NARROW for column in columns[1:] for cell in column)
    if not wordy and sum(widths) + 2 * len(widths) <= NARROW:
        return table

    def row(found: "re.Match[str]") -> str:
        labels = iter(rows[0])
        return CELL.sub(lambda cell: _with_label(cell, next(labels, "")), found[0])

    return TABLE_ROW.sub(row, table).replace("<table>", '<table data-stacked="">', 1)


def _with_label(cell: "re.Match[str]", label: str) -> str:
    if cell[1] == "th":
        return cell[0]
    return f'<td{cell[2]} data-label="{escape(label)}">{cell[3]}</td>'


def _text(html: str) -> str:
    """What a cell has, with a blank where a name may break."""
    return unescape(re.sub(r"<[^>]*>", "", html.replace("<wbr>", " "))).strip()
