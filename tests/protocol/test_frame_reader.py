"""A stream is taken apart as it was put together, whatever arrives at a time."""

import re
from collections.abc import Sequence
from itertools import accumulate

from hypothesis import example, given
from hypothesis import strategies as st

from infinistore.errors import StoreUnavailable
from infinistore.protocol.codec import HEADER_BYTES, Header, head_bytes
from infinistore.protocol.effects import LongBody, Receive, ReceiveDescriptors, Span
from infinistore.protocol.frame_reader import FrameReader
from infinistore.protocol.messages import Delete, Keys
from tests.protocol.strategies import pieces
from tests.protocol.wire import Wire, frame

LENGTHS = st.integers(1, 60) | st.integers(1, 300)
FRAMES = st.lists(
    st.tuples(
        LENGTHS,
        LENGTHS,
        st.sampled_from(["read", "room", "descriptors"]),
        st.sampled_from(["fill", "blind", "gather", "discard"]),
    ),
    max_size=8,
)
BUFFERS = st.integers(HEADER_BYTES, 400)


async def receive_into(room: Sequence[memoryview]) -> int:
    return await Receive(room, idle=True)


def take_head(wire: Wire, reader: FrameReader, way: str) -> tuple[Header, memoryview] | None:
    if way == "room" and (room := reader.room) is not None:
        reader.arrived(wire.run(receive_into(room)))
        if (head := reader.take_head()) is not None:
            return head
    return wire.run(reader.read_head([] if way == "descriptors" else None))


def take_payload(wire: Wire, reader: FrameReader, payload: bytes, way: str, buffer: int) -> None:
    if way == "discard":
        wire.run(reader.discard(len(payload)))
        return
    if way == "gather":
        wire.run(reader.read_ahead(len(payload)))
        if (ahead := reader.take_ahead(len(payload))) is not None:
            assert ahead == payload
            return
        assert len(payload) > buffer or not wire.incoming
    left: list[int] = []
    room = bytearray(len(payload))
    progress = None if way == "blind" else lambda span: left.append(span.remaining)
    wire.run(reader.read_payload(Span([memoryview(room)]), progress))
    assert room == payload
    if progress is None:
        return
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0


@example([(50, 1, "read", "fill"), (50, 64, "read", "gather")], [33], 64, len(frame(Delete(Keys(["k" * 50])))), None)
@example([(1, 64, "read", "gather")], [len(frame(Delete(Keys(["k"]))))], 64, None, None)
@given(FRAMES, pieces, BUFFERS, BUFFERS | st.none(), st.integers(0, 999) | st.none())
def test_frames_come_as_they_were_sent(
    taken: list[tuple[int, int, str, str]],
    sizes: list[int],
    buffer: int,
    wider: int | None,
    end: int | None,
) -> None:
    sent = [(frame(Delete(Keys(["k" * key]))), bytes([length % 256]) * length) for key, length, *_ in taken]
    starts = [0, *accumulate(len(head) + len(payload) for head, payload in sent)]
    stream = b"".join(head + payload for head, payload in sent)[:end]
    wire = Wire(stream, sizes)

    def no_more_has_arrived_of_a_long_body_than_it_has() -> None:
        for effect, _ in wire.effects:
            assert not isinstance(effect, LongBody) or effect.arrived <= effect.length

    wire.before_receive = no_more_has_arrived_of_a_long_body_than_it_has
    reader, announces = FrameReader(1000, 1000, buffer), False
    try:
        for number, ((head, payload), (*_, head_way, way)) in enumerate(zip(sent, taken, strict=True)):
            if number == 1 and wider is not None:
                buffer, announces = max(wider, reader.ahead_bytes), True
                reader.widen(1000, wider)
            wire.effects.clear()
            came = take_head(wire, reader, head_way)
            if came is None:
                assert starts[number] == len(stream)
                return
            header, body = came
            assert body == head[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
            long = [effect for effect, _ in wire.effects if isinstance(effect, LongBody)]
            assert len(long) == (announces and len(head) > buffer)
            for effect, at in wire.effects:
                if isinstance(effect, Receive):
                    assert head_way != "descriptors" or at >= starts[number] + HEADER_BYTES
                elif isinstance(effect, ReceiveDescriptors):
                    assert effect.descriptors == []
                elif isinstance(effect, LongBody):
                    assert effect.length == effect.arrived == head_bytes(header.body_bytes)
            take_payload(wire, reader, payload, way, buffer)
            assert [at in starts for effect, at in wire.effects if isinstance(effect, Receive)] == [
                effect.idle for effect, _ in wire.effects if isinstance(effect, Receive)
            ]
    except StoreUnavailable as error:
        said = str(error)
        assert re.fullmatch(r"the connection ended (in the middle|[1-9]\d* bytes before the end) of a frame", said)
        assert len(stream) not in starts
        assert not wire.incoming
    else:
        assert wire.run(reader.read_head()) is wire.run(reader.read_head([])) is None
