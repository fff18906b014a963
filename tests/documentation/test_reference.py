"""The reference of the site has every public name, and the manual page every command,
setting and exit code.
"""

import re
import shutil
import subprocess
from importlib import import_module

import pytest

from infinistore.cli.failures import EXIT_CODES
from infinistore.cli.root import COMMANDS
from infinistore.config import server_settings
from tests.documentation.blocks import PROJECT

DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
CONSTANTS = {"LINK_ETHERNET", "LINK_IB", "TYPE_RDMA", "TYPE_TCP", "__version__", "InfiniStoreKeyNotFound"}
"""Those of the original, and others that say all by their names."""


def test_the_manual_page_has_every_command_and_setting_and_roff_has_nothing_to_complain_about() -> None:
    page = PROJECT / "docs" / "reference" / "infinistore.1"
    found = page.read_text().replace("\\-", "-")
    for name in COMMANDS:
        assert f"\n.SS infinistore {name}\n" in found
    for setting in server_settings():
        assert f"\n.TP\n\\fB{setting.flag}" in found
    for code in EXIT_CODES:
        assert f"\n.TP\n\\fB{code}\\fR\n" in found
    if shutil.which("groff"):
        command = ["groff", "-man", "-Tutf8", "-ww", "-z", str(page)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stderr == ""


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
