"""Generate the tables of the page on scaling from `bench/scaling.py`."""

import sys
from pathlib import Path

from marks import between_marks

__all__ = ["scaling_tables"]

PAGE = "docs/reference/scaling.md"


def scaling_tables(project: Path) -> dict[str, str]:
    """Return the page with its tables renewed, by its path from the top folder.

    Raises:
        ValueError: the page lacks the marks of a table.
    """
    sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
    from scaling import ASSUMPTIONS, markdown, tables

    page = (project / PAGE).read_text()
    for table in tables(ASSUMPTIONS):
        page = between_marks(page, table.title, markdown(table), PAGE)
    return {PAGE: page}
