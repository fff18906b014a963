"""Strategies by name: the built-in ones, and those that other packages bring."""

from importlib.metadata import EntryPoints
from pathlib import Path

import pytest

from infinistore import named_classes
from infinistore.allocators import Allocator, allocator_class, allocator_names, create_allocator, registry
from infinistore.allocators.bitmap import BitmapAllocator
from infinistore.errors import ConfigError
from tests.installing import install

BUILT_IN = ["bitmap", "slab", "jemalloc"]


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds an installed package with allocators of its own."""
    source = (
        "from infinistore.allocators.bitmap import BitmapAllocator\n"
        "class Buddy(BitmapAllocator):\n"
        "    name = 'buddy'\n"
        "class NotOne:\n"
        "    pass\n"
    )
    module = "other_package_of_allocators"
    entries = {
        "buddy": f"{module}:Buddy",
        "not_one": f"{module}:NotOne",
        "gone": "module_that_is_not_there:Anything",
        "misspelt": f"{module}:Body",
        "bitmap": f"{module}:Buddy",
    }
    install(tmp_path, monkeypatch, "infinistore.allocators", entries, module=module, source=source)
    return tmp_path


def test_an_allocator_of_another_package_works_by_name(other_package: Path) -> None:
    allocator = create_allocator("buddy", 64)
    assert allocator.name == "buddy"
    allocator.add_arena(0, 640)
    assert allocator.allocate([64]) == [(0, 0, 64)]
    assert allocator_names() == [*BUILT_IN, "buddy", "gone", "misspelt", "not_one"]


def test_a_built_in_name_cannot_be_taken_over(other_package: Path) -> None:
    assert allocator_class("bitmap") is BitmapAllocator


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gone", "module_that_is_not_there"), ("misspelt", "Body"), ("not_one", "is not a subclass")],
)
def test_one_that_cannot_be_used_says_why(other_package: Path, name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        create_allocator(name, 64)


def test_the_built_in_ones_need_no_package_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_classes, "entry_points", lambda group: EntryPoints(()))
    assert allocator_names() == BUILT_IN
    for name in BUILT_IN:
        assert issubclass(allocator_class(name), Allocator)
        assert allocator_class(name).name == name


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no allocator called 'buddies'.*bitmap, slab, jemalloc"):
        create_allocator("buddies", 64)


@pytest.mark.parametrize(
    ("name", "meant"), [("bitmp", "bitmap"), ("Bitmap", "bitmap"), ("slabs", "slab"), ("jemaloc", "jemalloc")]
)
def test_a_near_miss_is_answered_with_what_was_meant(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean '{meant}'"):
        create_allocator(name, 64)


def test_most_strategies_need_no_preparation_of_the_process() -> None:
    registry.prepare_process("bitmap")
    registry.prepare_process("slab")
    with pytest.raises(ConfigError, match="no allocator called"):
        registry.prepare_process("other")
