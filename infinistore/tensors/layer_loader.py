"""`LayerLoader`: read a prompt's KV cache layer by layer; the first is used while the next is on its way."""

import threading
from collections.abc import Hashable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from infinistore.blocking import BlockingStore
from infinistore.errors import DeadlineExceeded, StoreUnavailable
from infinistore.tensors.background import Background, Job
from infinistore.tensors.devices import Staging, Transfer, make_transfer
from infinistore.tensors.tensor_blocks import Blocks, blocks_to_read
from infinistore.tensors.transfers import get_blocks

if TYPE_CHECKING:
    import torch

__all__ = ["LayerLoader"]

_MAX_BATCH_BYTES = 4 * 1024 * 1024


class _Load(Job):
    def __init__(self, transfer: Transfer) -> None:
        super().__init__(transfer.blocks.total_bytes)
        self.transfer = transfer


class LayerLoader:
    """Reads blocks into tensors in a thread of its own, layer by layer: `with LayerLoader(store) as loader`.

    `load` returns at once; `wait(layer)` returns when everything that was loaded for the layer is in its tensors, or
    raises what was wrong with it. Layers are read in the order of `load`. Leaving the block gives up what was not
    begun, and waits for what was. Any thread may load and wait.

    Args:
        store: a blocking store, which must stay open longer than the loader.
        max_pending_bytes: how many bytes may be asked for and not yet be there; at the bound, `load` waits.
        deadline_s: how long `load` waits for that, in seconds.
        nice: how far the thread stands back for the computation, 0 (not) to 19, as nice(1) counts.
    """

    def __init__(
        self,
        store: BlockingStore,
        *,
        max_pending_bytes: int = 1024 * 1024 * 1024,
        deadline_s: float = 30.0,
        nice: int = 0,
    ) -> None:
        if not isinstance(store, BlockingStore):
            raise TypeError(
                f"a LayerLoader needs a store of infinistore.blocking.open_store, not {type(store).__name__}"
            )
        if not deadline_s > 0:
            raise ValueError(f"deadline_s must be a number of seconds above 0, not {deadline_s!r}")
        self._store = store
        self._staging = Staging(store)
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._layers: dict[Hashable, list[_Load]] = {}
        self._background = Background(
            self._load_batch,
            name="layer-loader",
            max_pending_bytes=max_pending_bytes,
            max_batch_bytes=_MAX_BATCH_BYTES,
            nice=nice,
        )

    def __enter__(self) -> Self:
        self._background.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the block, for those who cannot use `with`; idempotent. No tensor is written any more afterwards."""
        self._background.close(drain=False)
        self._staging.close()

    def load(self, layer: Hashable, tensor: "torch.Tensor", blocks: Blocks, block_size_bytes: int) -> None:
        """Read blocks into a tensor, soon; several times for one layer if it has several tensors.

        `layer` is any name for it. The other arguments are those of `read_blocks`. Until `wait(layer)`, nobody else may
        use the blocks' part of the tensor. (The tensor is kept alive.)

        Raises:
            DeadlineExceeded: too much was pending for `deadline_s`. Nothing of this is read.
            ValueError, TypeError: as of `read_blocks`, or more bytes than `max_pending_bytes`. Nothing is read.
        """
        job = _Load(make_transfer(self._store, blocks_to_read(tensor, blocks, block_size_bytes)))
        self._background.submit(job, wait=True, timeout_s=self._deadline_s)
        with self._lock:
            self._layers.setdefault(layer, []).append(job)

    def wait(self, layer: Hashable, timeout_s: float | None = None) -> None:
        """Wait until all blocks of a layer are in their tensors. After that, its name is free again.

        Raises:
            BlocksMissing: some are not in the store; its `keys` says which. Their part of the tensor is undefined.
            BlockSizeMismatch, ChecksumMismatch, StoreUnavailable and others: as of `read_blocks`.
            DeadlineExceeded: not within `timeout_s` seconds; it goes on, and can be waited for again.
            KeyError: nothing was loaded for this layer.
        """
        with self._lock:
            if layer not in self._layers:
                raise KeyError(f"nothing was loaded for layer {layer!r}, or it has been waited for")
            jobs = list(self._layers[layer])
        for job in jobs:
            self._background.wait(job, timeout_s)
        with self._lock:
            self._layers.pop(layer, None)
        for job in jobs:
            if job.error is not None:
                raise job.error

    def _load_batch(self, jobs: list[_Load]) -> None:
        """In the thread: read what waits, in one get; if that fails as a whole, each by itself."""
        try:
            problems = get_blocks(self._store, [job.transfer for job in jobs], self._staging)
        except (StoreUnavailable, DeadlineExceeded):
            raise
        except Exception:
            if len(jobs) == 1:
                raise
            for job in jobs:
                self._load_alone(job)
        else:
            for job, problem in zip(jobs, problems, strict=True):
                job.error = problem

    def _load_alone(self, job: _Load) -> None:
        try:
            self._load_batch([job])
        except Exception as error:  # noqa: BLE001 - it is raised by `wait`
            job.fail(error)
