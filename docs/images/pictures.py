"""What the scripts that make pictures of the terminal have in common."""

import re
from io import StringIO
from pathlib import Path

from rich.console import Console

HERE = Path(__file__).resolve().parent


def recorder(width: int) -> Console:
    """A terminal of so many columns that records what it is shown."""
    return Console(record=True, width=width, file=StringIO(), force_terminal=True, color_system="truecolor")


def write(console: Console, name: str, title: str) -> None:
    """Write what the terminal was shown as `NAME.svg` beside this file."""
    picture = console.export_svg(title=title, unique_id=name)
    # No fonts from elsewhere: a reader's own monospaced font does, and a document
    # should not call other hosts.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    (HERE / f"{name}.svg").write_text(picture + "\n", encoding="utf-8")
