"""The states in the golden files, the same in each format. `record.py` runs this by
older code, too: names that are used here have to be there.
"""

from pathlib import Path

import xxhash

from infinistore.core.pool_state import (
    GroupLayout,
    GroupStates,
    HeldBlocks,
    PoolState,
    TenantState,
    encode_groups,
    encode_state,
)

__all__ = ["GOLDEN", "GROUPS", "POOL", "VALUES", "write"]

GOLDEN = Path(__file__).resolve().parent

_UNIT_BYTES = 64
VALUES = {f"prompt {n} \u00fc": f"block {n} ".encode() * (5 + 3 * n) for n in range(12)}
"""What was stored."""


def _state(arenas: list[int]) -> PoolState:
    entries = [
        (n % len(arenas), 5 * _UNIT_BYTES * n, len(value), xxhash.xxh3_64_intdigest(value))
        for n, value in enumerate(VALUES.values())
    ]
    return PoolState(
        instance="a run",
        allocator="bitmap",
        unit_bytes=_UNIT_BYTES,
        arenas=arenas,
        keys=list(VALUES),
        entries=entries,
        holds=[HeldBlocks(3, 1.5, [entries[2], entries[5]]), HeldBlocks(2**53 + 1, 60.25, [])],
        pins=[[entries[1], (0, 62 * _UNIT_BYTES, 100, 0)], [], [entries[8]]],
        ends=[(7, 3600.25), (0, 2.5)],
        protected=[4, 7],
    )


POOL = _state([4096, 8192])
GROUPS = GroupStates(
    [GroupLayout("a", [4096], True, ["ann"]), GroupLayout("b", [4096, 4096], False, None)],
    [TenantState("a", "ann", _state([4096])), TenantState("b", "cid", _state([4096, 4096]))],
    2,
)


def write(name: str) -> None:
    """Write both in the format of the code that runs."""
    (GOLDEN / f"pool-{name}.bin").write_bytes(b"".join(encode_state(POOL)))
    (GOLDEN / f"groups-{name}.bin").write_bytes(b"".join(encode_groups(GROUPS)))
