"""The two workers, each a process: prefill computes a prompt's KV cache and writes it
layer by layer; decode loads a prompt's longest stored prefix, and checks every byte.

Run as `python -m infinistore.demo.workers prefill` or `decode`. A worker reads orders
from standard input and writes events to standard output, one JSON object a line: others
can read the arguments of a process, and addresses may contain secrets. The first order
says which store and which layout; each other one is a prompt. The events are `ready`
once; for each prompt `matched`, a `layer` for each layer and kind of work, and
`finished`; `failed` at any time, as the last one. A worker ignores Ctrl-C, which a
terminal sends to all its processes: the demonstration ends its workers.

Both load the stored prefix, layer by layer, and check every byte: prefill, too, because
the computed tokens attend to the found ones. While prefill writes a layer to the store,
a thread creates the next one, and waits until the simulated model would have finished
it. So a slow store delays the model.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeAlias

from attrs import field, frozen

from infinistore import InfiniStoreException, LimitExceeded, blocking
from infinistore.demo.prompts import DemoError, KVLayout, block_content, block_key, block_keys, chunk_names
from infinistore.statistics import Stats

Found: TypeAlias = dict[str, Any]
"""What was found, or a part of it, as `--json` prints it; the names end in units."""
WAIT_S: Final = 60.0
"""How long at most for what comes soon unless the machine is very busy."""


def node_states(found: Stats) -> dict[str, str]:
    """Return the states of the nodes of a cluster by their names."""
    return {node.id: node.state for node in found.cluster.nodes} if found.cluster else {}


def gigabytes_per_s(payload_bytes: int, seconds: float) -> float | None:
    """Return the rate, or None where nothing was moved."""
    return payload_bytes / seconds / 1e9 if payload_bytes and seconds > 0 else None


def _send(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")  # in one call: the model's thread writes, too
    sys.stdout.flush()


@frozen
class Worker:
    """Does the work for prompts; `load_s` and `write_s` is time in calls to the
    store.
    """

    title: str
    store: blocking.BlockingStore
    layout: KVLayout
    tokens_per_s: float
    """The speed of the simulated model."""
    model: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(1))

    def work(self, prompt: str, tokens: list[int], *, may_miss: bool, nodes: dict[str, bool]) -> Found:
        """Do the worker's part for a prompt, once this process, too, knows which
        `nodes` are in the cluster and which are not. Decode must find all full chunks,
        as prefill has stored them, unless blocks may be missing.
        """
        if nodes:
            self._wait_for(nodes)
        names = chunk_names(self.layout, tokens)
        loaded = self._load(tokens, names, may_miss)
        found = self.layout.whole_chunks(loaded["hit_tokens"])
        if self.title == "prefill":
            return loaded | self._compute_and_store(len(tokens) - loaded["hit_tokens"], names[found:])
        if found < len(names) and not may_miss:
            raise DemoError(
                f"prefill stored {len(names)} chunks of prompt {prompt}, but only the first {found} are still "
                "there: others write to this store, or its pool or its disk has no room for them"
            )
        return loaded

    def _wait_for(self, nodes: dict[str, bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while True:
            known = node_states(self.store.stats())
            if all((name in known) is is_in for name, is_in in nodes.items()):
                return
            if time.monotonic() > deadline:
                raise DemoError(f"no news of {', '.join(nodes)} after {WAIT_S:.0f} s; is this machine very busy?")
            time.sleep(0.02)

    def _compute_and_store(self, computed_tokens: int, new_names: Sequence[bytes]) -> Found:
        layout = self.layout
        compute_s = computed_tokens / self.tokens_per_s
        layer_bytes = len(new_names) * layout.block_bytes

        def compute(number: int) -> list[tuple[str, bytes]]:
            deadline = time.perf_counter() + compute_s / layout.layers
            layer = [(block_key(name, number), block_content(layout, name, number)) for name in new_names]
            time.sleep(max(0.0, deadline - time.perf_counter()))
            _send("layer", work="computes", layer=number)
            return layer

        started, write_s = time.perf_counter(), 0.0
        coming = self.model.submit(compute, 0)
        for number in range(layout.layers):
            layer = coming.result()
            if number + 1 < layout.layers:
                coming = self.model.submit(compute, number + 1)
            if not layer:  # everything was found, and what is left fills no chunk
                continue
            write_started = time.perf_counter()
            self.store.put_many(layer)
            write_s += time.perf_counter() - write_started
            _send("layer", work="stores", layer=number, gb_per_s=gigabytes_per_s((number + 1) * layer_bytes, write_s))
        took_s, written_bytes = time.perf_counter() - started, layout.layers * layer_bytes
        return {
            "computed_tokens": computed_tokens,
            "simulated_compute_s": compute_s,
            "written_bytes": written_bytes,
            "write_s": write_s,
            "write_gb_per_s": gigabytes_per_s(written_bytes, write_s),
            "compute_and_write_s": took_s,  # from the first layer's start to the last block's commit
            "storing_added_s": max(0.0, took_s - compute_s),  # writes that hide behind compute are free
        }

    def _load(self, tokens: list[int], names: Sequence[bytes], may_miss: bool) -> Found:
        """Load and check the leading chunks of `names` that are completely stored.
        Memory: one layer of all found chunks.

        Raises `DemoError`, which names the block and the byte, if a byte is wrong or a
        held block is missing.
        """
        layout, keys = self.layout, block_keys(self.layout, names)
        try:
            match = self.store.match_prefix(keys, hold_s=60)  # at most: it is released once the prefix is loaded
        except LimitExceeded:
            # A server holds a part of its pool at most. An engine would compute what is
            # gone when it comes to load it; this demonstration reports it.
            match = self.store.match_prefix(keys)
        try:
            found = names[: int(match) // layout.layers]
            blocks, hit_tokens = len(found) * layout.layers, len(found) * layout.chunk_tokens
            disk_blocks = max(0, blocks - match.in_memory)
            _send("matched", tokens=len(tokens), hit_tokens=hit_tokens, blocks=blocks, disk_blocks=disk_blocks)
            # One buffer for all layers: its memory is touched once, and an engine loads
            # into pages it has, too.
            size, memory = layout.block_bytes, memoryview(bytearray(len(found) * layout.block_bytes))
            places = [memory[start : start + size] for start in range(0, len(memory), size)]
            load_s, loaded_bytes = 0.0, 0
            for number in range(layout.layers if found else 0):
                items = [(block_key(name, number), place) for name, place in zip(found, places, strict=True)]
                started = time.perf_counter()
                lengths = self.store.get_many_into(items)
                load_s += time.perf_counter() - started
                loaded_bytes += sum(length or 0 for length in lengths)
                _send("layer", work="loads", layer=number, gb_per_s=gigabytes_per_s(loaded_bytes, load_s))
                for chunk, (name, (key, block), length) in enumerate(zip(found, items, lengths, strict=True)):
                    if length is not None or not may_miss:
                        where = f"layer {number} of chunk {chunk} (key {key})"
                        _check(block_content(layout, name, number), None if length is None else block[:length], where)
        finally:
            if match.hold:
                self.store.release_hold(match.hold)
        return {
            "hit_tokens": hit_tokens,
            "loaded_bytes": loaded_bytes,
            "load_s": load_s,
            "load_gb_per_s": gigabytes_per_s(loaded_bytes, load_s),
            "saved_s": hit_tokens / self.tokens_per_s - load_s,
            "disk_blocks": disk_blocks,
        }


def _check(expected: bytes, block: memoryview | None, where: str) -> None:
    if block is None:
        raise DemoError(f"{where} was there a moment ago and is missing now")
    found = bytes(block)  # a memoryview is compared number by number, 20 times slower than this copy and a memcmp
    if found != expected:
        pairs = enumerate(zip(expected, found, strict=False))
        place = next((place for place, (one, other) in pairs if one != other), len(found))
        got = f"is {found[place]:#04x}" if place < len(found) else "is missing"
        raise DemoError(f"{where} is wrong: byte {place} {got} and should be {expected[place]:#04x}")


def main(title: str) -> None:
    """Be a worker until there are no more prompts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        setup = json.loads(sys.stdin.readline())
        with blocking.open_store(setup["url"]) as store:
            worker = Worker(title, store, KVLayout(**setup["layout"]), setup["tokens_per_s"])
            _send("ready", pid=os.getpid(), transport=store.stats().transport)
            for line in sys.stdin:
                _send("finished", **worker.work(**json.loads(line)))
    except (DemoError, InfiniStoreException) as error:
        _send("failed", message=" ".join(str(error).split()) or type(error).__name__)
        sys.stdin.read()  # until it is ended: that it ended would be another error


if __name__ == "__main__":
    main(sys.argv[1])
