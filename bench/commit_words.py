"""Puts by shared memory that their client makes visible by itself, against puts that
end with a message.

    python bench/commit_words.py [--quick]

One blocking client, one server, blocks of 64 KiB. The same store puts the same batches
both ways, interleaved. `message` is what a put was before there were commit words: it
asks for room (a batch of 1 MiB and more did so with the put before), copies, and
commits by a message.

A ratio is a rate, commit word / message: above 1.0 the commit word is faster. It is the
median of paired rounds; the interval has 95 % of 2,000 bootstrap samples of it.
"""

import argparse
import random
import statistics
from collections.abc import Callable
from unittest import mock

from infinistore.blocking import BlockingStore, open_store
from infinistore.client.movers.shm.known_blocks import KnownReads
from local import KIB, MIB, POOL_BYTES, Blocks, server
from rounds import interleaved_times, taking_turns

BLOCK_BYTES = 64 * KIB
COUNTS = (2, 4, 8, 16, 64)
STORED_BYTES = POOL_BYTES // 2


def batches(count: int) -> list[list[tuple[str, memoryview]]]:
    """Return batches of so many blocks that make up half of the pool."""
    views = Blocks(128 * MIB, BLOCK_BYTES).views
    firsts = range(0, STORED_BYTES // BLOCK_BYTES, count)
    return [[(f"block/{i:06d}", views[i % len(views)]) for i in range(first, first + count)] for first in firsts]


def ways(store: BlockingStore, count: int) -> dict[str, Callable[[], object]]:
    """Return a put of a batch in each of the two ways."""
    by_word, by_message = (taking_turns(store.put_many, batches(count)) for _ in range(2))

    def without() -> None:
        with mock.patch.object(KnownReads, "can_commit", return_value=False):
            by_message()

    return {"commit word": by_word, "message": without}


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return between what the median of these lies, in 95 % of the samples of them."""
    generator = random.Random(1)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


def main() -> None:
    """Run, and print a line for each shape and verify."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 5 if parser.parse_args().quick else 41
    with server() as url:
        for verify in ("always", "never"):
            for count in COUNTS:
                with open_store(f"{url}?verify={verify}") as store:
                    for batch in batches(count):
                        store.put_many(batch)
                    times = interleaved_times(ways(store, count), rounds=rounds, calls=2048 // count)
                    store.purge()
                medians = {name: statistics.median(of_one) for name, of_one in times.items()}
                line = f"put {count:2} x 64 KiB, verify={verify}: {medians['commit word'] * 1e6:6.0f} us"
                ratios = [other / word for word, other in zip(times["commit word"], times["message"], strict=True)]
                low, high = interval(ratios)
                print(
                    f"{line}; commit word / message {statistics.median(ratios):5.2f} ({low:.2f} to {high:.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
