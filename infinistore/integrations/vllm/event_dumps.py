"""Gives dumps of the stored blocks to routers that come late, by ZMQ.

A router subscribes first. Then it asks for a dump, part by part, and applies what it
was sent from the dump's `next` batch on. A dump is kept until somebody has asked for
its last part, so that all its parts are of the same moment.

A request is one frame: `dump`, for the first part of a new dump, or 16 bytes: the eight
that name a dump, and a part's number, big-endian. An answer is two frames: a header,
which is a map in MessagePack, and the part, which is a batch of events as vLLM sends
them. A header with `error` says why there is no part.

A router asks for each part, so one that does not read has at most a few parts waiting.
More are dropped, and the number in the next header tells it.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import attrs
import msgspec
import zmq

from infinistore.errors import ConfigError
from infinistore.host import start_thread
from infinistore.integrations.vllm.block_events import Dump, Run, StoredBlocks

__all__ = ["DumpAnswers", "DumpServer"]

_NEW: Final = b"dump"
_NAME_BYTES: Final = 8
_MOST_DUMPS: Final = 8
_KEPT_S: Final = 30.0
"""How long a dump is kept after it was last read."""
_MOST_WAITING: Final = 4
"""Parts for one router that does not read them, beside what the kernel holds."""
_MOST_REQUEST_BYTES: Final = 1024


@attrs.define
class _Kept:
    dump: Dump
    read_s: float


class DumpAnswers:
    """Answers requests for dumps of these blocks. `encode` makes a batch of blocks."""

    def __init__(
        self,
        blocks: StoredBlocks,
        encode: Callable[[Iterable[Run]], bytes],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._blocks = blocks
        self._encode = encode
        self._clock = clock
        self._kept: dict[bytes, _Kept] = {}

    def answer(self, request: Sequence[bytes]) -> list[bytes]:
        """Return the frames of the answer to the frames of a request."""
        now = self._clock()
        self._kept = {name: kept for name, kept in self._kept.items() if now - kept.read_s < _KEPT_S}
        match [*request]:
            case [word] if word == _NEW:
                if len(self._kept) >= _MOST_DUMPS:
                    return _refusal(f"{_MOST_DUMPS} dumps are being read; ask again in a moment")
                name, number = os.urandom(_NAME_BYTES), 0
                self._kept[name] = _Kept(self._blocks.dump(), now)
            case [place] if len(place) == _NAME_BYTES + 8:
                name, number = place[:_NAME_BYTES], int.from_bytes(place[_NAME_BYTES:], "big")
            case _:
                return _refusal("a request is one frame: the word dump, or a dump's name and the number of a part")
        kept = self._kept.get(name)
        if kept is None or number >= kept.dump.parts:
            return _refusal("there is no such part any more; ask for a new dump")
        kept.read_s = now
        if number == kept.dump.parts - 1:
            del self._kept[name]
        header = {
            "dump": name,
            "next": kept.dump.next_batch,
            "part": number,
            "parts": kept.dump.parts,
            "blocks": len(kept.dump),
            "left_out": kept.dump.left_out,
        }
        return [msgspec.msgpack.encode(header), self._encode(kept.dump.part(number))]


def _refusal(error: str) -> list[bytes]:
    return [msgspec.msgpack.encode({"error": error}), b""]


class DumpServer:
    """Answers at an address, in a thread, from `start` to `close`.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, endpoint: str, answers: DumpAnswers) -> None:
        self._answers = answers
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, _MOST_WAITING)
        self._router.setsockopt(zmq.MAXMSGSIZE, _MOST_REQUEST_BYTES)
        try:
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"events_dump_endpoint: cannot listen at {endpoint}: {error}") from error
        self.endpoint: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._closing, self._closed = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._closed.bind("inproc://closed")
        self._closing.connect("inproc://closed")
        self._thread = threading.Thread(target=self._run, name="infinistore-dumps", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        start_thread(self._thread)

    def close(self) -> None:
        """Answer no more."""
        if self._thread.is_alive():
            self._closing.send(b"")
            self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._router, self._closed):
            poller.register(socket, zmq.POLLIN)
        while self._closed not in (ready := dict(poller.poll())):
            if self._router in ready:
                router, *request = self._router.recv_multipart()
                # A REQ socket sends an empty frame first, and a DEALER has to.
                answer = self._answers.answer(request[1:] if request[:1] == [b""] else ())
                self._router.send_multipart([router, b"", *answer])
