"""What the journal tells of a store: one item a batch, whoever committed it, and
nothing of evictions.
"""

import pytest

from infinistore.core import Client, Entry, Journal, StoreCore, Watermarks
from infinistore.core.clients import leased_in_quarantine
from infinistore.core.journal import JournalItem
from tests.core.test_prepared import prepare
from tests.core.test_store import MakeCore, blocks, get, put


@pytest.fixture
def journal() -> Journal:
    return Journal()


@pytest.fixture
def core(make_core: MakeCore, journal: Journal) -> StoreCore:
    return make_core(journal=journal)


def told(journal: Journal) -> list[tuple[str, list[str]]]:
    return [(change, list(keys)) for change, keys, _ in journal.take()]


def test_a_commit_is_one_item_with_its_keys_and_entries(core: StoreCore, journal: Journal) -> None:
    put(core, core.open_client("a"), blocks("x", "y"))
    assert journal.take() == [("put", ["x", "y"], core.index.get_many(["x", "y"]))]
    assert len(journal) == 0


def test_a_replacement_is_told_as_the_put_that_it_is(core: StoreCore, client: Client, journal: Journal) -> None:
    put(core, client, blocks("x"))
    put(core, client, {"x": b"new"})
    assert [item[:2] for item in journal.take()] == [("put", ["x"])] * 2


def test_a_put_that_keeps_what_is_there_tells_of_the_rest(core: StoreCore, client: Client, journal: Journal) -> None:
    put(core, client, blocks("y"))
    put(core, client, blocks("x", "y", "z"), replace=False)
    put(core, client, blocks("x", "y", "z"), replace=False)
    assert told(journal) == [("put", ["y"]), ("put", ["x", "z"])]


def test_a_batch_committed_by_a_word_is_told_when_it_is_seen(core: StoreCore, journal: Journal) -> None:
    writer = prepare(core, core.open_client("a"), blocks("x", "y"))
    assert len(journal) == 0
    writer.write()
    core.commit_written()
    assert journal.take() == [("put", ["x", "y"], core.index.get_many(["x", "y"]))]


def test_a_batch_committed_by_a_word_comes_before_the_call_that_saw_it(
    core: StoreCore, client: Client, journal: Journal
) -> None:
    writer = prepare(core, client, blocks("x"))
    writer.write()
    core.delete(["x"])
    assert told(journal) == [("put", ["x"]), ("delete", ["x"])]


def test_a_deletion_names_all_keys_whether_they_were_there_or_not(core: StoreCore, journal: Journal) -> None:
    put(core, core.open_client("a"), blocks("x"))
    journal.take()
    core.delete(["x", "missing"])
    assert journal.take() == [("delete", ["x", "missing"], ())]


def test_a_purge_of_everything_is_one_item_and_that_of_some_a_deletion(core: StoreCore, journal: Journal) -> None:
    put(core, core.open_client("a"), blocks("x", "y", "z"))
    core.purge(1)
    core.purge()
    core.purge()
    put(core, core.open_client("a"), blocks("x"))
    assert list(core.purge_in_slices()) == [1]
    told_of = told(journal)[1:]
    assert told_of == [("delete", ["z"]), ("purge", ["y", "x"]), ("purge", []), ("put", ["x"]), ("delete", ["x"])]


def test_a_block_that_was_damaged_is_told_when_it_is_dropped(core: StoreCore, journal: Journal) -> None:
    put(core, core.open_client("a"), blocks("x", "y"))
    entry = core.index.get("x")
    assert entry is not None
    core.pool.view(entry[:3])[:1] = b"?"
    journal.take()
    assert core.verify("y")
    assert not core.verify("x")
    assert journal.take() == [("drop", ["x"], ())]


def test_eviction_and_abortion_are_not_told(make_core: MakeCore, journal: Journal) -> None:
    core = make_core(4096, journal=journal)
    client = core.open_client("a")
    put(core, client, blocks("a", "b", "c", "d", size=1000))
    assert core.evict(0.5, 0.5) == 2
    core.abort(core.reserve(client, [64]))
    assert told(journal) == [("put", ["a", "b", "c", "d"])]


def test_the_first_item_is_announced_and_the_next_only_after_a_take(core: StoreCore, journal: Journal) -> None:
    calls: list[int] = []
    journal.on_first = lambda: calls.append(len(journal))
    client = core.open_client("a")
    for name in "abc":
        put(core, client, blocks(name))
    assert calls == [1]
    journal.take()
    put(core, client, blocks("d"))
    assert calls == [1, 1]


def test_reads_are_told_only_if_asked_for(make_core: MakeCore) -> None:
    silent, journal = Journal(), Journal(reads=True)
    for one in (silent, journal):
        core = make_core(journal=one)
        client = core.open_client("a")
        put(core, client, blocks("x", "y"))
        one.take()
        get(core, client, "x", "missing", "y")
        get(core, client, "missing")
        core.note_use(["y", "gone"], read=True)
        core.note_use(["y"], read=False)
    assert len(silent) == 0
    assert told(journal) == [("read", ["x", "y"]), ("read", ["y", "gone"])]


def test_a_part_of_the_store_reads_and_writes_uncounted(make_core: MakeCore) -> None:
    journal = Journal(reads=True)
    core = make_core(journal=journal)
    before = core.statistics()
    client = core.open_client("the store's own", counted=False)
    put(core, client, blocks("x"))
    get(core, client, "x", "missing")
    after = core.statistics()
    assert (after.puts, after.put_bytes, after.hits, after.misses, after.hit_bytes) == (0, 0, 0, 0, 0)
    assert after.clients == before.clients == 0
    assert told(journal) == [("put", ["x"])]


def test_what_lost_clients_lease_is_known(core: StoreCore) -> None:
    lost, other = core.open_client("lost"), core.open_client("other")
    put(core, other, blocks("x", "y", "z"))
    entries = core.index.get_many(["x", "y", "z"])
    core.accept_hazards(lost, lambda: [(*entries[1], 1)] if entries[1] else [])
    core.lease(lost, ["x"])
    core.lease(other, ["z"])
    core.catch_up()
    assert leased_in_quarantine(core.clients) == set()
    core.quarantine(lost)
    assert leased_in_quarantine(core.clients) == {entries[0], entries[1]}


def replay(items: list[JournalItem]) -> dict[str, Entry]:
    """What a second copy knows from these items."""
    known: dict[str, Entry] = {}
    for change, keys, entries in items:
        if change == "put":
            known.update(zip(keys, entries, strict=True))
        elif change != "read":
            for key in keys:
                known.pop(key, None)
    return known


def test_who_follows_the_journal_knows_every_block_and_those_evicted(make_core: MakeCore, journal: Journal) -> None:
    core = make_core(4096, journal=journal, watermarks=Watermarks(0.5, 0.75))
    client = core.open_client("a")
    for round_ in range(20):
        put(core, client, blocks(f"k{round_ % 7}", f"k{round_ % 5 + 7}", size=500), replace=round_ % 3 > 0)
        if round_ % 4 == 0:
            core.delete([f"k{round_ % 6}"])
    known = replay(journal.take())
    assert {key: known.get(key) for key in core.index} == dict(zip(core.index, core.index.entries(), strict=True))
    assert len(known) > len(core.index)


def test_blocks_that_are_evicted_by_name_are_not_told_and_outlive_their_keys_while_leased(
    core: StoreCore, client: Client, journal: Journal
) -> None:
    put(core, client, blocks("x", "y", "z"))
    journal.take()
    lease = core.lease(client, ["x"])
    assert core.evict_keys(["x", "missing", "y"]) == 2
    assert (core.keys(), len(journal)) == (["z"], 0)
    after = core.statistics()
    assert (after.evicted.manual, after.deleted, after.condemned_bytes > 0) == (2, 0, True)
    core.release(lease)
    assert core.statistics().condemned_bytes == 0
