"""Blocks between a GPU and a store's pool, against a plain copy between the GPU and
pinned memory.

    python bench/cuda_copies.py [--quick] [--json]

16 MiB at a time, in blocks of 16 KiB to 1 MiB: neighbours in the tensor, and every
other one. The store is embedded, so that its pool is in this process as that of a
server on the same host would be; checksums are off, and once on. The yardstick copies
the same bytes as one piece. Ratios are rates: store / plain copy, 1.0 is as fast. Needs
a GPU.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial

import torch

from infinistore.blocking import BlockingStore, open_store
from infinistore.tensors import read_blocks, write_blocks
from rounds import interleaved

KIB, MIB = 1024, 1024 * 1024
BATCH_BYTES = 16 * MIB
POOL_BYTES = 1024 * MIB


def blocking_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between pinned memory and the GPU, and wait for it."""
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()


def measure(store: BlockingStore, block_bytes: int, step: int, rounds: int) -> dict[str, float]:
    """Measure one size of blocks, `step` blocks apart; return the ratios of writing and
    reading.
    """
    tensor = torch.randint(0, 256, (step * BATCH_BYTES,), dtype=torch.uint8, device="cuda")
    plain = torch.empty(BATCH_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = tensor[:BATCH_BYTES].clone()
    offsets = range(0, tensor.numel(), step * block_bytes)
    turns = POOL_BYTES // 2 // BATCH_BYTES
    turn = 0

    def each(call: Callable[..., None]) -> None:
        nonlocal turn
        turn = (turn + 1) % turns
        call(store, [(f"{turn}/{offset}", offset) for offset in offsets], block_bytes, tensor)

    for _ in range(turns):  # every page of the pool is touched, and pinned
        each(write_blocks)
    medians = interleaved(
        {
            "plain write": partial(blocking_copy, plain, on_device),
            "write": partial(each, write_blocks),
            "plain read": partial(blocking_copy, on_device, plain),
            "read": partial(each, read_blocks),
        },
        rounds=rounds,
        calls=4,
    )
    return {kind: medians[f"plain {kind}"] / medians[kind] for kind in ("write", "read")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("{}" if arguments.json else "there is no GPU here: nothing was measured")
        return
    rounds = 5 if arguments.quick else 25
    results: dict[str, float] = {}
    for verify in ("never", "always"):
        with open_store(pool_bytes=POOL_BYTES, minimal_allocate_bytes=16 * KIB, verify=verify) as store:
            for block_bytes in (16 * KIB, 64 * KIB, 256 * KIB, MIB):
                for step, where in ((1, "neighbours"), (2, "scattered")):
                    for kind, ratio in measure(store, block_bytes, step, rounds).items():
                        checked = ", checked" if verify == "always" else ""
                        results[f"{kind} {block_bytes // KIB} KiB, {where}{checked} / plain copy"] = ratio
                    store.purge()
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        for name, value in results.items():
            print(f"{name:55} {value:8.2f}")


if __name__ == "__main__":
    main()
