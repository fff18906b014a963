"""A stream is taken apart as it was put together, whatever arrives at a time."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from infinistore.errors import StoreUnavailable
from infinistore.protocol.codec import HEADER_BYTES, head_bytes
from infinistore.protocol.effects import LongBody, Receive, ReceiveDescriptors, Span
from infinistore.protocol.frame_reader import FrameReader
from infinistore.protocol.messages import Delete, Keys
from tests.protocol.strategies import pieces
from tests.protocol.wire import Wire, frame

LENGTHS = st.integers(1, 300)
FRAMES = st.lists(
    st.tuples(LENGTHS, LENGTHS, st.sampled_from(["fill", "gather", "discard"]), st.none() | st.builds(list[int])),
    max_size=8,
)
BUFFERS = st.integers(HEADER_BYTES, 400)


def take_payload(wire: Wire, reader: FrameReader, payload: bytes, way: str) -> None:
    if way == "discard":
        wire.run(reader.discard(len(payload)))
        return
    if way == "gather":
        wire.run(reader.read_ahead(len(payload)))
        if (ahead := reader.take_ahead(len(payload))) is not None:
            assert ahead == payload
            return
    left: list[int] = []
    room = bytearray(len(payload))
    wire.run(reader.read_payload(Span([memoryview(room)]), lambda span: left.append(span.remaining)))
    assert room == payload
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0


@given(FRAMES, pieces, BUFFERS, BUFFERS | st.none(), st.integers(0, 999) | st.none())
def test_frames_come_as_they_were_sent(
    taken: list[tuple[int, int, str, list[int] | None]],
    sizes: list[int],
    buffer: int,
    wider: int | None,
    end: int | None,
) -> None:
    sent = [(frame(Delete(Keys(["k" * key]))), bytes([length % 256]) * length) for key, length, *_ in taken]
    starts = [0, *accumulate(len(head) + len(payload) for head, payload in sent)]
    stream = b"".join(head + payload for head, payload in sent)[:end]
    wire = Wire(stream, sizes)
    reader = FrameReader(1000, 1000, buffer)
    try:
        for number, ((head, payload), (*_, way, descriptors)) in enumerate(zip(sent, taken, strict=True)):
            if number == 1 and wider is not None:
                reader.widen(1000, wider)
            wire.effects.clear()
            came = wire.run(reader.read_head(descriptors))
            if came is None:
                assert starts[number] == len(stream)
                return
            header, body = came
            assert body == head[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
            for effect, at in wire.effects:
                if isinstance(effect, Receive):
                    assert effect.idle == (at in starts)
                elif isinstance(effect, ReceiveDescriptors):
                    assert effect.descriptors is descriptors
                elif isinstance(effect, LongBody):
                    assert effect.length == effect.arrived == head_bytes(header.body_bytes)
            take_payload(wire, reader, payload, way)
    except StoreUnavailable:
        assert len(stream) not in starts
        assert not wire.incoming
    else:
        assert wire.run(reader.read_head()) is None
