"""Messages from the connector's scheduler half to its workers, one per engine step."""

import attrs

__all__ = ["Blocks", "Load", "Save", "Step"]


@attrs.frozen
class Blocks:
    """Blocks of one group of layers: what they are called, and where they are."""

    hashes: list[str]
    block_ids: list[int]
    group: int = 0


@attrs.frozen
class Load:
    """Read these blocks for a request in the background."""

    request_id: str
    parts: list[Blocks]

    @property
    def block_ids(self) -> list[int]:
        """The blocks of all groups."""
        return [block_id for part in self.parts for block_id in part.block_ids]


@attrs.frozen
class Save:
    """Write these blocks of a request, which are full at the end of this step."""

    request_id: str
    blocks: Blocks
    number: int = 0
    """If it is not 0, workers say when they have written them."""


@attrs.frozen
class Step:
    """One step: loads, saves, preempted requests, whether anything is computed, and how
    often the cache was reset before.
    """

    loads: list[Load] = attrs.field(factory=list)
    saves: list[Save] = attrs.field(factory=list)
    preempted: set[str] = attrs.field(factory=set)
    computes: bool = False
    resets: int = 0
