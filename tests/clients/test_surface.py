"""The blocking methods are the asynchronous ones, word for word: nobody fixes one and forgets the other."""

import difflib
import inspect
import re

import infinistore
from infinistore import aio, blocking
from infinistore.client import async_store, blocking_store
from infinistore.client.async_store import AsyncStore
from infinistore.client.blocking_store import BlockingStore

BLOCKS = {"lease", "reserve"}
"""Methods that return a context manager: one for `async with`, or one for `with`."""


def test_the_blocking_methods_are_the_asynchronous_ones_without_await() -> None:
    asynchronous = inspect.getsource(AsyncStore)
    expected = asynchronous.replace("async def", "def").replace("Async", "Blocking").replace("await ", "")
    expected = expected.replace("`async with", "`with")
    expected = re.sub(r"\(\((self\.get[a-z_]+\(.*\))\)\)\[0\]", r"(\1)[0]", expected)
    found = inspect.getsource(BlockingStore)
    difference = [
        line
        for line in difflib.ndiff(_words(expected), _words(found))
        if line[0] in "+-" and line.strip() not in _MAY_DIFFER
    ]
    assert difference == []


# Only one of them can be cancelled, and each says who may share it.
_MAY_DIFFER = {"- and may be cancelled", "- tasks", "+ threads"}


def _words(source: str) -> list[str]:
    """The source without line breaks, which fall elsewhere, cut at punctuation."""
    source = re.sub(r"\s+", " ", source).replace("( ", "(").replace(" )", ")").replace(",)", ")")
    source = source.replace(" and may be cancelled.", ".\nand may be cancelled\n")
    source = re.sub(r"\b(tasks|threads)\b", r"\n\1\n", source)
    source = re.sub(r"\((self\.\w+\([^()]*(?:\([^()]*\)[^()]*)*\))\)\[0\]", r"\1[0]", source)
    return [part.strip() for part in re.split(r"\n|(?<=[.:;]) ", source) if part.strip()]


def test_both_modules_have_one_public_class_with_the_same_methods() -> None:
    assert async_store.__all__ == ["AsyncStore"]
    assert blocking_store.__all__ == ["BlockingStore"]
    names = {name for name in vars(AsyncStore) if not name.startswith("_")}
    assert names == {name for name in vars(BlockingStore) if not name.startswith("_")}
    for name in names:
        asynchronous, blocked = getattr(AsyncStore, name), getattr(BlockingStore, name)
        if name not in BLOCKS:
            assert inspect.signature(asynchronous) == inspect.signature(blocked), name
        assert inspect.iscoroutinefunction(asynchronous) == (name not in BLOCKS), name
        assert not inspect.iscoroutinefunction(blocked), name


def test_every_open_store_takes_the_same_arguments() -> None:
    expected = inspect.signature(infinistore.open_store).parameters
    for module in (aio, blocking):
        assert inspect.signature(module.open_store).parameters == expected
