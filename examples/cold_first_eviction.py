"""The eviction strategy of `docs/add-an-allocator.md`: a new block is the next to leave,
unless it is used before.

So what is used stays, however many blocks are put once (LIP, Qureshi et al., ISCA 2007).
What is used no more stays for long, too.
"""

import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from infinistore.eviction import Eviction

__all__ = ["ColdFirst"]


class ColdFirst(Eviction):
    """New keys at the cold end, used ones at the warm end."""

    name: ClassVar[str] = "cold-first"

    def insert(self, keys: Sequence[str], entries: Sequence[Any]) -> None:
        """Add keys; the last of them is the first to go."""
        new = [key for key in keys if key not in self.order]
        super().insert(keys, entries)
        for key in new:
            self.order.move_to_end(key, last=False)


if __name__ == "__main__":
    try:
        from infinistore.eviction.contract import ContractViolation, EvictionContract
    except ImportError:
        sys.exit("the contract of strategies needs Hypothesis: pip install hypothesis")

    class Suite(EvictionContract):
        """In a test file this would be `TestColdFirst`, and pytest would run it."""

        eviction = ColdFirst

    try:
        Suite().test_calls_in_any_order_keep_the_contract()
        Suite().test_it_keeps_little_for_each_key()
    except ContractViolation as broken:
        print(f"the contract is broken: {broken}")
    else:
        print("cold-first keeps the contract")
