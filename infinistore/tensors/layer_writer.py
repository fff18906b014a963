"""`LayerWriter`: store a prompt's KV cache layer by layer, each layer while the next is being computed."""

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import attrs

from infinistore.blocking import BlockingStore
from infinistore.errors import DeadlineExceeded, StoreUnavailable
from infinistore.tensors.background import Background, Job
from infinistore.tensors.devices import Staging, Transfer, make_transfer
from infinistore.tensors.tensor_blocks import Blocks, blocks_to_write
from infinistore.tensors.transfers import put_blocks

if TYPE_CHECKING:
    import torch

__all__ = ["LayerWriter", "LayerWriterStatistics", "Ticket"]

_MAX_BATCH_BYTES = 16 * 1024 * 1024


@attrs.frozen(kw_only=True)
class LayerWriterStatistics:
    """What a writer has done so far."""

    pending_writes: int
    pending_bytes: int
    stored_writes: int
    stored_bytes: int
    failed_writes: int
    dropped_writes: int
    dropped_bytes: int
    puts: int
    """How many batches the writes were put in: fewer than the writes, when several waited."""


class Ticket(Job):
    """What became of one write. Until it is `done`, the blocks' part of the tensor must not change."""

    def __init__(self, writer: "LayerWriter", transfer: Transfer) -> None:
        super().__init__(transfer.blocks.total_bytes)
        self.dropped = False
        self.transfer: Transfer | None = transfer
        self._writer = writer

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the blocks are stored. False if the write was dropped because the writer was full.

        Raises:
            DeadlineExceeded: not within `timeout_s` seconds; the write goes on.
            OutOfMemory, ValueTooLarge, LimitExceeded: why they are not stored.
            StoreUnavailable, DeadlineExceeded: they may be stored, or not.
        """
        self._writer._background.wait(self, timeout_s)
        if self.error is not None:
            self._writer._told(self.error)
            raise self.error
        return not self.dropped


class LayerWriter:
    """Stores blocks of tensors in a thread of its own, beside the computation: `with LayerWriter(store) as writer`.

    `write` returns at once with a ticket; `flush` waits for everything. Writes are stored in their order, several of
    them in one batch when they wait. An error is raised by the ticket's `wait`; if nobody waits there, once by the next
    `write` or `flush`. The writer goes on with the writes after it. Leaving the block waits for everything, and raises
    what `flush` would; leaving it by an exception gives up what was not begun. Any thread may write.

    Args:
        store: a blocking store, which must stay open longer than the writer.
        max_pending_bytes: how many bytes may wait; the tensors are not copied, so this much of them must not change.
        when_full: at that bound, "block" waits in `write`, "drop" leaves the write out and counts it.
        deadline_s: how long `write` waits for room, in seconds.
        nice: how far the thread stands back for the computation, 0 (not) to 19, as nice(1) counts.
        linger_s: how long less than 4 MiB wait for more to go into one put with, in seconds. Each put takes a part of
            its time from the computation whatever its size. Who waits for a write ends that.
    """

    def __init__(
        self,
        store: BlockingStore,
        *,
        max_pending_bytes: int = 256 * 1024 * 1024,
        when_full: Literal["block", "drop"] = "block",
        deadline_s: float = 30.0,
        nice: int = 10,
        linger_s: float = 0.05,
    ) -> None:
        if not isinstance(store, BlockingStore):
            raise TypeError(
                f"a LayerWriter needs a store of infinistore.blocking.open_store, not {type(store).__name__}"
            )
        if when_full not in ("block", "drop"):
            raise ValueError(f"when_full must be 'block' or 'drop', not {when_full!r}")
        if not deadline_s > 0:
            raise ValueError(f"deadline_s must be a number of seconds above 0, not {deadline_s!r}")
        self._store = store
        self._staging = Staging(store)
        self._block = when_full == "block"
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._unreported: Exception | None = None
        self._stored_writes = self._stored_bytes = self._failed_writes = self._puts = 0
        self._dropped_writes = self._dropped_bytes = 0
        self._background = Background(
            self._store_batch,
            name="layer-writer",
            max_pending_bytes=max_pending_bytes,
            max_batch_bytes=_MAX_BATCH_BYTES,
            nice=nice,
            linger_s=linger_s,
            belongs=_no_key_twice,
        )

    def __enter__(self) -> Self:
        self._background.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(drain=kind is None)
        if kind is None:
            self._report()

    def close(self) -> None:
        """Leave the block, for those who cannot use `with`; idempotent. Waits for all writes; raises as `flush`."""
        self._close(drain=True)
        self._report()

    def write(self, tensor: "torch.Tensor", blocks: Blocks, block_size_bytes: int) -> Ticket:
        """Store blocks of a tensor, soon. The arguments are those of `write_blocks`; returns at once.

        The blocks' part of the tensor must not change before the ticket is done. (The tensor is kept alive.)

        Raises:
            DeadlineExceeded: the writer was full for `deadline_s`. Nothing of this write is stored.
            ValueError, TypeError: as of `write_blocks`, or more bytes than `max_pending_bytes`. Nothing is stored.
            OutOfMemory, StoreUnavailable and others: an earlier write failed, and nobody was told yet. Nothing of this
                write is stored; call again to go on.
        """
        self._report()
        ticket = Ticket(self, make_transfer(self._store, blocks_to_write(tensor, blocks, block_size_bytes)))
        if not self._background.submit(ticket, wait=self._block, timeout_s=self._deadline_s):
            ticket.dropped = ticket.done = True
            ticket.transfer = None
            with self._lock:
                self._dropped_writes += 1
                self._dropped_bytes += ticket.total_bytes
        return ticket

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything that was written before is stored.

        Raises:
            DeadlineExceeded: not within `timeout_s` seconds; the writes go on.
            OutOfMemory, StoreUnavailable and others: a write failed, and nobody was told yet.
        """
        self._background.flush(timeout_s)
        self._report()

    def statistics(self) -> LayerWriterStatistics:
        """Tell what was done so far."""
        background = self._background
        return LayerWriterStatistics(
            pending_writes=background.submitted - background.completed,
            pending_bytes=background.pending_bytes,
            stored_writes=self._stored_writes,
            stored_bytes=self._stored_bytes,
            failed_writes=self._failed_writes,
            dropped_writes=self._dropped_writes,
            dropped_bytes=self._dropped_bytes,
            puts=self._puts,
        )

    def _close(self, *, drain: bool) -> None:
        self._background.close(drain=drain)
        self._staging.close()

    def _report(self) -> None:
        """Raise an error that nobody was told of."""
        with self._lock:
            error, self._unreported = self._unreported, None
        if error is not None:
            raise error

    def _told(self, error: Exception) -> None:
        with self._lock:
            if self._unreported is error:
                self._unreported = None

    def _store_batch(self, tickets: list[Ticket]) -> None:
        """In the thread: store what waits, in one put; if the store refuses that, each write by itself."""
        try:
            self._put(tickets)
        except (StoreUnavailable, DeadlineExceeded) as error:
            self._failed(tickets, error)
        except Exception as error:  # noqa: BLE001 - it is raised where the write's owner looks
            if len(tickets) == 1:
                self._failed(tickets, error)
            else:
                for ticket in tickets:
                    self._store_batch([ticket])

    def _put(self, tickets: list[Ticket]) -> None:
        put_blocks(self._store, [ticket.transfer for ticket in tickets if ticket.transfer is not None], self._staging)
        self._puts += 1
        for ticket in tickets:
            ticket.transfer = None  # the tensor may go
            self._stored_writes += 1
            self._stored_bytes += ticket.total_bytes

    def _failed(self, tickets: list[Ticket], error: Exception) -> None:
        for ticket in tickets:
            ticket.transfer = None
            ticket.fail(error)
            self._failed_writes += 1
        with self._lock:
            self._unreported = self._unreported or error


def _no_key_twice(batch: list[Ticket], ticket: Ticket) -> bool:
    """A put has each key once; a later write of the same key goes into the next one, and wins."""
    assert ticket.transfer is not None
    keys = set(ticket.transfer.blocks.keys)
    return all(other.transfer is None or keys.isdisjoint(other.transfer.blocks.keys) for other in batch)
