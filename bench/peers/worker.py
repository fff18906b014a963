"""The process of one client: connects to a store, and does what each line on standard
input says, a JSON object; it answers each with another.

    python bench/peers/worker.py CLASS ADDRESS SOURCE_FILE TARGET_BYTES CLIENT

- `{"do": "fill", "shape": [64, 65536], "part": [0, 4]}`: put a part of the blocks that
  are to be read.
- `{"do": "check", "shape": ...}`: read a batch, and compare each byte; then read
  everything once, as a client has that does not run for the first time.
- `{"do": "prepare", "shape": ..., "op": "get", "clients": 4}`: make the calls.
- `{"do": "run", "at": 12.5, "seconds": 0.3}`: begin with them at that time of the
  monotonic clock. The answer has the calls, the seconds, this process's processor time,
  and the sorted times of calls in nanoseconds.
- `{"do": "clear", "shape": ..., "part": [0, 4]}`: remove these blocks.
- `{"do": "forget"}`: remove the blocks that runs have written.
"""

import json
import mmap
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers import clients, original
from peers.work import MIB, WRITTEN_BYTES, Shape, batches_to_read, source_of, stored_keys

_MOST_CALLS = 20_000
_READS_BEFORE_A_WRITE = 9
_MADE_READS = 16_384


class Worker:
    """One client of one store."""

    def __init__(self, kind: str, address: str, source: Path, target_bytes: int, client: int) -> None:
        with source.open("rb") as file:
            self._source = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        target = memoryview(mmap.mmap(-1, target_bytes))
        target[:: mmap.PAGESIZE] = bytes(len(target[:: mmap.PAGESIZE]))
        self._number = client
        kinds = vars(clients) | vars(original)
        self._client: clients.Client = kinds[kind](address, self._source, target)
        self._written: list[str] = []
        self._runs = 0
        self._prepared: Iterator[clients.Call] = iter(())

    def fill(self, shape: Shape, part: tuple[int, int]) -> dict[str, Any]:
        """Put every n-th batch of what is to be read."""
        keys = stored_keys(shape)
        for first in _parts(shape, part):
            numbers = range(first, first + shape.blocks)
            self._client.put(keys[first : first + shape.blocks], [source_of(n, shape.size) for n in numbers])()
        return {}

    def clear(self, shape: Shape, part: tuple[int, int]) -> dict[str, Any]:
        """Remove every n-th batch of it."""
        keys = stored_keys(shape)
        self._client.remove([key for first in _parts(shape, part) for key in keys[first : first + shape.blocks]])
        return {}

    def check(self, shape: Shape) -> dict[str, Any]:
        """Read a batch, and compare it with what was put. Then read the rest, too."""
        numbers = next(batches_to_read(shape, self._number + 1000))
        keys = stored_keys(shape)
        result = self._client.get([keys[n] for n in numbers], shape.size)()
        right = [bytes(self._source[source_of(n, shape.size)]) for n in numbers]
        if self._client.keeps and (read := self._client.blocks(result, shape)) != right:
            return {"error": f"read something else: {[len(one) for one in read][:3]}"}
        together = max(shape.blocks, min(64, 16 * MIB // shape.size))
        for first in range(0, len(keys), together):
            self._client.get(keys[first : first + together], shape.size)()
        return {}

    def forget(self) -> dict[str, Any]:
        """Remove what runs have written."""
        self._client.remove(self._written)
        self._written.clear()
        return {}

    def prepare(self, shape: Shape, operation: str, among: int) -> dict[str, Any]:
        """Make the calls of a run, in which so many clients share what may be written."""
        self._prepared = self._calls(shape, operation, among)
        return {}

    def run(self, at: float, seconds: float) -> dict[str, Any]:
        """Call until the time is over, or there is nothing left to write."""
        calls, self._prepared = self._prepared, iter(())
        self._wait(at)
        processor = time.process_time()
        times: list[int] = []
        began = now = time.perf_counter_ns()
        until = began + int(seconds * 1e9)
        for call in calls:
            call()
            after = time.perf_counter_ns()
            times.append(after - now)
            now = after
            if now >= until:
                break
        processor = time.process_time() - processor
        return {"calls": len(times), "seconds": (now - began) / 1e9, "cpu": processor, "times": sorted(times)}

    def _calls(self, shape: Shape, operation: str, among: int) -> Iterator[clients.Call]:
        if operation == "put":
            return iter(self._writes(shape, among))
        if operation == "exists":
            return _again([self._existing(key) for key in stored_keys(shape)[:_MADE_READS]])
        numbers = batches_to_read(shape, self._number)
        keys = stored_keys(shape)
        # As many as take turns before a block is read again.
        made = min(_MADE_READS, max(1, shape.stored // shape.blocks))
        reads = _again([self._client.get([keys[n] for n in next(numbers)], shape.size) for _ in range(made)])
        return reads if operation == "get" else _mixed(reads, self._writes(shape, among), self._number)

    def _existing(self, key: str) -> clients.Call:
        call = self._client.exists(key)
        if call is None:
            raise NotImplementedError("it has no such question")
        return call

    def _writes(self, shape: Shape, among: int) -> list[clients.Call]:
        """Make puts under keys that nobody has used."""
        self._runs += 1
        made = []
        for number in range(min(_MOST_CALLS, max(1, WRITTEN_BYTES // among // shape.batch_bytes))):
            first = number * shape.blocks
            keys = [f"written/{self._number}/{self._runs}/{n:08}" for n in range(first, first + shape.blocks)]
            offset = self._number * 1000
            places = [source_of(offset + n, shape.size) for n in range(first, first + shape.blocks)]
            made.append(self._client.put(keys, places))
            self._written += keys
        return made

    @staticmethod
    def _wait(at: float) -> None:
        time.sleep(max(0.0, at - time.monotonic() - 0.005))
        while time.monotonic() < at:
            pass

    def close(self) -> None:
        """End the connection."""
        self._client.close()


def _again(calls: list[clients.Call]) -> Iterator[clients.Call]:
    while True:
        yield from calls


def _mixed(reads: Iterator[clients.Call], writes: list[clients.Call], seed: int) -> Iterator[clients.Call]:
    generator = random.Random(seed)
    for write in writes:
        turns = [write, *(next(reads) for _ in range(_READS_BEFORE_A_WRITE))]
        generator.shuffle(turns)
        yield from turns


def _parts(shape: Shape, part: tuple[int, int]) -> range:
    number, of = part
    return range(number * shape.blocks, shape.stored - shape.blocks + 1, of * shape.blocks)


def main() -> None:
    """Serve until standard input ends."""
    kind, address, source, target_bytes, client = sys.argv[1:]
    worker = Worker(kind, address, Path(source), int(target_bytes), int(client))
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        shape = Shape(*asked.get("shape", (1, 4096)))
        try:
            match asked["do"]:
                case "fill":
                    answer = worker.fill(shape, asked["part"])
                case "clear":
                    answer = worker.clear(shape, asked["part"])
                case "check":
                    answer = worker.check(shape)
                case "forget":
                    answer = worker.forget()
                case "prepare":
                    answer = worker.prepare(shape, asked["op"], asked["clients"])
                case _:
                    answer = worker.run(asked["at"], asked["seconds"])
        except Exception as error:  # noqa: BLE001, whatever a library raises belongs into the report
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), flush=True)
    worker.close()


if __name__ == "__main__":
    main()
