"""A client may send without a pause, whatever it asks, and wait for no answer: others
have their turn all the same.
"""

from contextlib import closing
from pathlib import Path

import pytest
import trio

from infinistore.errors import LimitExceeded
from infinistore.protocol.codec import encode_head, pack_u64
from infinistore.protocol.messages import (
    Delete,
    Exists,
    ExistsReply,
    Flush,
    Get,
    Keys,
    Lease,
    MatchPrefix,
    Pin,
    Prefetch,
    Put,
    ReleaseHold,
    Request,
    Reserve,
    TimesLeft,
    Touch,
    Verify,
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


def too_many(count: int, key_bytes: int) -> list[tuple[Request, bytes]]:
    """Requests of so many keys."""
    keys, numbers = Keys([f"{number:0{key_bytes}}\u00e9" for number in range(count)]), pack_u64([1] * count)
    return [
        (Exists(keys), b""),
        (MatchPrefix(keys), b""),
        (Delete(keys), b""),
        (Get(keys, numbers), b""),
        (Lease(keys, numbers), b""),
        (Put(keys, numbers, checksums=False), bytes(count)),
        (Reserve(numbers), b""),
        (Verify(keys), b""),
        (Pin(keys), b""),
        (TimesLeft(keys), b""),
        (Flush(keys), b""),
        (Prefetch(keys), b""),
    ]


async def test_who_asks_for_too_much_is_told_so_and_goes_on(tmp_path: Path) -> None:
    """What is short is read first, what is long is not, and of what is even longer not
    even the text."""
    async with running_server(make_config(max_batch_keys=49, unix_socket=str(tmp_path / "s"))) as running:
        peer = await running.local_peer()
        for count, key_bytes in [(50, 1), (400, 5), (500, 1000)]:
            for request, payload in too_many(count, key_bytes):
                with pytest.raises(LimitExceeded, match=r"max_batch_keys=49\b"):
                    await peer.ask(request, payload)
                assert await peer.ask(Exists(KEY)) == ExistsReply(b"\0")
        peer.close()
