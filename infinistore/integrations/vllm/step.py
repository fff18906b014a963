"""Messages from the connector's scheduler half to its workers, one per engine step."""

import attrs

__all__ = ["Load", "Save", "Step"]


@attrs.frozen
class Load:
    """Read these blocks for a request in the background; `hold` pins them until
    then.
    """

    request_id: str
    hashes: list[str]
    block_ids: list[int]
    hold: str = ""


@attrs.frozen
class Save:
    """Write these blocks of a request, which are full at the end of this step."""

    request_id: str
    hashes: list[str]
    block_ids: list[int]


@attrs.frozen
class Step:
    """One step: loads, saves, preempted requests, and whether anything is computed."""

    loads: list[Load] = attrs.field(factory=list)
    saves: list[Save] = attrs.field(factory=list)
    preempted: set[str] = attrs.field(factory=set)
    computes: bool = False
