"""`LayerWriter`: stores a prompt's KV cache layer by layer, during computation."""

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import attrs

from infinistore.blocking import BlockingStore
from infinistore.errors import DeadlineExceeded, StoreUnavailable
from infinistore.kept_errors import KeptError
from infinistore.tensors.background import Background, Job
from infinistore.tensors.blocking_transfers import put_blocks
from infinistore.tensors.devices import Staging, Transfer, make_transfer
from infinistore.tensors.tensor_blocks import Blocks, blocks_to_write

if TYPE_CHECKING:
    import torch

__all__ = ["LayerWriter", "LayerWriterStatistics", "Ticket"]

_MAX_BATCH_BYTES = 16 * 1024 * 1024


@attrs.frozen(kw_only=True)
class LayerWriterStatistics:
    """The counts of a writer so far."""

    pending_writes: int
    pending_bytes: int
    stored_writes: int
    stored_bytes: int
    failed_writes: int
    dropped_writes: int
    dropped_bytes: int
    puts: int
    """The number of batches; fewer than the writes if writes were combined."""


class Ticket(Job):
    """The state of one write.

    The blocks' part of the tensor must not change until the ticket is `done`.
    """

    def __init__(self, writer: "LayerWriter", transfer: Transfer) -> None:
        super().__init__(transfer.blocks.total_bytes)
        self.dropped = False
        self.transfer: Transfer | None = transfer
        self._writer = writer

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the blocks are stored. False if a full writer dropped the write.

        Raises:
            DeadlineExceeded: not stored within `timeout_s` seconds; the write goes on.
            OutOfMemory, ValueTooLarge, LimitExceeded: the blocks were not stored.
            StoreUnavailable, DeadlineExceeded: the blocks may have been stored.
        """
        self._writer._background.wait(self, timeout_s)
        if self.failure is not None:
            self._writer._told(self.failure)
            raise self.failure.again()
        return not self.dropped


class LayerWriter:
    """Stores blocks in a background thread: `with LayerWriter(store) as writer`.

    `write` returns a ticket at once; `flush` waits for all writes. Writes are stored in
    order; waiting writes are combined into one batch. The ticket's `wait` raises the
    error of a write. If nothing waits for the ticket, the next `write` or `flush`
    raises the error once. The writer continues with later writes. The end of the `with`
    statement waits for all writes and raises what `flush` would raise; an exception
    discards the writes that have not started. Any thread may write.

    Args:
        store: a blocking store, which must stay open longer than the writer.
        max_pending_bytes: limit of waiting bytes. The tensors are not copied, so up to
            this much of them must not change.
        when_full: at that limit, "block" waits in `write`, "drop" drops the write and
            counts it.
        deadline_s: how long `write` waits for space, in seconds.
        nice: nice value of the thread, 0 to 19, as in nice(1).
        linger_s: how long less than 4 MiB wait for further writes to share a put, in
            seconds. The cost of a put to the computation hardly depends on its size.
            Waiting for a write ends the delay.
        ttl_s: the blocks end after so many seconds, as of `put`; None: not at all.
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
        ttl_s: float | None = None,
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
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._unreported: KeptError | None = None
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
        """Wait for all writes and end the thread. Idempotent; raises as `flush`.

        For callers that cannot use `with`.
        """
        self._close(drain=True)
        self._report()

    def write(self, tensor: "torch.Tensor", blocks: Blocks, block_size_bytes: int) -> Ticket:
        """Store blocks of a tensor in the background. Returns at once.

        The arguments are those of `write_blocks`. The blocks' part of the tensor must
        not change until the ticket is done. The writer keeps the tensor alive.

        Raises:
            DeadlineExceeded: the writer was full for `deadline_s`. Nothing of this
                write is stored.
            ValueError, TypeError: as in `write_blocks`, or more bytes than
                `max_pending_bytes`. Nothing is stored.
            OutOfMemory, StoreUnavailable and others: an earlier write failed, and its
                error was not raised yet. Nothing of this write is stored; call again to
                continue.
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
        """Wait until all earlier writes are stored.

        Raises:
            DeadlineExceeded: not within `timeout_s` seconds; the writes go on.
            OutOfMemory, StoreUnavailable and others: a write failed, and its error was
                not raised yet.
        """
        self._background.flush(timeout_s)
        self._report()

    def statistics(self) -> LayerWriterStatistics:
        """Return the counts so far."""
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
        """Raise an error that was not raised yet."""
        with self._lock:
            failure, self._unreported = self._unreported, None
        if failure is not None:
            raise failure.again()

    def _told(self, failure: KeptError) -> None:
        with self._lock:
            if self._unreported is failure:
                self._unreported = None

    def _store_batch(self, tickets: list[Ticket]) -> None:
        """Carry out the waiting writes in one batch or, if that fails, one by one."""
        try:
            self._put(tickets)
        except (StoreUnavailable, DeadlineExceeded) as error:
            self._failed(tickets, KeptError(error))
        except Exception as error:  # noqa: BLE001 - it is raised where the write's owner looks
            if len(tickets) == 1:
                self._failed(tickets, KeptError(error))
            else:
                for ticket in tickets:
                    self._store_batch([ticket])

    def _put(self, tickets: list[Ticket]) -> None:
        transfers = [ticket.transfer for ticket in tickets if ticket.transfer is not None]
        put_blocks(self._store, transfers, self._staging, self._ttl_s)
        self._puts += 1
        for ticket in tickets:
            ticket.transfer = None  # the tensor may go
            self._stored_writes += 1
            self._stored_bytes += ticket.total_bytes

    def _failed(self, tickets: list[Ticket], failure: KeptError) -> None:
        for ticket in tickets:
            ticket.transfer = None
            ticket.failure = failure
            self._failed_writes += 1
        with self._lock:
            self._unreported = self._unreported or failure


def _no_key_twice(batch: list[Ticket], ticket: Ticket) -> bool:
    """A put has each key once. A later write of the same key is put later, and wins."""
    assert ticket.transfer is not None
    keys = set(ticket.transfer.blocks.keys)
    return all(other.transfer is None or keys.isdisjoint(other.transfer.blocks.keys) for other in batch)
