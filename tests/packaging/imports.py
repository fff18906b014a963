"""Which file of the project imports which, read from the source.

Every import counts, wherever it stands: at the top of a file, in a function, or under
`TYPE_CHECKING`. The last kind does nothing when the program runs, but it says just as
much about who has to know whom: a class that can only be typed by reaching upwards is
in the wrong file, or its caller needs a protocol of its own.

Importing `a.b.c` also runs `a/__init__.py` and `a/b/__init__.py`. That is not counted:
it would tie each package to all it contains. The name of a package counts only where
something is taken from it, as in `from a.b import name`.
"""

import ast
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from .conftest import PROJECT

PACKAGE = PROJECT / "infinistore"


def product_files() -> dict[str, Path]:
    """Every file of the product by its dotted name; a package is its `__init__.py`."""
    files: dict[str, Path] = {}
    for folder, _, names in os.walk(PACKAGE, followlinks=True):  # allocators and transports are links
        for name in names:
            file = Path(folder) / name
            if file.suffix == ".py":
                parts = file.relative_to(PROJECT).with_suffix("").parts
                files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return dict(sorted(files.items()))


def imports_of(source: str, files: Mapping[str, Path]) -> Iterator[str]:
    """The dotted names of those of `files` that a file with this source imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports in this project are absolute"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in files:
                    yield name
                elif node.module is not None and node.module in files:
                    yield node.module


@cache
def import_graph() -> dict[str, set[str]]:
    """Every file of the product, and the files that it imports. Read it only: it is
    made once.
    """
    files = product_files()
    return {name: set(imports_of(file.read_text(), files)) - {name} for name, file in files.items()}


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """The largest sets of files in which each imports each other, directly or by way of
    the rest (Tarjan, 1972).
    """
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        numbers[name] = lowest[name] = len(numbers)
        path.append(name)
        for other in sorted(graph[name]):
            if other not in numbers:
                visit(other)
            if other in path:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == numbers[name]:
            circle = set(path[path.index(name) :])
            del path[path.index(name) :]
            if len(circle) > 1:
                found.append(circle)

    for name in sorted(graph):
        if name not in numbers:
            visit(name)
    return found
