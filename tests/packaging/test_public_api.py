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


NAME = re.compile(r"`(\w+)(?:\(\))?`")


def sections() -> dict[str, list[str]]:
    """The items of each module's list, as one line each."""
    found = re.findall(r"^### `(infinistore[\w.]*)`\n(.*?)(?=^###|^<!--)", PAGE, flags=re.MULTILINE | re.DOTALL)
    return {
        module: [" ".join(item.split()) for item in re.findall(r"^- (.*(?:\n  .*)*)", text, flags=re.MULTILINE)]
        for module, text in found
    }


def listed() -> dict[str, dict[str, set[str]]]:
    """The names of each module on the page, and the members of each name."""
    modules: dict[str, dict[str, set[str]]] = {}
    for module, items in sections().items():
        names = modules[module] = {}
        for item in items:
            first, _, second = item.partition(": ")
            if first.startswith("as in "):
                names.update({name: set() for name in NAME.findall(second)})
            else:
                names.update({name: set(NAME.findall(second)) for name in NAME.findall(first)})
    return modules


LISTED = listed()
KNOWN = {
    (module, name)
    for module, items in sections().items()
    for item in items
    if item.startswith("as in ")
    for name in NAME.findall(item.partition(": ")[2])
}
"""Names that are listed with another module."""
CLASSES = [
    (module, name)
    for module, names in LISTED.items()
    for name in names
    if not module.startswith("infinistore.integrations") and (module, name) not in KNOWN
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
    assert sorted(imported(module).__all__) == sorted(LISTED[module])


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
