"""The page of the public API lists what there is at run time: no name is public by
accident, and none is missing.
"""

import importlib
import inspect
import re
from types import ModuleType

import pytest

from .conftest import PROJECT

PAGE = (PROJECT / "docs" / "public-api.md").read_text()
ENGINES = {"lmcache", "sglang", "torch", "transformers", "vllm"}


def listed() -> dict[str, dict[str, set[str]]]:
    """The names of each module on the page, and the members of each name."""
    modules: dict[str, dict[str, set[str]]] = {}
    names: dict[str, set[str]] = {}
    name = ""
    for line in PAGE.splitlines():
        if heading := re.fullmatch(r"### `(infinistore[\w.]*)`", line):
            names = modules[heading[1]] = {}
        elif row := re.match(r"\| `(\w+)", line):
            name = row[1]
            names[name] = set()
        elif line.startswith("| | "):
            names[name] = {re.match(r"\w+", member)[0] for member in re.findall(r"`([^`]+)`", line)}  # type: ignore[index]
    return modules


LISTED = listed()
CLASSES = [
    (module, name)
    for module, names in LISTED.items()
    for name in names
    if not module.startswith("infinistore.integrations") and f"| `{name}` | the same as" not in PAGE
]


def imported(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in ENGINES:
            raise
        pytest.skip(f"{error.name} is not installed")


@pytest.mark.parametrize("module", LISTED)
def test_what_a_module_exports_is_on_the_page(module: str) -> None:
    assert list(imported(module).__all__) == list(LISTED[module])


@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_the_members_of_a_class_are_on_the_page(module: str, name: str) -> None:
    found = getattr(imported(module), name)
    if not inspect.isclass(found) or found.__name__ != name:
        assert LISTED[module][name] == set()
        return
    ours = [one for one in found.__mro__ if one.__module__.partition(".")[0] == "infinistore"]
    members = {member for one in ours for member in vars(one) if not member.startswith("_")}
    assert members <= LISTED[module][name]
    annotated = {member for one in ours for member in getattr(one, "__annotations__", ())}
    for member in LISTED[module][name] - members - annotated:  # then the constructor makes it
        assert re.search(rf"\bself\.{member}\b", "".join(inspect.getsource(one) for one in ours)), member


def test_every_module_that_is_imported_by_name_is_on_the_page() -> None:
    assert {
        "infinistore",
        "infinistore.aio",
        "infinistore.blocking",
        "infinistore.tensors",
        "infinistore.server",
        "infinistore.allocators",
        "infinistore.eviction",
        "infinistore.transports",
    } <= LISTED.keys()
    adapters = (PROJECT / "infinistore" / "integrations").glob("[a-z]*")
    expected = {f"infinistore.integrations.{file.stem}" for file in adapters if file.stem != "internal"}
    assert {module for module in LISTED if ".integrations." in module} == expected
