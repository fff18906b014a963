"""The plan of an RDMA transfer: which bytes go in one work request, and which work
requests are posted together.

Pure arithmetic on addresses. A transfer is a list of `Piece`s, each one a work request.
Blocks that are adjacent both in the pool and at the client form one piece, up to the
longest message. Pieces are posted in batches. Only the last one of a batch asks for a
completion, and a `Window` keeps as many batches in flight as the queue has space for.

A piece has one local span. Gathering several spans into one request would save requests
where blocks are adjacent at the client only. But pyverbs cannot change the span list of
an existing request, and a new request costs 20 times as much.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import add
from typing import NamedTuple, TypeAlias

Piece: TypeAlias = tuple[int, int, int, int, int]
"""One work request: local address and key, remote address and key, length in bytes."""


class Placement(NamedTuple):
    """The blocks of a batch on one side: the address of each, and its memory's key."""

    addresses: Sequence[int]
    keys: Sequence[int]


def plan_transfer(local: Placement, remote: Placement, lengths: Sequence[int], *, longest_bytes: int) -> list[Piece]:
    """Return the work requests that move blocks of these lengths, in order.

    No piece is longer than `longest_bytes`. ValueError if the columns are not equally
    long.
    """
    count = len(lengths)
    if not count == len(local.addresses) == len(local.keys) == len(remote.addresses) == len(remote.keys):
        raise ValueError("every block needs an address and a key on both sides, and a length")
    if not count:
        return []
    pieces = _merge(local, remote, lengths)
    if max(piece[4] for piece in pieces) <= longest_bytes:
        return pieces
    return [part for piece in pieces for part in _split(piece, longest_bytes)]


def _merge(local: Placement, remote: Placement, lengths: Sequence[int]) -> list[Piece]:
    """Join blocks that touch on both sides and lie in the same memory there."""
    here, there = list(local.addresses), list(remote.addresses)
    local_keys, remote_keys = list(local.keys), list(remote.keys)
    here_ends, there_ends = list(map(add, here, lengths)), list(map(add, there, lengths))
    one_memory = local_keys.count(local_keys[0]) == remote_keys.count(remote_keys[0]) == len(here)
    if one_memory and here[1:] == here_ends[:-1] and there[1:] == there_ends[:-1]:  # at C speed, the most common case
        return [(here[0], local_keys[0], there[0], remote_keys[0], here_ends[-1] - here[0])]
    firsts = [
        i
        for i in range(1, len(here))
        if here[i] != here_ends[i - 1]
        or there[i] != there_ends[i - 1]
        or local_keys[i] != local_keys[i - 1]
        or remote_keys[i] != remote_keys[i - 1]
    ]
    return [
        (here[i], local_keys[i], there[i], remote_keys[i], here_ends[j - 1] - here[i])
        for i, j in pairwise([0, *firsts, len(here)])
    ]


def _split(piece: Piece, longest_bytes: int) -> Iterable[Piece]:
    here, local_key, there, remote_key, length = piece
    for start in range(0, length, longest_bytes):
        yield here + start, local_key, there + start, remote_key, min(longest_bytes, length - start)


class Window:
    """The pieces of one transfer on their way through a queue of bounded depth.

    `next_batch` returns what may be posted now. `complete` notes that the oldest batch,
    and so all of its pieces, is done. Completions of a reliable connection arrive in
    order.
    """

    def __init__(self, pieces: Sequence[Piece], *, depth: int, batch: int) -> None:
        if not 0 < batch <= depth:
            raise ValueError(f"a batch of {batch} work requests does not fit a queue of {depth}")
        self._pieces = pieces
        self._depth = depth
        self._batch = batch
        self._next = 0
        self._flying: deque[int] = deque()
        self.in_flight = 0
        """How many work requests are posted and not known to be complete."""

    @property
    def done(self) -> bool:
        """Whether every piece has been posted and completed."""
        return self._next == len(self._pieces) and not self._flying

    def next_batch(self) -> Sequence[Piece]:
        """Return the pieces to post now as one batch; none if it has to wait."""
        count = min(self._batch, len(self._pieces) - self._next)
        if not count or self.in_flight + count > self._depth:
            return ()
        batch = self._pieces[self._next : self._next + count]
        self._next += count
        self.in_flight += count
        self._flying.append(count)
        return batch

    def complete(self) -> None:
        """Note that the oldest batch in flight is done."""
        self.in_flight -= self._flying.popleft()
