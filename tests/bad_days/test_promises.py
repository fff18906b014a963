"""The page of promises is about every public method, and its table says what the
clients do.
"""

import re
from pathlib import Path
from typing import Any, cast

import pytest

from infinistore import blocking, errors
from infinistore.aio import AsyncStore
from infinistore.blocking import BlockingStore
from infinistore.client.connection import calls as remote
from infinistore.client.memory.views import private_room
from infinistore.client.requests import Reserve
from infinistore.protocol.messages import StoreRequest
from tests.bad_days.clients import Awaitable, run_at_once
from tests.bad_days.operations import NEW, OPERATIONS, prepare

PAGE = (Path(__file__).parents[2] / "docs" / "promises.md").read_text()


def rows() -> dict[str, list[str]]:
    """The lines of the first table, by the name of the method."""
    table = PAGE.partition("## The calls")[2].partition("\n\n|")[2].partition("\n\n")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {cells[0].split("`")[1]: cells[1:] for cells in lines if cells[0].startswith("`")}


def public_methods(cls: type) -> set[str]:
    """Their names as a blocking store has them: `close` is `aclose` of the others."""
    names = {name for name, value in vars(cls).items() if not name.startswith("_") and callable(value)}
    return names - {"aclose"} | {"close"}


def test_the_table_names_every_method_and_no_other() -> None:
    assert set(rows()) == public_methods(AsyncStore) == public_methods(BlockingStore)


class Recorded(AsyncStore):
    """A store that only notes how a call may be carried out."""

    def __init__(self) -> None:
        self.idempotent: bool | None = None

    async def _call(self, request: StoreRequest[Any]) -> Any:
        if isinstance(request, Reserve):  # how it is committed is what counts
            return private_room(list(NEW), list(map(len, NEW.values())))
        self.idempotent = request.idempotent
        raise errors.StoreUnavailable("recorded")


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_what_is_retried_is_what_the_table_says(operation: Any) -> None:
    store = Recorded()
    with pytest.raises(errors.StoreUnavailable, match="recorded"):
        operation.call(store, "1:1").__await__().send(None)
    retried = rows()[operation.name.split()[0]][0]
    assert retried == ("yes" if store.idempotent else "no")
    assert operation.retried == store.idempotent


def test_every_error_that_is_named_exists_and_every_error_of_a_store_is_named() -> None:
    named = set(
        re.findall(
            r"`([A-Z][A-Za-z]+(?:Error|Exceeded|Mismatch|Failed|Unavailable|Unreachable|Memory|Large|Small|NotFound|Put|Denied|Replaced))`",
            PAGE,
        )
    )
    known = set(errors.__all__) | {"ValueError", "TypeError"}
    assert named <= known
    of_servers_and_configuration = {"ConfigError", "InvalidRequest", "LeaseStillInUse", "UnknownReservation"}
    functions_and_root = {"error_from_code", "InfiniStoreException"}
    assert set(errors.__all__) - of_servers_and_configuration - functions_and_root <= named


def test_the_texts_that_the_page_quotes_are_those_of_the_errors() -> None:
    flowing = " ".join(PAGE.split())
    for text in (
        "it is not known whether the request was carried out",
        "no connection of this store came free",
        "no connection to",
        "no answer from",
    ):
        assert f"*{text}" in flowing, text
        assert text in Path(remote.__file__).read_text()


DOES_AWAY_WITH_KEYS = ("delete", "evict", "purge")


@pytest.mark.parametrize("operation", [one for one in OPERATIONS if one.name not in DOES_AWAY_WITH_KEYS], ids=str)
def test_what_touches_recency_is_what_the_table_says(operation: Any) -> None:
    """A use moves a key to the warm end of the index, behind one that was put last."""
    with blocking.open_store(pool_bytes=1 << 20, minimal_allocate_bytes=4096) as store:
        argument = prepare(operation, store)
        store.put("hot", b"h")
        inner: Any = store
        before = list(inner.embedded.core.index)
        run_at_once(operation.call(cast(AsyncStore, Awaitable(store)), argument))
        after = list(inner.embedded.core.index)
    touches = rows()[operation.name.split()[0]][2]
    assert (before != after) == (touches == "yes")
