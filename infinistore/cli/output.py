"""Output: JSON for scripts, tables and colour for terminals, plain lines for pipes; and
the question that is asked before something is deleted for good.

rich is imported only when a table is printed.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import rich_click as click

from infinistore.cli.failures import NegativeAnswer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_WIDTH_OF_A_PIPE: Final = 200  # do not fold tables for programs and files


def takes_unicode() -> bool:
    """Whether standard output can show every character."""
    encoding: str | None = sys.stdout.encoding  # None in memory: io.StringIO
    return encoding is None or encoding.lower().replace("-", "") == "utf8"


def print_json(document: Any) -> None:
    """Print `document` as JSON on one line of standard output."""
    sys.stdout.write(json.dumps(document, ensure_ascii=not takes_unicode()) + "\n")


def print_line(text: str) -> None:
    """Print one line of plain text on standard output."""
    sys.stdout.write(text + "\n")


def note(text: str) -> None:
    """Print one line on standard error, apart from the answer."""
    sys.stderr.write(f"infinistore: {text}\n")


def visible(key: str) -> str:
    """Return the key with control characters escaped."""
    return key if key.isprintable() else key.encode("unicode_escape").decode("ascii")


def counted(number: int, one: str, several: str = "") -> str:
    """Return such as `1 key` and `2 keys`; `several` is for another plural."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def is_plain_text(data: bytes | bytearray) -> bool:
    """Whether the bytes are safe to write to a terminal."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return all(character.isprintable() or character in "\n\t" for character in text)


def console(*, stderr: bool = False) -> "Console":
    """Return a console: colour on a terminal (unless NO_COLOR), else wide and plain."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else _WIDTH_OF_A_PIPE, highlight=False)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", numbers: Sequence[str] = ()
) -> None:
    """Print a table on standard output; the `numbers` columns are right-aligned."""
    from rich import box
    from rich.table import Table

    table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    print_rendered(table)


def print_rendered(table: "Table") -> None:
    """Print a table of rich's on standard output. Rich renders it, and does not write
    it: it would answer a closed pipe by an exit code of its own.
    """
    screen = console()
    with screen.capture() as captured:
        screen.print(table)
    for line in captured.get().strip("\n").splitlines():
        print_line(line.rstrip())


@contextmanager
def progress_bar(steps: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on standard error, if a terminal; call it for each step."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield lambda text: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task("connecting", total=steps)
        done = 0

        def report(text: str) -> None:
            nonlocal done
            progress.update(task, description=text, completed=done)
            done += 1

        yield report


def demand_yes(question: str, *, yes: bool, warning: str) -> None:
    """Return if the user means it: by the flag `--yes`, or by an answer at a terminal.

    Raises:
        NegativeAnswer: the answer is no.
        UsageError: there is nobody to ask; `warning` says what this would do.
    """
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError(f"{warning}; add --yes to say that you mean it")
    if not click.confirm(question, err=True):
        raise NegativeAnswer("nothing was done")
