"""Who may import whom: the table in docs/architecture.md, held here. An import inside a function counts, too."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import PROJECT

PACKAGE = PROJECT / "infinistore"

GROUND = {"errors", "keys", "sizes", "settings", "config", "config_sources", "statistics"}
"""Modules beside the folders that know nothing of the store."""
ENGINE = {"allocators", "core", "protocol", "transports"}
PUBLIC = {"aio", "blocking", "client", "server"}
"""What the command line and the demonstration see of the store: they name public things of these, nothing deeper."""

MAY_IMPORT = {
    "allocators": {"errors"},
    "core": {"errors", "keys", "allocators"},
    "protocol": {"errors", "keys"},
    "transports": {"errors", "protocol", "core"},
    "server": GROUND | ENGINE,
    "client": GROUND | ENGINE,
    "dropin": GROUND | PUBLIC,
    "tensors": GROUND | {"blocking", "client"},
    "demo": GROUND | PUBLIC,
    "monitor": GROUND | PUBLIC,
    "integrations": GROUND | PUBLIC | {"tensors"},
    # allocators: `prepare_process` must be the first thing that a server's process does.
    "cli": GROUND | PUBLIC | {"demo", "monitor", "doctor", "allocators"},
    # What it says of a machine is what the store itself would find there.
    "doctor": GROUND | {"core", "transports"},
}


def imported_modules(file: Path) -> Iterator[str]:
    """The dotted names under infinistore that a file imports; a name taken from the package itself counts as one."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "infinistore":
            names = [f"infinistore.{alias.name}" for alias in node.names if (PACKAGE / alias.name).exists()]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module]
        else:
            names = []
        yield from (name.removeprefix("infinistore.") for name in names if name.startswith("infinistore."))


@pytest.mark.parametrize("layer", sorted(MAY_IMPORT))
def test_a_folder_imports_only_what_lies_below_it(layer: str) -> None:
    # A __main__.py is a command, wherever it stands.
    files = sorted(file for file in (PACKAGE / layer).rglob("*.py") if file.name != "__main__.py")
    assert files
    allowed = MAY_IMPORT[layer] | {layer}
    wrong = [
        f"{file.relative_to(PACKAGE)} imports infinistore.{name}"
        for file in files
        for name in imported_modules(file)
        if name.partition(".")[0] not in allowed
    ]
    assert wrong == []


@pytest.mark.parametrize("layer", ["cli", "demo", "integrations", "monitor"])
def test_commands_and_adapters_see_of_the_store_only_what_is_public(layer: str) -> None:
    wrong = [
        f"{file.relative_to(PACKAGE)} imports infinistore.{name}"
        for file in sorted((PACKAGE / layer).rglob("*.py"))
        for name in imported_modules(file)
        if name.partition(".")[0] in PUBLIC and "." in name
    ]
    assert wrong == []
