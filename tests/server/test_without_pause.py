"""A client may send without a pause, whatever it asks, and wait for no answer: others
have their turn all the same.
"""

from contextlib import closing

import pytest
import trio

from infinistore.protocol.codec import encode_head, pack_u64
from infinistore.protocol.messages import (
    Delete,
    Exists,
    Get,
    Keys,
    MatchPrefix,
    Put,
    ReleaseHold,
    Request,
    Touch,
)
from tests.server.running import RunningServer, make_config, running_server

COUNT = 2000
MOST_BETWEEN_TURNS = 80
"""So many requests may be answered before other tasks of the server have their turn."""

KEY = Keys(["key"])
KINDS: list[tuple[Request, bytes]] = [
    (Exists(KEY), b""),
    (Exists(Keys(["key", "other"]), touch=True), b""),
    (Get(KEY, pack_u64([9]), checksums=False), b""),
    (Put(KEY, pack_u64([5]), checksums=False), b"value"),
    (Put(Keys(["key", "other"]), pack_u64([2, 3]), checksums=False), b"value"),
    (MatchPrefix(KEY), b""),
    (ReleaseHold(7), b""),
    (Delete(KEY), b""),
    (Touch(KEY), b""),
]


def counted(running: RunningServer) -> int:
    """How many requests were served."""
    return sum(one.count for one in running.server.context.recorder.statistics() if one.kind != "hello")


async def most_between_turns(running: RunningServer, count: int) -> int:
    """Take all turns there are until so many requests were served; return how many at
    most were served from one turn to the next.
    """
    most = before = counted(running)
    while before < count:
        await trio.lowlevel.checkpoint()
        served = counted(running)
        most, before = max(most, served - before), served
    return most


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize(("request_", "payload"), KINDS)
async def test_others_have_their_turn(request_: Request, payload: bytes, reads: bool) -> None:
    data = encode_head(request_, request_id=7, payload_bytes=len(payload)) + payload
    async with running_server(make_config()) as running:
        peer = await running.peer()

        async def read() -> None:
            buffer = [memoryview(bytearray(1 << 16))]
            while await peer.stream.receive_into(buffer):
                pass

        with closing(peer):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(peer.send, data * COUNT)
                if reads:
                    nursery.start_soon(read)
                most = await most_between_turns(running, COUNT)
                nursery.cancel_scope.cancel()
        assert most <= MOST_BETWEEN_TURNS
