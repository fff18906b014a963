"""Nothing can be looked up before what has been written is committed: the index is
reached in no other way.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import infinistore
from infinistore.core import StoreCore, store
from infinistore.core.index import Index
from infinistore.core.store import CommittedIndex
from tests.core.conftest import FakeClock
from tests.core.test_prepared import prepare
from tests.core.test_store import MakeCore, blocks, put

SOURCES = Path(infinistore.__file__).parent


def things_within(thing: object, path: str, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Whatever of ours can be reached from a thing by attributes, with the way
    there.
    """
    if id(thing) in seen or not type(thing).__module__.startswith("infinistore"):
        return
    seen.add(id(thing))
    yield path, thing
    names = [*getattr(thing, "__dict__", ()), *getattr(type(thing), "__slots__", ())]
    for name in names:
        yield from things_within(getattr(thing, name, None), f"{path}.{name}", seen)


def test_the_store_has_its_index_in_one_place_where_nobody_comes_by_mistake(core: StoreCore) -> None:
    put(core, core.open_client("a"), blocks("k"))
    places = [path for path, thing in things_within(core, "core", set()) if isinstance(thing, Index)]
    assert places == ["core.committed._CommittedIndex__index"]
    trespassers = [
        path.name for path in SOURCES.rglob("*.py") if "_CommittedIndex__" in path.read_text(encoding="utf-8")
    ]
    assert trespassers == []


def test_an_operation_takes_the_index_once_so_that_what_it_found_is_there_to_its_end() -> None:
    tree = ast.parse(inspect.getsource(store))
    methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    taken = {
        (method.name, method.lineno): sum(
            isinstance(node, ast.Attribute) and node.attr in ("index", "up_to_date") for node in ast.walk(method)
        )
        for method in methods
    }
    assert sum(taken.values()) > 10
    assert {name: times for name, times in taken.items() if times > 1} == {}


class Forgetful(StoreCore):
    """A store with a method whose author knows nothing of commits without a call."""

    def longest_key(self) -> str:
        """Return a key."""
        return max(self.index, key=len, default="")


def test_a_method_that_forgets_about_batches_that_were_just_written_finds_them_all_the_same(
    make_core: MakeCore, clock: FakeClock
) -> None:
    core = Forgetful(make_core().pool, clock=clock)
    client = core.open_client("a")
    put(core, client, blocks("k"))
    writer = prepare(core, client, blocks("longer"))
    assert core.longest_key() == "k"
    writer.write()
    assert core.longest_key() == "longer"


def test_recency_alone_can_be_reached_without_committing() -> None:
    made = CommittedIndex.__dict__
    of_reservations = {"prepare", "is_prepared", "forget", "names_any"}
    assert {name for name in made if not name.startswith("_")} == {
        *("up_to_date", "touch", "touch_one", "use"),
        *of_reservations,
    }
    assert not any("__index" in inspect.getsource(made[name]) for name in of_reservations)


def test_a_use_that_is_told_of_in_the_middle_of_a_removal_commits_nothing(core: StoreCore) -> None:
    client, reader = core.open_client("a"), core.open_client("reader")
    put(core, client, blocks("k"))
    writer = prepare(core, client, blocks("k"))

    def look() -> list[tuple[int, int, int, int, int]]:
        writer.write()
        core.note_use(["k"], read=True)
        core.touch(["k", "gone"])
        return []

    core.accept_hazards(reader, look)
    assert core.delete(["k"]) == 1
    assert writer.reservation.state == "open"
    assert core.exists(["k"]) == b"\1"  # it was written behind the look
    core.purge()
    core.close_client(client)
    assert core.pool.used_bytes == 0
