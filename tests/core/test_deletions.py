"""Copies from other stores: a put with a mark stores nothing that was deleted since."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.core import StoreCore
from infinistore.core.deletions import Deletions

KEYS = ["a", "b", "c"]
keys = st.lists(st.sampled_from(KEYS), unique=True)


def copy(core: StoreCore, mark: int, names: list[str]) -> list[str]:
    """Return what was stored."""
    client = core.open_client("copies")
    skipped = core.commit(core.reserve(client, [64] * len(names)), names, None, since=mark)
    core.close_client(client)
    return [name for position, name in enumerate(names) if position not in skipped]


def test_a_copy_skips_what_was_deleted_after_its_mark_and_what_is_there(core: StoreCore) -> None:
    core.deletions.mark()
    core.delete(["a"])
    mark = core.deletions.mark()
    core.delete(["b"])  # which is not there
    assert copy(core, mark, KEYS) == ["a", "c"]
    assert copy(core, mark, KEYS) == []
    assert core.pool.used_bytes == 128
    assert core.all_keys() == ["c", "a"]  # the head of a batch is touched last


@pytest.mark.parametrize(
    "remove",
    [
        lambda core: core.purge(),
        lambda core: list(core.purge_in_slices()),
        lambda core: core.deletions.mark(ends_earlier=True),
    ],
)
def test_no_earlier_mark_counts_after_a_purge(core: StoreCore, remove: Callable[[StoreCore], object]) -> None:
    mark = core.deletions.mark()
    remove(core)
    assert copy(core, mark, KEYS) == []
    assert copy(core, core.deletions.mark(), KEYS) == KEYS


@pytest.mark.parametrize("purge", [lambda core: core.purge(), lambda core: sum(core.purge_in_slices())])
def test_a_purge_notes_no_single_keys(
    core: StoreCore, purge: Callable[[StoreCore], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has noted all of them, and would take twice as long."""
    copy(core, core.deletions.mark(), KEYS)
    noted: list[str] = []
    monkeypatch.setattr(core.deletions, "note", noted.extend)
    assert purge(core) == len(KEYS)
    assert noted == []


def test_a_mark_of_another_store_does_not_count(make_core: Callable[..., StoreCore]) -> None:
    core, other = make_core(), make_core(random=random.Random(2))
    marks = core.deletions.mark(), other.deletions.mark()
    assert copy(core, marks[1], KEYS) == copy(other, marks[0], KEYS) == []
    assert copy(make_core(), 1, KEYS) == []  # which has made none


@given(st.lists(st.one_of(keys, st.just("all"), st.just("mark")), max_size=30))
def test_whatever_was_deleted_after_a_mark_is_known(steps: list[list[str] | str]) -> None:
    deletions = Deletions(random.Random(1))
    marks = [(deletions.mark(), set[str]())]
    for step in steps:
        if isinstance(step, list):
            deletions.note(step)
        elif step == "all":
            deletions.note_all()
        else:
            marks.append((deletions.mark(), set()))
            continue
        for _, deleted in marks:
            deleted.update(KEYS if step == "all" else step)
    for mark, deleted in marks:
        told = {key for key, gone in zip(KEYS, deletions.since(mark, KEYS), strict=True) if gone}
        assert told >= deleted
        assert told == deleted or "all" in steps
