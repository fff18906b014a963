"""States in all formats that releases have written are read, with all their blocks;
what no release has written is refused.
"""

import struct
import sys
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.allocators import create_allocator
from infinistore.core import Pool, StoreCore, create_arena
from infinistore.core.hand_over import adopt
from infinistore.core.pool_state import (
    FORMAT,
    READERS,
    decode_groups,
    decode_state,
    encode_groups,
    encode_state,
    header_of,
    write_sections,
)
from tests.core.golden.states import GOLDEN, GROUPS, POOL, VALUES

pytestmark = pytest.mark.skipif(sys.byteorder != "little", reason="the golden states are of a little-endian machine")
MAGIC = b"INFPOOL\n"
FORMATS = sorted(READERS)


def golden(number: int, what: str = "pool") -> bytes:
    return (GOLDEN / f"{what}-{number}.bin").read_bytes()


def body_of(number: int) -> bytes:
    return golden(number)[len(header_of(MAGIC, number, b"")) :]


def sections() -> dict[str, bytes]:
    """Those of the golden state of the present format."""
    return {name: bytes(section) for name, section in READERS[FORMAT](memoryview(body_of(FORMAT))).items()}


def with_sections(sections: Mapping[str, bytes]) -> bytes:
    body = write_sections(sections)
    return header_of(MAGIC, FORMAT, body) + body


@pytest.fixture
def core() -> Iterator[StoreCore]:
    """A store with the memory of the golden state, and what was stored there."""
    pool = Pool(create_allocator(POOL.allocator, POOL.unit_bytes))
    made = StoreCore(pool, clock=lambda: 100.0)
    for index, length in enumerate(POOL.arenas):
        made.add_arena(create_arena(index, length))
    for value, entry in zip(VALUES.values(), POOL.entries, strict=True):
        pool.view(entry[:3])[:] = value
    yield made
    pool.close()


def test_there_is_a_golden_state_of_each_format() -> None:
    for what in ("pool", "groups"):
        assert sorted(int(path.stem.split("-")[1]) for path in GOLDEN.glob(f"{what}-*.bin")) == FORMATS


@pytest.mark.parametrize("number", FORMATS)
def test_a_state_of_each_format_is_adopted_with_all_its_blocks(number: int, core: StoreCore) -> None:
    adopted = adopt(core, decode_state(golden(number)))
    assert (adopted.kept, adopted.dropped, len(adopted.stand_ins)) == (len(VALUES), 0, len(POOL.pins))
    lease = core.lease(core.open_client("reader"), list(VALUES))
    assert [bytes(view or b"") for view in lease.views] == list(VALUES.values())
    assert core.statistics().checksum_drops == 0
    assert core.statistics().protected_keys == len(POOL.protected)
    assert core.release_hold(POOL.holds[0].hold)


@pytest.mark.parametrize("number", FORMATS)
def test_a_state_of_each_format_is_read_as_it_was_written(number: int) -> None:
    assert decode_state(golden(number)) == POOL
    assert decode_groups(golden(number, "groups")) == GROUPS


def test_the_present_format_is_that_of_its_golden_state() -> None:
    """If this fails, older releases read something else, or nothing: that is a new
    format."""
    assert b"".join(encode_state(POOL)) == golden(FORMAT)
    assert b"".join(encode_groups(GROUPS)) == golden(FORMAT, "groups")


@pytest.mark.parametrize("number", [0, 1, FORMAT + 1, 2**64 - 1])
def test_a_format_that_no_reader_is_for_is_refused_by_its_number(number: int) -> None:
    body = body_of(FORMAT)
    with pytest.raises(
        ValueError, match=f"^it has format {number}, and this release reads format {' or '.join(map(str, FORMATS))}$"
    ):
        decode_state(header_of(MAGIC, number, body) + body)


def test_a_section_that_may_be_skipped_is() -> None:
    assert decode_state(with_sections({"+of later": b"anything", **sections()})) == POOL


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"of later": b"1"}, "its sections are not those that this release reads: 'of later'"),
        ({"keys": None}, "its sections are not those that this release reads: 'keys'"),
        ({"unit_bytes": b""}, "it has a unit or a key that no store has"),
        ({"entries": b"1234567"}, "it has a part of a number"),
        ({"entries": bytes(24)}, "it has a part of a row"),
        ({"ends": bytes(8)}, "it has a part of a row"),
        ({"entries": b""}, "one without the other"),
        ({"keys": b"short"}, "it ends too soon"),
        ({"pinned": bytes(320)}, "it goes on beyond its end"),
        ({"key_bytes": struct.pack("=Q", 2**64 - 1)}, "that no store has"),
    ],
)
def test_sections_that_cannot_be_are_refused(change: Mapping[str, bytes | None], problem: str) -> None:
    changed = {name: data for name, data in {**sections(), **change}.items() if data is not None}
    with pytest.raises(ValueError, match=problem):
        decode_state(with_sections(changed))


def test_a_section_that_is_there_twice_is_refused() -> None:
    body = bytearray(write_sections({"keys": b"", "kays": b""}))
    body[body.index(b"kays") + 1] = ord("e")
    with pytest.raises(ValueError, match="it has a section twice"):
        decode_state(header_of(MAGIC, FORMAT, bytes(body)) + bytes(body))


@given(st.sampled_from(FORMATS), st.integers(min_value=0), st.integers(0, 2**64 - 1))
def test_a_body_that_lies_is_refused_or_says_something_else(number: int, place: int, lie: int) -> None:
    body = bytearray(body_of(number))
    place = 8 * (place % (len(body) // 8))
    body[place : place + 8] = lie.to_bytes(8, "little")
    try:
        decode_state(header_of(MAGIC, number, bytes(body)) + bytes(body))
    except ValueError:
        return
