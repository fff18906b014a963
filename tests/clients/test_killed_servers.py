"""A server that is killed: what its clients have in place stays as it is, and nothing
of it is taken for the next server's.
"""

from contextlib import suppress
from pathlib import Path

import pytest

from infinistore import blocking
from infinistore.blocking import BlockingStore
from infinistore.client.movers.shm.mapped_pool import MappedPool
from infinistore.errors import DeadlineExceeded, StoreUnavailable
from tests.clients.on_this_host import best, mapped_pools, server_process, shm
from tests.clients.own_reading import LOOKUPS, READS, SHORT, arrays_of, knows, values_of
from tests.clients.shared_serving import LONG
from tests.server.running import MIB

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore::infinistore.LeaseStillInUse")]


def until_it_answers(store: BlockingStore) -> None:
    while True:
        with suppress(StoreUnavailable, DeadlineExceeded):
            store.exists("anything")
            return


@pytest.mark.usefixtures("no_pauses")
def test_what_clients_have_of_a_killed_server_stays_and_is_not_taken_for_the_next_ones(tmp_path: Path) -> None:
    mapped = mapped_pools()
    with server_process(tmp_path) as server, blocking.open_store(best(server)) as store:
        store.put_many(LONG)
        knows(store, LONG)
        first = arrays_of(store, "a", "b")
        pool: MappedPool = store.calls.mapped_pool  # type: ignore[attr-defined]
        (read,), (write,) = (pool.views([0], [16 * MIB], writable=writable) for writable in (False, True))

        with pytest.raises(StoreUnavailable, match="not known"), store.reserve({"key": 100_000}) as (view,):  # noqa: PT012
            server.kill()
            view[:] = bytes(100_000)
        del view
        for call in (*READS.values(), *LOOKUPS):
            with pytest.raises(StoreUnavailable):
                call(store)
        with pytest.raises(StoreUnavailable), store.reserve({"c": 10}):
            pass
        assert [array.tobytes() for array in first] == list(LONG.values())
        write[-3:] = b"abc"
        assert (bytes(read[-3:]), len(bytes(read))) == (b"abc", 16 * MIB)
        del read, write

        server.start()
        with blocking.open_store(shm(tmp_path)) as other:
            assert values_of(other) == [None, None]
            until_it_answers(store)
            assert values_of(store) == [None, None]
            assert not store.exists("a")
            with store.lease(["a"]) as views:
                assert views == [None]
            other.put_many(SHORT)
            for _ in range(3):
                assert READS["get_many"](store) == list(SHORT.values())
            with store.reserve({"key": 3}) as (view,):
                view[:] = b"new"
            assert other.get("key") == b"new"
        del view
        assert store.stats().transport == "shm"
        store.put("a", b"another" * 1000)
        second = arrays_of(store, "a")
        assert [array.tobytes() for array in first] == list(LONG.values())
        del first
        assert second[0].tobytes() == b"another" * 1000
        assert store.stats().store.leases == 1
        del second
        while store.stats().store.leases:  # released by another connection than the one that tells
            pass
    assert mapped_pools() == mapped
