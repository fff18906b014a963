"""No two files of the project import each other, directly or by way of others."""

from pathlib import Path

from .imports import circles, import_graph, imports_of

KNOWN: set[tuple[str, str]] = set()
"""Imports that still close a circle, under `infinistore`. The list may only become
shorter.
"""


def full_names() -> set[tuple[str, str]]:
    return {(f"infinistore.{importer}", f"infinistore.{imported}") for importer, imported in KNOWN}


def test_no_two_files_import_each_other() -> None:
    known = full_names()
    graph = {
        name: {other for other in imported if (name, other) not in known} for name, imported in import_graph().items()
    }
    found = [
        sorted(f"{name} imports {other}" for name in circle for other in graph[name] & circle)
        for circle in circles(graph)
    ]
    assert found == []


def test_a_known_import_that_closes_no_circle_any_more_is_taken_off_the_list() -> None:
    graph = import_graph()
    known = full_names()
    needless = set()
    for importer, imported in known:
        others = {
            name: {other for other in of if (name, other) not in known or (name, other) == (importer, imported)}
            for name, of in graph.items()
        }
        if not any({importer, imported} <= circle for circle in circles(others)):
            needless.add((importer, imported))
    assert needless == set()


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set(), "f": {"g", "a"}, "g": {"f"}}
    assert circles(graph) == [{"a", "b", "c"}, {"f", "g"}]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_an_import_counts_wherever_it_stands() -> None:
    source = """
import a.b
from a import c, name
if TYPE_CHECKING:
    from a.d import Name
def function():
    from a import e
    import elsewhere
"""
    files = dict.fromkeys(["a", "a.b", "a.c", "a.d", "a.e", "a.f"], Path())
    assert list(imports_of(source, files)) == ["a.b", "a.c", "a", "a.d", "a.e"]
