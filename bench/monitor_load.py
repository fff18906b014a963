"""Load for a server that is watched: prefill and decode workers of two models, a
scheduler, and one that errs.

Threads of this process, each with a client of its own, bounded in what they do a second
and in how long they do it.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from infinistore import LimitExceeded, StoreUnavailable, blocking

MODELS = ("qwen2.5-7b", "llama-3.1-8b")
LAYERS = 28
BLOCK_BYTES = 64 * 1024
CHUNKS = 24
LONGEST_S = 600.0

Work = Callable[[blocking.BlockingStore, int], object]
newest = dict.fromkeys(MODELS, 0)
"""The last chunk that was written, by model."""


def chunk_keys(model: str, chunk: int) -> list[str]:
    return [f"{model}/tp{layer % 2}/{chunk:06x}-{layer:02}" for layer in range(LAYERS)]


def prefill(model: str) -> Work:
    block = bytes(range(256)) * (BLOCK_BYTES // 256)

    def work(store: blocking.BlockingStore, turn: int) -> object:
        skipped = store.put_many([(key, block) for key in chunk_keys(model, turn)])
        newest[model] = turn
        return skipped

    return work


def decode(model: str) -> Work:
    """Reads what is new, and now and then what was never there."""

    def work(store: blocking.BlockingStore, turn: int) -> object:
        chunk = newest[model] - turn % 11 if turn % 13 else newest[model] + 10_000
        return store.get_many(chunk_keys(model, max(0, chunk)))

    return work


def resume(store: blocking.BlockingStore, turn: int) -> object:
    """Reads what memory has had no room for since, if the server has a disk."""
    model = MODELS[turn % len(MODELS)]
    return store.get_many(chunk_keys(model, max(0, newest[model] - 150 - turn % 50)))


def schedule(store: blocking.BlockingStore, turn: int) -> object:
    model = MODELS[turn % len(MODELS)]
    last = newest[model]
    wanted = [key for chunk in range(max(0, last - CHUNKS), last) for key in chunk_keys(model, chunk)]
    match = store.match_prefix(wanted, hold_s=0.5 if turn % 20 == 0 else 0)
    return store.exists_many(wanted[:64]), match


def err(store: blocking.BlockingStore, turn: int) -> object:
    return store.match_prefix(chunk_keys(MODELS[0], turn), hold_s=1e6)  # longer than any server allows


WORKERS: tuple[tuple[str, Work, float], ...] = (
    *((f"prefill-{index}:{model}", prefill(model), 0.06) for index, model in enumerate(MODELS)),
    *((f"decode-{index}:{model}", decode(model), 0.02) for index, model in enumerate(MODELS)),
    ("scheduler", schedule, 0.02),
    ("experiment", err, 0.5),
)


RESUMING: tuple[str, Work, float] = ("resumed", resume, 0.1)
"""For servers with a disk."""


@contextmanager
def load(url: str, *, pace: float = 1.0, workers: Sequence[tuple[str, Work, float]] = WORKERS) -> Iterator[None]:
    """Load the server at `url` until the block is left. `pace` multiplies the pauses
    between two turns.
    """
    stop = threading.Event()
    end_s = time.monotonic() + LONGEST_S

    def worker(name: str, work: Work, pause_s: float) -> None:
        with contextlib.suppress(StoreUnavailable), blocking.open_store(url, name=name) as store:
            turn = 0
            # It rises and falls, as traffic does: between a half and one and a half of
            # the pause, twice a minute.
            while (
                not stop.wait(pause_s * pace * (1 + 0.5 * math.sin(time.monotonic() / 5))) and time.monotonic() < end_s
            ):
                with contextlib.suppress(LimitExceeded):
                    work(store, turn)
                turn += 1

    threads = [threading.Thread(target=worker, args=arguments) for arguments in workers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
