"""Follow which blocks vLLM engines have, as a router does that may start after them.

    python examples/vllm/follow_blocks.py tcp://ENGINE:5557 tcp://ENGINE:5559

The first address is that of vLLM's events, the second one `events_dump_endpoint`. It
needs `pyzmq` and `msgspec`, and prints how many blocks there are, by their medium.
"""

import sys
from collections import Counter
from typing import Any

try:
    import msgspec
    import zmq
except ImportError:
    sys.exit("this example needs what vLLM brings: pip install msgspec pyzmq")


class BlockFollower:
    """The blocks of one engine: `blocks` counts the copies of each, by its medium, its
    group and its hash. `left_out` says how many copies the last dump was short of.

    It takes a dump at its start, when it has missed batches, and when the connection was
    lost: another engine may be there now, whose batches begin at 0.
    """

    def __init__(self, events: str, dumps: str, *, topic: str = "", patience_s: float = 10.0) -> None:
        self.blocks: Counter[tuple[str | None, int | None, Any]] = Counter()
        self.left_out = 0
        self.dumps = 0
        self._endpoints = events, dumps
        self._topic = topic
        self._patience_ms = int(patience_s * 1e3)
        self._context = zmq.Context()
        self.next_batch = 0
        self._connect()

    def close(self) -> None:
        """Follow no longer."""
        self._context.destroy(linger=0)

    def follow(self, wait_s: float) -> bool:
        """Take in the next batch. False if there was none for so long."""
        if self._lost.poll(0):
            self._events.close()
            self._connect()
        if not self._events.poll(int(wait_s * 1e3)):
            return False
        _, number_bytes, batch = self._events.recv_multipart()
        number = int.from_bytes(number_bytes, "big")
        if number > self.next_batch:
            self.take_dump()
        if number >= self.next_batch:
            self._apply(batch)
            self.next_batch = number + 1
        return True

    def _connect(self) -> None:
        """Subscribe, and then take a dump, so that nothing is missed between."""
        self._events = self._context.socket(zmq.SUB)
        self._events.setsockopt_string(zmq.SUBSCRIBE, self._topic)
        self._lost = self._events.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._events.connect(self._endpoints[0])
        self.take_dump()

    def take_dump(self) -> None:
        """Forget all blocks and ask for them.

        Raises:
            TimeoutError: there is no answer, or no part of it any more.
        """
        with self._context.socket(zmq.REQ) as asking:
            asking.setsockopt(zmq.LINGER, 0)
            asking.connect(self._endpoints[1])
            header, batch = self._answer(asking, b"dump")
            self.blocks.clear()
            self._apply(batch)
            for part in range(1, header["parts"]):
                _, batch = self._answer(asking, header["dump"] + part.to_bytes(8, "big"))
                self._apply(batch)
        self.next_batch, self.left_out = header["next"], header["left_out"]
        self.dumps += 1

    def _answer(self, asking: Any, request: bytes) -> tuple[dict[str, Any], bytes]:
        asking.send(request)
        if not asking.poll(self._patience_ms):
            raise TimeoutError(f"{self._endpoints[1]} does not answer")
        header_bytes, batch = asking.recv_multipart()
        header: dict[str, Any] = msgspec.msgpack.decode(header_bytes)
        if "error" in header:
            raise TimeoutError(header["error"])
        return header, batch

    def _apply(self, batch: bytes) -> None:
        _, events, *_ = msgspec.msgpack.decode(batch)
        for event in events:
            if event["type"] == "AllBlocksCleared":  # of what the engine has itself
                for block in [block for block in self.blocks if block[0] in ("GPU", None)]:
                    del self.blocks[block]
                continue
            change = 1 if event["type"] == "BlockStored" else -1
            for name in event["block_hashes"]:
                block = event["medium"], event.get("group_idx"), name
                self.blocks[block] += change
                if self.blocks[block] <= 0:
                    del self.blocks[block]


def main(events: str, dumps: str) -> None:
    """Print how many blocks there are, whenever that changes."""
    follower = BlockFollower(events, dumps)
    while True:
        print(dict(Counter(medium for medium, _, _ in follower.blocks)), flush=True)
        while not follower.follow(60.0):
            pass


if __name__ == "__main__":
    main(*sys.argv[1:])
