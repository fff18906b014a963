"""What compression on disk gives and costs.

    python bench/disk_compression.py [--folder PATH] [--data FILE] [--rounds N]

First the function itself in one thread: how many times fewer pages a block takes, and
its rates in and out. Then a store with a disk, compressed beside raw, interleaved, each
round in another order: writing until durable, and reading back, verified. Reported are
medians of the rounds, and of the ratios to the raw disk in the same round.

Without `--data`, blocks are numbers of bfloat16 as a normal distribution has them, with
another scale for each 64 of them. Real values are a file of them, at least 4 MiB.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from disk import Tier, in_turns
from infinistore.disk.compression import compress, decompress
from infinistore.disk.jobs import aligned
from infinistore.sizes import KIB, MIB

SIZES = (12 * KIB, 48 * KIB, 360 * KIB, MIB)
ROUND_BYTES = 16 * MIB
CONTENT_BYTES = 4 * MIB


def numbers(count_bytes: int) -> bytes:
    """Return bytes of bfloat16 numbers."""
    chance = np.random.default_rng(1)
    count = count_bytes // 2
    scales = np.repeat(chance.lognormal(0, 1, count // 64), 64)
    wide = (chance.standard_normal(count) * scales).astype(np.float32).view(np.uint32)
    return (wide >> np.uint32(16)).astype(np.uint16).tobytes()


def measure(block: memoryview) -> tuple[float, float, float]:
    """Return how many times fewer pages a block takes, and bytes a second in and out."""
    calls = max(1, ROUND_BYTES // len(block))
    packed = compress(block)
    start = time.thread_time()
    for _ in range(calls):
        compress(block)
    packing_s = (time.thread_time() - start) / calls
    if packed is None:
        return 1.0, len(block) / packing_s, float("inf")
    data, into = memoryview(packed), memoryview(bytearray(len(block)))
    start = time.thread_time()
    for _ in range(calls):
        decompress(data, into)
    ratio = aligned(len(block)) / aligned(len(packed))
    return ratio, len(block) / packing_s, len(block) / ((time.thread_time() - start) / calls)


def main() -> None:
    """Measure, and print tables."""
    arguments = parse()
    content = numbers(CONTENT_BYTES) if arguments.data is None else arguments.data.read_bytes()[:CONTENT_BYTES]
    print(f"{'a block of':<14}{'pages':>10}{'in, GB/s':>12}{'out, GB/s':>12}")
    for size in SIZES:
        starts = range(0, len(content) - size + 1, size)
        found = [measure(memoryview(content)[start : start + size]) for start in starts][: arguments.rounds]
        ratio, into, out = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{size // KIB:>6} KiB{ratio:>14.2f}{into / 1e9:>12.2f}{out / 1e9:>12.2f}")
    with tempfile.TemporaryDirectory(prefix="infinistore-bench-", dir=arguments.folder) as folder:
        size_bytes = arguments.size_mib * MIB
        raw = Tier(Path(folder, "raw"), size_bytes, content)
        packed = Tier(Path(folder, "packed"), size_bytes, content, compress=True)
        things: dict[str, Callable[[], float]] = {}
        for block_bytes in (MIB, 256 * KIB):
            for name, tier in (("raw", raw), ("compressed", packed)):
                things[f"write {block_bytes // KIB} KiB: {name}"] = partial(tier.write, block_bytes)
                things[f"read {block_bytes // KIB} KiB: {name}"] = partial(tier.read, block_bytes)
        rates = in_turns(things, arguments.rounds)
        for tier in (raw, packed):
            tier.close()
    print(f"\n{'':<28}{'GB/s':>8}{'of raw':>10}{'from':>8}{'to':>8}")
    for name, of_one in rates.items():
        ratios = [one / other for one, other in zip(of_one, rates[f"{name.partition(':')[0]}: raw"], strict=True)]
        rate, ratio = statistics.median(of_one), statistics.median(ratios)
        print(f"{name:<28}{rate / 1e9:>8.2f}{ratio:>10.2f}{min(ratios):>8.2f}{max(ratios):>8.2f}")


def parse() -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure")
    parser.add_argument("--data", type=Path, help="a file of numbers of 16 bits; default: made ones")
    parser.add_argument("--size-mib", type=int, default=256, help="a multiple of 32; default: 256")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
