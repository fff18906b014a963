"""`LayerLoader`: loads a prompt's KV cache layer by layer, during computation."""

import threading
from collections.abc import Hashable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from infinistore.blocking import BlockingStore
from infinistore.errors import DeadlineExceeded, StoreUnavailable
from infinistore.kept_errors import KeptError
from infinistore.tensors.background import Background, Job
from infinistore.tensors.blocking_transfers import get_blocks
from infinistore.tensors.devices import Staging, Transfer, make_transfer
from infinistore.tensors.tensor_blocks import Blocks, blocks_to_read

if TYPE_CHECKING:
    import torch

__all__ = ["LayerLoader"]

_MAX_BATCH_BYTES = 4 * 1024 * 1024


class _Load(Job):
    def __init__(self, transfer: Transfer) -> None:
        super().__init__(transfer.blocks.total_bytes)
        self.transfer = transfer


class LayerLoader:
    """Loads blocks in a background thread: `with LayerLoader(store) as loader`.

    `load` returns at once. `wait(layer)` returns when all loads of the layer are in
    their tensors, or raises their error. Layers are loaded in the order of `load`. The
    end of the `with` statement discards the loads that have not started, and waits for
    the others. Any thread may load and wait.

    Args:
        store: a blocking store, which must stay open longer than the loader.
        max_pending_bytes: limit of bytes that are requested and not yet loaded; at the
            limit, `load` waits.
        deadline_s: how long `load` waits for that, in seconds.
        nice: nice value of the thread, 0 to 19, as in nice(1).
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
        """Discard the loads that have not started, and end the thread. Idempotent.

        No tensor is written afterwards. For callers that cannot use `with`.
        """
        self._background.close(drain=False)
        self._staging.close()

    def load(self, layer: Hashable, tensor: "torch.Tensor", blocks: Blocks, block_size_bytes: int) -> None:
        """Load blocks into a tensor in the background. Returns at once.

        `layer` is any name; call `load` several times if a layer has several tensors.
        The other arguments are those of `read_blocks`. Do not use the blocks' part of
        the tensor before `wait(layer)`. The loader keeps the tensor alive.

        Raises:
            DeadlineExceeded: the loader was full for `deadline_s`. Nothing is read.
            ValueError, TypeError: as in `read_blocks`, or more bytes than
                `max_pending_bytes`. Nothing is read.
        """
        job = _Load(make_transfer(self._store, blocks_to_read(tensor, blocks, block_size_bytes)))
        self._background.submit(job, wait=True, timeout_s=self._deadline_s)
        with self._lock:
            self._layers.setdefault(layer, []).append(job)

    def wait(self, layer: Hashable, timeout_s: float | None = None) -> None:
        """Wait until all blocks of a layer are in their tensors. Then its name is free.

        Raises:
            BlocksMissing: some blocks do not exist: those of its `keys`. Their part of
                the tensor is undefined.
            BlockSizeMismatch, ChecksumMismatch, StoreUnavailable and others: as in
                `read_blocks`.
            DeadlineExceeded: not within `timeout_s` seconds; the load goes on, and
                `wait` can be called again.
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
            if job.failure is not None:
                raise job.failure.again()

    def _load_batch(self, jobs: list[_Load]) -> None:
        """Carry out the waiting loads in one batch or, if that fails, one by one."""
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
                job.failure = problem

    def _load_alone(self, job: _Load) -> None:
        try:
            self._load_batch([job])
        except Exception as error:  # noqa: BLE001 - it is raised by `wait`
            job.failure = KeptError(error)
