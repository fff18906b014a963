"""Where registered memory is, and what lies in it."""

import array
import mmap

from hypothesis import given
from hypothesis import strategies as st

from infinistore.transports.rdma.memory import RegisteredMemory, RegisteredSpan, address_of
from tests.transports.fake_rdma import Fabric

BUFFER = memoryview(bytearray(1000))


def span_of(first: int, end: int, *, readonly: bool = False) -> RegisteredSpan:
    view = BUFFER[first:end]
    return RegisteredSpan(Fabric().open("fake"), view.toreadonly() if readonly else view)


def test_the_address_of_a_view_is_that_of_its_first_byte_whether_it_may_be_written_or_not() -> None:
    start = address_of(BUFFER)
    assert address_of(BUFFER[10:20]) == address_of(BUFFER[10:20].toreadonly()) == start + 10
    numbers = array.array("q", range(5))
    assert address_of(memoryview(numbers).cast("B")) == numbers.buffer_info()[0]
    assert address_of(memoryview(mmap.mmap(-1, 4096))) % mmap.PAGESIZE == 0


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), max_size=5),
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 30)), min_size=1, max_size=5),
)
def test_views_are_found_in_the_span_that_holds_them_or_not_at_all(
    spans: list[tuple[int, int]], views: list[tuple[int, int]]
) -> None:
    memory = RegisteredMemory()
    known = [span_of(first * 10, (first + count) * 10) for first, count in spans]
    for span in known:
        memory.add(span)
    wanted = [BUFFER[first : first + count] for first, count in views]
    found = memory.locate(wanted, writable=True)
    if found is None:
        whole = {span.address: span.end for span in known}
        assert any(
            not any(start <= address_of(view) and address_of(view) + len(view) <= end for start, end in whole.items())
            or len(known) > 1  # where spans overlap, the one that begins last counts
            for view in wanted
        )
        return
    assert list(found.addresses) == [address_of(view) for view in wanted]
    for address, key, view in zip(found.addresses, found.keys, wanted, strict=True):
        assert any(span.key == key and span.address <= address and address + len(view) <= span.end for span in known)


def test_what_was_removed_is_not_found_any_more() -> None:
    memory = RegisteredMemory()
    first, second = span_of(0, 100), span_of(200, 300)
    memory.add(first)
    memory.add(second)
    assert len(memory) == 2
    assert memory.locate([BUFFER[10:20], BUFFER[250:300]], writable=True) is not None
    memory.remove(first)
    assert memory.locate([BUFFER[10:20]], writable=True) is None
    assert memory.locate([BUFFER[250:300]], writable=True) is not None


def test_memory_that_may_not_be_written_is_found_for_reading_only() -> None:
    memory = RegisteredMemory()
    memory.add(span_of(0, 100, readonly=True))
    assert memory.locate([BUFFER[:10]], writable=False) is not None
    assert memory.locate([BUFFER[:10]], writable=True) is None
