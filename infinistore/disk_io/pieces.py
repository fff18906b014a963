"""Transfers cut into pieces that several threads of a disk carry out at a time.

A disk needs several requests at a time to give what it can, and large ones, because
each costs some Python. A piece has up to `PIECE_BYTES`: whole neighbouring blocks as a
rule, which one call of the kernel gathers. A block that is larger is cut.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import attrs
from xxhash import xxh3_64_intdigest

from infinistore.disk.jobs import ReadInto, Result, Write, aligned
from infinistore.sizes import MIB

__all__ = ["PIECE_BYTES", "Piece", "Transfer"]

PIECE_BYTES: Final = 2 * MIB
_MAX_VIEWS: Final = 512
"""In a piece: half of IOV_MAX (1,024), because a view may take two vectors."""


class Transfer:
    """A read or write under way: what its pieces have done so far.

    Who calls `finish` sees to it that one thread does at a time.
    """

    def __init__(self, job: ReadInto | Write, piece_bytes: int) -> None:
        self.job = job
        self.checksums = [0] * len(job.hash_lengths) if isinstance(job, ReadInto) else []
        self.pieces = list(_cut(self, job, piece_bytes))
        self._left = len(self.pieces)
        self._errno = 0
        self._transferred_bytes = 0
        self._piece_bytes = piece_bytes

    def finish(self, errno: int, transferred_bytes: int) -> bool:
        """Count a piece as done; return whether it was the last one."""
        self._errno = self._errno or errno
        self._transferred_bytes += transferred_bytes
        self._left -= 1
        return not self._left

    def result(self) -> Result:
        """Return the result, after the last piece. It hashes blocks that were cut."""
        if self.checksums and not self._errno:
            self._hash_cut_blocks()
        return Result(self.job, self._errno, self._transferred_bytes, self.checksums)

    def _hash_cut_blocks(self) -> None:
        assert isinstance(self.job, ReadInto)
        start = 0
        for number, (view, length) in enumerate(zip(self.job.views, self.job.hash_lengths, strict=True)):
            if len(view) > self._piece_bytes and start + len(view) <= self._transferred_bytes:
                self.checksums[number] = xxh3_64_intdigest(view[:length])
            start += aligned(len(view))


@attrs.frozen(eq=False)
class Piece:
    """A part of a transfer: neighbouring views from `offset` of the file on.

    `first` is the number of its first view in the job, or None for a part of a view.
    """

    transfer: Transfer
    offset: int
    views: Sequence[memoryview]
    length_bytes: int
    first: int | None

    def hash_blocks(self, transferred_bytes: int) -> None:
        """After a read: hash the whole views that were read in full, if that is asked
        for.
        """
        job = self.transfer.job
        if self.first is None or not self.transfer.checksums:
            return
        assert isinstance(job, ReadInto)
        start = 0
        for number, view in enumerate(self.views, self.first):
            if start + len(view) <= transferred_bytes:
                self.transfer.checksums[number] = xxh3_64_intdigest(view[: job.hash_lengths[number]])
            start += aligned(len(view))


def _cut(transfer: Transfer, job: ReadInto | Write, piece_bytes: int) -> Iterator[Piece]:
    """Yield the pieces of a job, at least one, in the order of the file."""
    offset, gathered_bytes, first = job.offset, 0, 0
    for number, view in enumerate(job.views):
        length = aligned(len(view))
        if number > first and (gathered_bytes + length > piece_bytes or number - first == _MAX_VIEWS):
            yield Piece(transfer, offset, job.views[first:number], gathered_bytes, first)
            offset, gathered_bytes, first = offset + gathered_bytes, 0, number
        if len(view) > piece_bytes:
            for start in range(0, len(view), piece_bytes):
                part = view[start : start + piece_bytes]
                yield Piece(transfer, offset + start, [part], aligned(len(part)), None)
            offset, first = offset + length, number + 1
        else:
            gathered_bytes += length
    if first < len(job.views) or not job.views:
        yield Piece(transfer, offset, job.views[first:], gathered_bytes, first)
