"""The blocking methods take the same arguments as the asynchronous ones."""

import inspect

import infinistore
from infinistore import aio, blocking
from infinistore.client.api.blocking_store import BlockingStore
from infinistore.client.api.store import AsyncStore

BLOCKS = {"lease", "removals", "reserve"}
"""Methods that return a context manager, for `async with` or `with`, or an iterator,
for `async for` or `for`."""

ATTRIBUTES = {"is_cluster", "place", "verifies"}
AT_ONCE = ATTRIBUTES | {"has_registered", "mapped_arenas"}
"""What asks no server, and is the same in both."""


def test_both_stores_have_the_same_methods() -> None:
    names = {name for name in vars(AsyncStore) if not name.startswith("_")}
    assert names - {"aclose"} | {"close"} == {name for name in vars(BlockingStore) if not name.startswith("_")}
    for name in names - {"aclose"}:
        asynchronous, blocked = getattr(AsyncStore, name), getattr(BlockingStore, name)
        if name in ATTRIBUTES:
            assert asynchronous == blocked
        elif name not in BLOCKS:
            assert inspect.signature(asynchronous) == inspect.signature(blocked), name
        assert inspect.iscoroutinefunction(asynchronous) == (name not in BLOCKS | AT_ONCE), name
        assert not inspect.iscoroutinefunction(blocked), name


def test_every_open_store_takes_the_same_arguments() -> None:
    expected = inspect.signature(infinistore.open_store).parameters
    assert inspect.signature(infinistore.connect).parameters == expected
    for module in (aio, blocking):
        assert inspect.signature(module.open_store).parameters == expected
        assert inspect.signature(module.connect).parameters == expected
