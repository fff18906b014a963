"""Another process with the GPU: its arguments are URL DEVICE ACT NAME.

It acts once: `write` stores blocks whose content follows from the name, `read` reads
them and compares; `loop` does both again and again, until it is killed.
"""

import sys

import torch

from infinistore import blocking
from infinistore.tensors import read_blocks, write_blocks

__all__ = ["BLOCK", "BLOCKS", "content", "named"]

BLOCK = 65_536
BLOCKS = 64


def content(name: str, device: torch.device) -> torch.Tensor:
    """The blocks of a name: [BLOCKS, BLOCK] of uint8."""
    made = torch.randint(0, 256, (BLOCKS, BLOCK), dtype=torch.uint8, generator=torch.Generator().manual_seed(len(name)))
    return (made + sum(name.encode()) % 251).to(device)


def named(name: str) -> list[tuple[str, int]]:
    """Every other block, so that they are scattered in the tensor."""
    return [(f"{name}/{number}", number * BLOCK) for number in range(0, BLOCKS, 2)]


def main() -> None:
    """Act. Prints `right` or `wrong` each time."""
    url, place, act, name = sys.argv[1:]
    device = torch.device(place)
    with blocking.open_store(url, inline_bytes=0) as store:
        tensor, back = content(name, device), torch.zeros(BLOCKS, BLOCK, dtype=torch.uint8, device=device)
        while True:
            if act != "read":
                write_blocks(store, named(name), BLOCK, tensor)
            if act != "write":
                read_blocks(store, named(name), BLOCK, back)
            right = act == "write" or torch.equal(back[::2], tensor[::2])
            sys.stdout.write("right\n" if right else "wrong\n")
            sys.stdout.flush()
            if act != "loop":
                return


if __name__ == "__main__":
    main()
