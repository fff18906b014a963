"""Reads of keys that others evict, overwrite or move meanwhile."""

from collections.abc import Callable

from infinistore.disk.jobs import ReadInto
from infinistore.disk.settings import TierSettings
from tests.disk.conftest import FOREVER, UNIT_BYTES, Machine, content

MakeMachine = Callable[..., Machine]


def fetch(machine: Machine, *keys: str, then: Callable[[], object] = lambda: None, most: int = 1) -> int:
    """Read keys, with something else that happens after each wait, up to `most`
    times; return how often it had to wait."""
    waits = 0
    for wait in machine.tiers.fetch(keys, FOREVER)[1]:
        machine.until(wait)
        waits += 1
        if waits <= most:
            then()
    return waits


def test_what_was_in_memory_and_is_evicted_while_others_are_read_is_read_too(machine: Machine) -> None:
    machine.put_on_disk("a", "b")
    assert machine.get("a") == [content("a")]
    assert fetch(machine, "a", "b", then=lambda: machine.core.evict_keys(["a"])) == 2
    assert machine.peek("a", "b") == [content("a"), content("b")]


def test_what_is_evicted_as_soon_as_it_was_read_is_read_again(machine: Machine) -> None:
    machine.put_on_disk("a", "b")
    assert fetch(machine, "a", "b", then=machine.forget_memory, most=3) == 4
    assert machine.peek("a", "b") == [content("a"), content("b")]


def test_nobody_reads_for_ever_what_is_evicted_again_and_again(machine: Machine) -> None:
    machine.put_on_disk("a")
    assert fetch(machine, "a", then=machine.forget_memory, most=100) == 8


def test_a_read_that_begins_again_ends_by_its_deadline(make_machine: MakeMachine) -> None:
    machine = make_machine(settings=TierSettings(admission="eager", wait_s=1.0))
    machine.put_on_disk("a")

    def later() -> None:
        machine.forget_memory()
        machine.clock.now += 0.6

    assert fetch(machine, "a", then=later, most=100) == 2


def test_a_block_that_is_moved_on_disk_while_it_is_read_is_there(machine: Machine) -> None:
    machine.put_on_disk("a")
    machine.stuck = lambda job: isinstance(job, ReadInto)
    wait = machine.tier.want(["a"], FOREVER)
    machine.step()
    machine.delete("a")
    machine.put_on_disk("a")
    machine.stuck = lambda job: False
    assert machine.until(wait).unmet == 0
    assert machine.peek("a") == [content("a")]
    assert machine.tier.statistics().disks[0].damaged_blocks == 0


def test_a_batch_of_small_blocks_is_read_in_parts_by_the_room_that_they_take(make_machine: MakeMachine) -> None:
    machine = make_machine(pool_bytes=64 * UNIT_BYTES)
    names = [f"small {number}" for number in range(64)]
    for first in range(0, len(names), 8):
        machine.put(dict.fromkeys(names[first : first + 8], b"small"))
        assert machine.flush() == 0
    machine.forget_memory()
    assert machine.tier.fitting(names) == 8
