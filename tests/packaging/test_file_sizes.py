"""No file of the product is too long to read, and no folder too full to know."""

import ast

from .imports import PACKAGE, product_files

MOST_LINES = 450
MOST_FILES = 8

TOO_LONG: dict[str, int] = {}
"""Files that are still too long, and how long they are at most. The list may only
shrink.
"""

TOO_FULL: dict[str, int] = {}
"""Folders that still have too many files, and how many at most. The list may only
shrink.
"""


def test_no_file_has_more_than_450_lines() -> None:
    lines = {str(file.relative_to(PACKAGE)): len(file.read_text().splitlines()) for file in product_files().values()}
    too_long = {name: count for name, count in lines.items() if count > MOST_LINES}
    assert {name: count for name, count in too_long.items() if count > TOO_LONG.get(name, MOST_LINES)} == {}
    assert TOO_LONG.keys() - too_long.keys() == set()  # what is on the list is still too long


def test_no_folder_of_the_client_the_server_or_the_transports_has_more_than_eight_files() -> None:
    counts: dict[str, int] = {}
    for file in product_files().values():
        folder = str(file.parent.relative_to(PACKAGE))
        if folder.partition("/")[0] in ("client", "server", "transports"):
            counts[folder] = counts.get(folder, 0) + 1
    too_full = {folder: count for folder, count in counts.items() if count > MOST_FILES}
    assert {folder: count for folder, count in too_full.items() if count > TOO_FULL.get(folder, MOST_FILES)} == {}
    assert TOO_FULL.keys() - too_full.keys() == set()  # what is on the list is still too full


def test_every_file_says_what_it_is_for() -> None:
    silent = [name for name, file in product_files().items() if not ast.get_docstring(ast.parse(file.read_text()))]
    assert silent == []
