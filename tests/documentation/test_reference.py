"""The reference of the site has every public name."""

import re
from importlib import import_module

import pytest

from tests.documentation.blocks import PROJECT

DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
CONSTANTS = {"LINK_ETHERNET", "LINK_IB", "TYPE_RDMA", "TYPE_TCP", "__version__", "InfiniStoreKeyNotFound"}
"""Those of the original, and others that say all by their names."""


def test_every_public_name_is_in_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """By this name, by another one of the same thing, or with its whole module."""
    monkeypatch.syspath_prepend(PROJECT / "scripts")
    public_api = import_module("public_api")

    def names(module: str) -> set[str]:
        return {f"{module}.{name}" for name in public_api.exported(public_api.load(PROJECT, module))}

    def definition(path: str) -> tuple[str, int]:
        module, _, name = path.rpartition(".")
        found = public_api.find(PROJECT, public_api.load(PROJECT, module), name)
        return found.module.name, found.node.lineno if found.node else 0

    pages = (PROJECT / "docs" / "reference").glob("*.md")
    named = {path for page in pages for path in DIRECTIVE.findall(page.read_text())}
    modules = {path for path in named if public_api.load(PROJECT, path)}
    there = {definition(path) for path in named.union(*map(names, modules)) - modules}
    public = set().union(*map(names, public_api.MODULES)) - set(public_api.MODULES)
    missing = [path for path in sorted(public) if definition(path) not in there]
    assert [path for path in missing if path.rpartition(".")[2] not in CONSTANTS] == []
