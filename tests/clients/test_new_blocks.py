"""Values that are read into new objects: their memory is used again when nobody refers
to it, and never before.
"""

import queue
import runpy
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore import blocking
from infinistore.client.movers import new_blocks
from infinistore.client.movers.new_blocks import NewBlocks
from tests.clients.shared_serving import Shared

KIB = 1024
SIZES = [64 * KIB, 100 * KIB]

counts_references = pytest.mark.skipif(
    sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)(),
    reason="only where references are counted",
)


def filled(new: NewBlocks, sizes: Sequence[int], byte: int) -> list[bytearray]:
    """Return blocks that were read into."""
    blocks = [block for block in new.of(sizes) if block is not None]
    for block in blocks:
        memoryview(block)[:] = bytes([byte]) * len(block)
    return blocks


@given(
    batches=st.lists(
        st.tuples(st.lists(st.sampled_from(SIZES), min_size=1, max_size=6), st.integers(0, 4), st.booleans()),
        max_size=20,
    )
)
def test_what_anybody_refers_to_is_never_given_out_again(batches: list[tuple[list[int], int, bool]]) -> None:
    new = NewBlocks(512 * KIB)
    held: list[tuple[int, list[memoryview]]] = []
    for number, (sizes, keeps, changes) in enumerate(batches):
        blocks = filled(new, sizes, number)
        assert list(map(len, blocks)) == sizes
        assert new.kept_bytes <= 512 * KIB
        if changes:
            blocks.pop().append(1)  # shorter or longer is not what the next one expects
        held.append((number, [memoryview(block) for block in blocks]))  # a view refers to its block
        del blocks
        held = held[-keeps:] if keeps else []
        for byte, views in held:
            assert all(set(bytes(view)) == {byte} for view in views)


@counts_references
def test_memory_that_everybody_has_let_go_of_is_used_again() -> None:
    new = NewBlocks()
    values = filled(new, [64 * KIB] * 4, 1)
    first = list(map(id, values))
    values = filled(new, [64 * KIB] * 4, 2)  # while the first ones are still referred to
    assert not set(map(id, values)) & set(first)
    values = filled(new, [64 * KIB] * 4, 3)
    assert list(map(id, values)) == first


def test_what_is_longer_than_what_is_kept_is_not_kept() -> None:
    new = NewBlocks(128 * KIB)
    filled(new, [256 * KIB], 1)
    assert new.kept_bytes == 0
    filled(new, [64 * KIB] * 4, 2)
    assert new.kept_bytes == 128 * KIB


def test_a_debugger_that_looked_on_while_the_module_was_imported_changes_nothing() -> None:
    def look(frame: FrameType, event: str, argument: object) -> Any:
        # Elsewhere it is Python 3.12 that fails: a comprehension over globals() of a
        # module.
        if frame.f_code.co_filename == new_blocks.__file__:
            frame.f_locals  # noqa: B018 - which makes it
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        module = runpy.run_path(new_blocks.__file__)
    finally:
        sys.settrace(before)
    new = module["NewBlocks"]()
    held = list(new.of([65536] * 4))
    assert not {id(block) for block in new.of([65536] * 4)} & {id(block) for block in held}


def test_blocks_that_another_thread_holds_are_not_given_out() -> None:
    """Their owner counts them; whoever holds them is another thread, in the middle of
    copying."""
    new = NewBlocks()
    wrong: list[int] = []
    handed: queue.SimpleQueue[tuple[int, list[bytearray]] | None] = queue.SimpleQueue()

    def hold() -> None:
        while (batch := handed.get()) is not None:
            number, blocks = batch
            for block in blocks:
                with memoryview(block) as view:
                    wrong.extend(byte for byte in set(bytes(view)) if byte != number)
            del batch, blocks, block

    threads = [threading.Thread(target=hold) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(250):
        handed.put((number, filled(new, [64 * KIB] * 2, number)))
    for _ in threads:
        handed.put(None)
    for thread in threads:
        thread.join(60)
    assert wrong == []


@pytest.mark.parametrize("scheme", ["unix", "shm"])
def test_values_that_are_held_stay_what_they_were(scheme: str, one_kind: Shared) -> None:
    count = 8
    with blocking.open_store(f"{scheme}://{one_kind.server.unix_path}") as store:
        for number in range(6):
            store.put_many([(f"{number}/{key}", bytes([number]) * 64 * KIB) for key in range(count)])
        held = []
        for number in range(6):
            values = store.get_many([f"{number}/{key}" for key in (*range(count), "missing")])
            assert values.pop() is None
            kept = values[number]
            assert kept is not None
            held.append(memoryview(kept))
            del kept
            del values
        assert [set(bytes(view)) for view in held] == [{number} for number in range(6)]
