"""Three clients of one server that map its pool, and one by TCP, against a dictionary:
whoever reads gets what was put last, or a miss.

The stores differ in what they know and check. The pool is small, so puts evict; what
they have evicted, the server's index tells. Arrays that leases leave behind never
change.
"""

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from infinistore import blocking
from infinistore.blocking import BlockingStore
from infinistore.errors import BufferTooSmall, LimitExceeded, OutOfMemory
from infinistore.protocol.shared_tables import tables_are_safe_here
from tests.clients.dresses import DRESSES
from tests.clients.shared_serving import shared_serving
from tests.clients.stores import Loops
from tests.server.running import KIB

KEYS = [f"key {number}" for number in range(6)]
SIZES = [1, 700, 4096, 4097, 9000]
OPTIONS: list[dict[str, Any]] = [{"inline_bytes": 0}, {"inline_bytes": 4096, "verify": "never"}, {"known_blocks": 4}]

sharing = st.integers(0, 2)
which = st.integers(0, 3)
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5)
runs_of_keys = st.builds(lambda first, count: KEYS[first : first + count], st.integers(0, 5), st.integers(1, 4))

pytestmark = [
    pytest.mark.skipif(not tables_are_safe_here(), reason="clients read by themselves on x86-64 only"),
    pytest.mark.filterwarnings("ignore::infinistore.LeaseStillInUse"),
]


class OwnReadsMachine(RuleBasedStateMachine):
    """`loops` and `kind` are set by the test."""

    loops: Loops
    kind: str
    leases = Bundle("leases")

    @initialize()
    def start(self) -> None:
        self.closing = ExitStack()
        settings: dict[str, Any] = {"prealloc_bytes": 64 * KIB, "minimal_allocate_bytes": 4 * KIB, "max_batch_keys": 4}
        self.shared = self.closing.enter_context(shared_serving(self.loops, self.kind, **settings))
        self.stores: list[BlockingStore] = [self.shared.open(**options) for options in OPTIONS]
        self.stores.append(self.closing.enter_context(blocking.open_store(self.shared.server.url)))
        self.values: dict[str, bytes] = {}
        self.last_keys = KEYS[:2]
        self.written = 0
        self.held: list[tuple[list[Any], list[bytes]]] = []
        self.lost = False

    def teardown(self) -> None:
        if hasattr(self, "closing"):
            self.closing.close()
            self.arrays_never_change()

    def forget_what_was_evicted(self) -> None:
        there: set[str] = set(self.shared.look(self.shared.core.all_keys))
        assert there <= set(self.values)
        self.values = {key: value for key, value in self.values.items() if key in there}

    # Writing

    @rule(writer=which, keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True), data=st.data())
    def put(self, writer: int, keys: list[str], data: st.DataObject) -> None:
        sizes = data.draw(st.lists(st.sampled_from(SIZES), min_size=len(keys), max_size=len(keys)))
        replace = data.draw(st.booleans())
        self.written += 1
        values = {key: self.written.to_bytes(4, "big") * (size // 4 + 1) for key, size in zip(keys, sizes, strict=True)}
        try:
            skipped = self.stores[writer].put_many(values, replace=replace)
        except (OutOfMemory, LimitExceeded):
            event("refused")
        else:
            assert set(skipped) == (set() if replace else set(keys) & set(self.values))
            self.values.update((key, value) for key, value in values.items() if key not in skipped)
        self.forget_what_was_evicted()

    @rule(writer=which, keys=some_keys)
    def delete(self, writer: int, keys: list[str]) -> None:
        assert self.stores[writer].delete(keys) == len(set(keys) & set(self.values))
        for key in keys:
            self.values.pop(key, None)

    @rule(writer=which)
    def purge(self, writer: int) -> None:
        self.stores[writer].purge()
        self.values.clear()

    @rule(writer=which, low=st.sampled_from([0.0, 0.2, 0.4]))
    def evict(self, writer: int, low: float) -> None:
        self.stores[writer].evict(low, low)
        self.forget_what_was_evicted()

    # Reading

    def expected(self, keys: list[str]) -> list[bytes | None]:
        self.last_keys = keys
        return [self.values.get(key) for key in keys]

    @rule(reader=which, keys=some_keys | runs_of_keys)
    def get_many(self, reader: int, keys: list[str]) -> None:
        values = self.stores[reader].get_many(keys)
        assert [None if value is None else bytes(value) for value in values] == self.expected(keys)

    @rule(reader=which, data=st.data())
    def get_what_is_there(self, reader: int, data: st.DataObject) -> None:
        if self.values:
            keys = data.draw(st.lists(st.sampled_from(sorted(self.values)), min_size=1, max_size=5))
            self.get_many(reader, keys)
            self.get_many(reader, keys)

    @rule(reader=which, times=st.integers(1, 3))
    def get_the_same_again(self, reader: int, times: int) -> None:
        for _ in range(times):
            self.get_many(reader, self.last_keys)

    @rule(reader=which, keys=runs_of_keys, size=st.sampled_from([700, 10_000]))
    def get_many_into(self, reader: int, keys: list[str], size: int) -> None:
        buffers = [bytearray(b"." * size) for _ in keys]
        expected = self.expected(keys)
        if any(value is not None and len(value) > size for value in expected):
            with pytest.raises(BufferTooSmall):
                self.stores[reader].get_many_into(list(zip(keys, buffers, strict=True)))
            assert not any(buffer.strip(b".") for buffer in buffers)
            return
        lengths = self.stores[reader].get_many_into(list(zip(keys, buffers, strict=True)))
        assert lengths == [None if value is None else len(value) for value in expected]
        for buffer, value in zip(buffers, expected, strict=True):
            assert bytes(buffer) == (value or b"") + b"." * (size - len(value or b""))

    @rule(reader=which, keys=some_keys | runs_of_keys)
    def look_up(self, reader: int, keys: list[str]) -> None:
        there = [value is not None for value in self.expected(keys)]
        assert self.stores[reader].exists_many(keys) == there
        assert self.stores[reader].match_prefix(keys) == [*there, False].index(False)

    @rule(
        target=leases,
        reader=sharing,
        keys=st.none() | some_keys | runs_of_keys,
        verify=st.booleans(),
        kept=st.sets(st.integers(0, 4)),
    )
    def lease(self, reader: int, keys: list[str] | None, verify: bool, kept: set[int]) -> Any:
        keys = self.last_keys if keys is None else keys
        expected = self.expected(keys)
        arrays: list[Any] = []
        contents: list[bytes] = []
        try:
            with self.stores[reader].lease(keys, verify=verify) as views:
                assert [None if view is None else bytes(view) for view in views] == expected
                for index in kept:
                    if index < len(keys) and expected[index] is not None:
                        arrays.append(np.frombuffer(views[index], np.uint8))  # type: ignore[arg-type]
                        contents.append(expected[index] or b"")
                del views
        except LimitExceeded:  # beside what the arrays keep
            event("refused lease")
            return multiple()
        if not arrays:
            return multiple()
        self.held.append((arrays, contents))
        return len(self.held) - 1

    @rule(lease=consumes(leases))
    def let_arrays_die(self, lease: int) -> None:
        self.held[lease][0].clear()
        self.held[lease][1].clear()

    @rule(index=sharing)
    def open_another_store(self, index: int) -> None:
        """Without a goodbye of the old one's arrays: they live on."""
        self.stores[index] = self.shared.open(**OPTIONS[index])

    @rule()
    def lose_all_connections(self) -> None:
        """What was leased by asking ends for the server when the client sees that,
        perhaps much later.
        """
        self.shared.end_connections()
        self.lost = self.lost or any(arrays for arrays, _ in self.held)

    # What must hold after every step

    @invariant()
    def arrays_never_change(self) -> None:
        for arrays, contents in getattr(self, "held", []):
            assert [array.tobytes() for array in arrays] == contents

    @invariant()
    def what_is_pinned_is_what_the_arrays_show(self) -> None:
        if any(arrays for arrays, _ in self.held):
            assert self.shared.core_statistics().leases
        elif not self.lost:
            self.shared.until(leases=0, pinned_bytes=0, condemned_bytes=0)


@pytest.mark.parametrize("kind", DRESSES)
def test_clients_read_what_was_put_last_or_miss(kind: str, loops: Loops) -> None:
    """Half as often for what differs in its driver alone."""
    machine = type("Machine", (OwnReadsMachine,), {"loops": loops, "kind": kind})
    examples = (settings.default.max_examples if settings.default else 100) // (4 if kind == "threads" else 8)
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=40))
