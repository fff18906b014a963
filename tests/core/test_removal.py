"""A key that goes takes its room with it, whatever fails on the way."""

from collections.abc import Callable, Sequence

import pytest

from infinistore.core import Client, StoreCore
from infinistore.core.clients import Hazard
from infinistore.core.index import Entry
from tests.core.test_hazard_pins import REMOVALS, fill
from tests.core.test_store import MakeCore, blocks, put


class PlannedError(Exception):
    """What fails here."""


class Faulty:
    """A core's surroundings, whose `at`-th call from now on fails."""

    def __init__(self, core: StoreCore, what: str) -> None:
        self.left = 0
        self.calls: list[str] = []
        core.on_removal = self.note if what == "note" else None
        if what == "look":
            core.accept_hazards(core.open_client("reader"), self.look)

    def fail_at(self, call: int) -> None:
        self.left = call

    def note(self, entries: Sequence[Entry]) -> None:
        self._count()

    def look(self) -> list[Hazard]:
        self._count()
        return []

    def _count(self) -> None:
        self.left -= 1
        if not self.left:
            raise PlannedError


@pytest.mark.parametrize("what", ["note", "look"])
@pytest.mark.parametrize("remove", REMOVALS.values(), ids=REMOVALS)
def test_a_removal_that_fails_at_any_step_loses_no_room(
    make_core: MakeCore, remove: Callable[[StoreCore, Client], object], what: str
) -> None:
    call, failed = 0, True
    while failed:
        core = make_core()
        client = core.open_client("a")
        fill(core, client, 64)
        faulty = Faulty(core, what)
        call += 1
        faulty.fail_at(call)
        failed = False
        try:
            remove(core, client)
        except PlannedError:
            failed = True
        faulty.fail_at(0)
        core.close_client(client)
        core.evict(0.99, 0.99)  # gives back what was left behind
        assert core.pool.used_bytes == sum(core.pool.footprint(length) for _, length in core.sample(100))
    assert call > 1, "nothing was noted, or nobody looked"


@pytest.mark.parametrize("what", ["note", "look"])
def test_keys_whose_removal_fails_are_still_there(core: StoreCore, what: str) -> None:
    put(core, core.open_client("a"), blocks("k", "other"))
    faulty = Faulty(core, what)
    losing: list[Callable[[], object]] = [lambda: core.delete(["k"]), core.purge, lambda: core.evict(0.0, 0.0)]
    for lose in losing:
        faulty.fail_at(1)
        with pytest.raises(PlannedError):
            lose()
        assert core.exists(["k", "other"]) == b"\1\1"
    assert core.statistics().deleted == 0
    assert core.delete(["k"]) == 1


def test_a_batch_whose_commit_fails_stays_uncommitted(core: StoreCore, client: Client) -> None:
    put(core, client, blocks("k"))
    faulty = Faulty(core, "note")
    reservation = core.reserve(client, [64])
    faulty.fail_at(1)
    with pytest.raises(PlannedError):
        core.commit(reservation, ["k"], None)
    assert reservation.state == "open"
    assert core.commit(reservation, ["k"], None) == []
    core.close_client(client)
    assert core.pool.used_bytes == 64


def test_a_prepared_batch_whose_commit_fails_is_committed_by_whoever_looks_next(
    core: StoreCore, client: Client
) -> None:
    put(core, client, blocks("k"))
    reservation = core.reserve(client, [64])
    assert core.prepare(reservation, ["k"], list)
    faulty = Faulty(core, "note")
    faulty.fail_at(1)
    with pytest.raises(PlannedError):
        core.exists(["k"])
    assert core.exists(["k"]) == b"\1"
    assert reservation.state == "committed"
    assert core.pool.used_bytes == 64
