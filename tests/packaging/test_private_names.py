"""Tests use what neighbours of the code may use: few reach into its private names."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .imports import product_files

TESTS = Path(__file__).parents[1]
NAMED_BY_TEXT = ("setattr", "getattr", "delattr", "object", "patch")
"""Calls that name an attribute by a string, as `monkeypatch` and `mock.patch` do."""

REACHES = {
    "allocators/test_jemalloc.py": 2,
    "bad_days/test_fork.py": 1,
    "cli/test_files.py": 1,
    "core/test_arena.py": 4,
    "core/test_store.py": 1,
    "dropin/test_connection.py": 1,
    "dropin/test_rdma.py": 1,
    "dropin/test_registered_server.py": 1,
    "integrations/test_transformers.py": 1,
    "integrations/vllm/test_worker.py": 1,
    "protocol/test_connection.py": 1,
    "rdma/test_device_memory.py": 1,
    "stress/client.py": 2,
    "tensors/conftest.py": 1,
}
"""How often each test file uses a private name of the product.

The numbers may only shrink. Before you add to them, make what a test has to replace an
argument, or let the test look at statistics.
"""


A_PRIVATE_WORD = re.compile(r"\b_\w+")

OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
"""Public, though their names do not look it."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_NAMED_TUPLES


def defined_in(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the functions, classes and attributes that a file makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def used_from_outside(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file imports, or uses of anything but `self` and `cls`.

    The names of other libraries do not count.
    """
    others = {"self", "cls"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            others |= {alias.asname or alias.name for alias in node.names if not alias.name.startswith("infinistore")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in others):
                yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in NAMED_BY_TEXT:
            for given in node.args:
                if isinstance(given, ast.Constant) and isinstance(given.value, str):
                    yield given.value.rpartition(".")[2]


def called(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def reaches(folder: Path, private: set[str]) -> dict[str, int]:
    """Count the uses of private names in each file of a folder that has any."""
    counts: Counter[str] = Counter()
    for file in sorted(folder.rglob("*.py")):
        source = file.read_text()
        if private.isdisjoint(A_PRIVATE_WORD.findall(source)):  # which is found out a hundred times as fast
            continue
        found = [name for name in used_from_outside(ast.parse(source)) if name in private]
        counts[str(file.relative_to(folder))] += len(found)
    return dict(+counts)


def test_the_tests_reach_into_private_names_of_the_product_no_more_than_they_did() -> None:
    trees = [ast.parse(file.read_text()) for file in product_files().values()]
    private = {name for tree in trees for name in defined_in(tree) if is_private(name)}
    assert len(private) > 500
    assert reaches(TESTS, private) == REACHES


def test_a_use_is_found_however_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "from infinistore.core import _hidden\n"
        "store._index\n"
        "monkeypatch.setattr(store, '_index', 1)\n"
        "monkeypatch.setattr('infinistore.core._hidden', 1)\n"
        "mock.patch.object(store, '_index')\n"
        "del store.inner._index\n"
    )
    (tmp_path / "test_fine.py").write_text(
        "import os\nself._index\ncls._index\nos._hidden\nstore._other\nstore.__index\n'_index'\n"
    )
    assert reaches(tmp_path, {"_index", "_hidden"}) == {"test_it.py": 6}
