"""What is noted of who came: bounded, and what is left out is counted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.access.audit import MOST_SOURCES, Audit, Fields


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def listening(clock: Clock) -> tuple[Audit, list[Fields]]:
    noted: list[Fields] = []
    return Audit(noted.append, clock), noted


def test_a_flood_of_one_kind_is_summed_up_and_hides_no_other() -> None:
    clock = Clock()
    audit, noted = listening(clock)
    for _ in range(10_000):
        audit.note("refused", reason="AuthenticationFailed")
    audit.note("login", tenant="alice")
    assert len(noted) == 121
    assert noted[-1] == {"event": "login", "tenant": "alice"}
    clock.now += 1
    audit.note("refused", reason="again")
    assert noted[-1] == {"event": "refused", "reason": "again", "left_out": 9_880}


def test_what_was_left_out_is_said_although_nothing_follows() -> None:
    audit, noted = listening(Clock())
    for _ in range(150):
        audit.note("refused")
    audit.sum_up()
    audit.sum_up()
    assert noted[120:] == [{"event": "refused", "left_out": 30}]


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        ({"tenant": "ann"}, {"tenant": "ben"}),
        ({"tenant": "ann", "origin": "10.0.0.1:5"}, {"tenant": "ben", "origin": "10.0.0.1:6"}),
        ({"origin": "10.0.0.1:5"}, {"origin": "10.0.0.2:5"}),
        ({"origin": "[fd00::1]:5"}, {"origin": "[fd00::2]:5"}),
        ({"origin": "uid 1, pid 2"}, {"origin": "uid 3, pid 2"}),
    ],
    ids=str,
)
def test_nobody_hides_what_somebody_else_does(mine: Fields, others: Fields) -> None:
    audit, noted = listening(Clock())
    for _ in range(10_000):
        audit.note("denied", **mine)
    audit.note("denied", **others)
    assert noted[-1] == {"event": "denied", **others}
    audit.sum_up()
    (told,) = [fields for fields in noted if "left_out" in fields]
    assert told["left_out"] == 10_000 + 1 - (len(noted) - 1)
    name = next(iter(mine))
    assert str(mine[name]).startswith(str(told[name]))  # and says of whom


@pytest.mark.parametrize("origin", ["10.0.0.1:{}", "[fd00::1]:{}", "uid 1, pid {}"])
def test_who_comes_by_another_port_or_process_is_no_other_source(origin: str) -> None:
    audit, noted = listening(Clock())
    for number in range(1_000):
        audit.note("refused", origin=origin.format(number))
    assert len(noted) == 120


def test_any_number_of_sources_takes_bounded_memory_and_all_are_counted() -> None:
    clock = Clock()
    audit, noted = listening(clock)
    for number in range(3 * MOST_SOURCES):
        for _ in range(2):
            audit.note("refused", origin=f"host-{number}:1")
            clock.now += 1e-6
    audit.sum_up()
    left_out = sum(int(str(fields["left_out"])) for fields in noted if "left_out" in fields)
    sums = sum(set(fields) <= {"event", "origin", "left_out"} and "left_out" in fields for fields in noted)
    assert len(noted) - sums + left_out == 6 * MOST_SOURCES
    assert len(noted) < 2 * MOST_SOURCES + 100 + 20 + 10
    clock.now += 3_600
    noted.clear()
    for number in range(MOST_SOURCES):
        audit.note("refused", origin=f"other-{number}:1")
    assert len(noted) == MOST_SOURCES  # those before are forgotten


def test_a_long_text_of_a_client_is_cut() -> None:
    audit, noted = listening(Clock())
    audit.note("login", says="x" * 10_000)
    assert noted == [{"event": "login", "says": "x" * 300}]


def test_without_a_listener_nothing_is_gathered() -> None:
    audit = Audit()
    assert not audit.listens
    audit.note("login")
    audit.sum_up()


@given(st.lists(st.tuples(st.sampled_from(["login", "refused"]), st.floats(0, 1), st.integers(1, 300))))
def test_every_event_is_noted_or_counted_and_the_rate_is_bounded(steps: list[tuple[str, float, int]]) -> None:
    clock = Clock()
    audit, noted = listening(clock)
    given_ = {"login": 0, "refused": 0}
    for event, pause_s, count in steps:
        clock.now += pause_s
        for _ in range(count):
            audit.note(event)
            given_[event] += 1
    audit.sum_up()
    for event, count in given_.items():
        mine = [fields for fields in noted if fields["event"] == event]
        sums = [fields for fields in mine if fields.get("left_out")]
        last_is_sum = bool(mine) and len(mine) > 1 and "left_out" in mine[-1]
        left_out = sum(int(str(fields["left_out"])) for fields in sums)
        assert count in (len(mine) + left_out, len(mine) + left_out - last_is_sum)
        assert len(mine) <= 120 + 5.1 * clock.now + 2
