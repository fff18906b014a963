"""What storing a prompt's KV cache layer by layer costs the computation: a
transformer's prefill step on the CPU.

    python bench/layer_writer.py [--quick] [--json] [--hidden N] [--tokens N] [--layers N] [--kv-heads N]

A few layers of a Llama-like model (random weights, float32, two torch threads) compute
a prompt's chunk over and over. Each layer's keys and values go into a paged cache,
blocks of 16 tokens, and a `LayerWriter` stores them while the next layer computes.
There are two caches that take turns, so that a step does not wait for the writes of the
one before; the time of the steps includes waiting for a cache to be free, and for the
last write. The server, where there is one, runs on the same cores.

The ratio is time: with writing / without, in turns; 1.05 would be 5 % slower. One step
takes as long as the machine lets it, so each round has two without, and what is
compared is the time with writing and the mean of those two. Printed is the median of
the rounds, with the quartiles: half of the rounds are between them. Of the two without,
it is the one against the other, which shows what the machine alone does. With
OMP_WAIT_POLICY=passive in the environment, threads that wait for each other sleep. Then
a busy machine distorts less, and there is another ratio, of the processor time of this
process, which others hardly change.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from infinistore.blocking import BlockingStore, open_store
from infinistore.tensors import LayerWriter, Ticket, write_blocks
from one_server import serving
from rounds import interleaved_times

MIB = 1024 * 1024
POOL_BYTES = 512 * MIB
BLOCK_TOKENS = 16
HEAD_DIM = 64


class Layer:
    """One layer: attention, where heads may share keys and values, and a gated
    feed-forward part.
    """

    def __init__(self, hidden: int, kv_heads: int) -> None:
        def weights(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns).mul_(columns**-0.5)

        self._heads, self._kv_heads = hidden // HEAD_DIM, kv_heads
        self._query, self._output = weights(hidden, hidden), weights(hidden, hidden)
        self._key_value = weights(2 * kv_heads * HEAD_DIM, hidden)
        wide = hidden * 11 // 4
        self._gate, self._up, self._down = weights(wide, hidden), weights(wide, hidden), weights(hidden, wide)

    def attend(self, states: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """The attention part; the keys and values are left in `cache`: (2, tokens, kv
        heads, head dimension).
        """
        tokens = len(states)
        normal = functional.rms_norm(states, states.shape[1:])
        query = (normal @ self._query.T).view(tokens, self._heads, HEAD_DIM).transpose(0, 1)
        cache.copy_((normal @ self._key_value.T).view(tokens, 2, self._kv_heads, HEAD_DIM).transpose(0, 1))
        key, value = cache.transpose(1, 2).repeat_interleave(self._heads // self._kv_heads, dim=1)
        mixed = functional.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)[0]
        return states + mixed.transpose(0, 1).reshape(tokens, -1) @ self._output.T

    def feed_forward(self, states: torch.Tensor) -> torch.Tensor:
        normal = functional.rms_norm(states, states.shape[1:])
        return states + (functional.silu(normal @ self._gate.T) * (normal @ self._up.T)) @ self._down.T


class Prefill:
    """Steps of a prefill worker. With a writer, each layer's cache is stored while the
    rest is computed.
    """

    def __init__(self, layers: list[Layer], hidden: int, tokens: int, kv_heads: int, steps: int) -> None:
        self._layers = layers
        self._steps = steps
        self._states = torch.randn(tokens, hidden)
        self._caches = [[torch.zeros(2, tokens, kv_heads, HEAD_DIM) for _ in layers] for _ in range(2)]
        self.layer_bytes = self._caches[0][0].nbytes
        self._block_bytes = BLOCK_TOKENS * kv_heads * HEAD_DIM * 4
        self._prompts = max(1, POOL_BYTES // 2 // (self.layer_bytes * len(layers)))  # half of the pool is in use
        self._prompt = 0
        self.waited = 0

    def fill(self, store: BlockingStore) -> None:
        """Store every block that will be stored, so that no page of the pool is touched
        for the first time later.
        """
        for _ in range(self._prompts):
            self._prompt = (self._prompt + 1) % self._prompts
            for number, cache in enumerate(self._caches[0]):
                write_blocks(store, self._blocks(number), self._block_bytes, cache)

    def run(self, writer: LayerWriter | None) -> None:
        """Compute as many steps as were asked for; with a writer, end when everything
        is stored.
        """
        busy: list[list[Ticket]] = [[], []]
        for step in range(self._steps):
            for ticket in busy[step % 2]:
                self.waited += not ticket.done
                ticket.wait()
            busy[step % 2] = self._step(self._caches[step % 2], writer)
        if writer is not None:
            writer.flush()

    @torch.inference_mode()
    def _step(self, caches: list[torch.Tensor], writer: LayerWriter | None) -> list[Ticket]:
        tickets: list[Ticket] = []
        states = self._states
        self._prompt = (self._prompt + 1) % self._prompts
        for number, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            states = layer.attend(states, cache)
            if writer is not None:
                tickets.append(writer.write(cache, self._blocks(number), self._block_bytes))
            states = layer.feed_forward(states)
        return tickets

    def _blocks(self, layer: int) -> list[tuple[str, int]]:
        offsets = range(0, self.layer_bytes, self._block_bytes)
        return [(f"bench/{self._prompt}/L{layer}/{offset}", offset) for offset in offsets]


@contextmanager
def server() -> Iterator[dict[str, str]]:
    """Start a server; give its URLs, by the name of the path."""
    flags = ["--manage-port", "off", "--log-level", "warning", "--prealloc-size", f"{POOL_BYTES // MIB}MiB"]
    flags += ["--minimal-allocate-size", "16", "--spin-time", "0"]  # as its clients
    with serving(*flags) as address:
        yield {"shm": f"shm://{address}", "tcp": f"tcp://{address}"}


@contextmanager
def stores() -> Iterator[dict[str, BlockingStore]]:
    """A store of each kind."""
    with ExitStack() as stack:
        opened = {"embedded": stack.enter_context(open_store(pool_bytes=POOL_BYTES, minimal_allocate_bytes=16384))}
        for name, url in stack.enter_context(server()).items():
            # Waiting awake for a quick server, or copying with two threads, takes a
            # core from the computation.
            opened[name] = stack.enter_context(open_store(url, spin_us=0, copy_threads=1))
        yield opened


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds; return the figures."""
    torch.set_num_threads(2)
    layers = [Layer(arguments.hidden, arguments.kv_heads) for _ in range(arguments.layers)]
    prefill = Prefill(layers, arguments.hidden, arguments.tokens, arguments.kv_heads, arguments.steps)
    results: dict[str, Any] = {}
    with stores() as opened, ExitStack() as stack:
        writers = {name: stack.enter_context(LayerWriter(store, nice=arguments.nice)) for name, store in opened.items()}
        for store in opened.values():
            prefill.fill(store)
        processor_s: dict[str, list[float]] = {}  # with those of the rounds that warm up

        def run(name: str, writer: LayerWriter | None) -> None:
            started_s = time.process_time()
            prefill.run(writer)
            processor_s.setdefault(name, []).append(time.process_time() - started_s)

        kinds: dict[str, LayerWriter | None] = {"without": None, "without, again": None, **writers}
        things: dict[str, Callable[[], object]] = {name: partial(run, name, w) for name, w in kinds.items()}
        times = interleaved_times(things, rounds=arguments.rounds, calls=1)
        step_s = statistics.median(times["without"]) / arguments.steps
        results["step, ms"] = step_s * 1e3
        results["stored a step, MiB"] = prefill.layer_bytes * len(layers) / MIB
        results["stored meanwhile, MB/s"] = prefill.layer_bytes * len(layers) / step_s / 1e6
        for name in list(kinds)[1:]:
            found = quartiles(times, name)
            for which, ratio in zip(("", ", lower quartile", ", upper quartile"), found, strict=True):
                results[f"{name} / without{which}"] = ratio
            if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive":
                results[f"{name} / without, processor time"] = quartiles(processor_s, name)[0]
        for name, writer in writers.items():
            counted = writer.statistics()
            results[f"{name}: writes in one put"] = counted.stored_writes / counted.puts
        results["steps that waited for a write"] = prefill.waited
    return results


def quartiles(times: dict[str, list[float]], name: str) -> tuple[float, float, float]:
    """The median, and the lower and the upper quartile, of how long one took in each
    round / without.
    """
    first, second = times["without"], times["without, again"]
    without = first if name == "without, again" else [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    lower, middle, upper = statistics.quantiles([a / b for a, b in zip(times[name], without, strict=True)], n=4)
    return middle, lower, upper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--hidden", type=int, default=768, help="width of the model (768)")
    parser.add_argument("--tokens", type=int, default=128, help="of the prompt's chunk (128)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (4)")
    parser.add_argument("--kv-heads", type=int, default=12, help="of its heads of 64, those with keys and values (12)")
    parser.add_argument("--steps", type=int, default=4, help="in a round (4)")
    parser.add_argument("--rounds", type=int, default=0, help="how many")
    parser.add_argument("--nice", type=int, default=10, help="of the writer's thread (10)")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (5 if arguments.quick else 61)
    results = measure(arguments)
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        for name, value in results.items():
            print(f"{name:45} {value:8.3f}")


if __name__ == "__main__":
    main()
