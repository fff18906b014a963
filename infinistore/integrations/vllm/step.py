"""What the scheduler's half of the connector tells the workers' halves about one step of the engine."""

import attrs

__all__ = ["Load", "Save", "Step"]


@attrs.frozen
class Load:
    """Read these blocks for a request, in the background. `hold` keeps them in the store until they are read."""

    request_id: str
    hashes: list[str]
    block_ids: list[int]
    hold: str = ""


@attrs.frozen
class Save:
    """Write these blocks of a request: they are full when this step is over."""

    request_id: str
    hashes: list[str]
    block_ids: list[int]


@attrs.frozen
class Step:
    """One step: what to read and write, whose blocks are about to be taken away, and whether anything is computed."""

    loads: list[Load] = attrs.field(factory=list)
    saves: list[Save] = attrs.field(factory=list)
    preempted: set[str] = attrs.field(factory=set)
    computes: bool = False
