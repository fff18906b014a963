"""Copying blocks between tensors on a GPU and the memory of this process.

Copies run on a stream of their own, beside the computation, ordered by events: they begin when what the computing
stream had been told before is done. Several pieces of memory are one call to the driver (`cudaMemcpyBatchAsync`,
through cuda-bindings). Without that, blocks that are scattered over the tensor are gathered by the GPU into one piece
first, and where memory is scattered on this side, they come by way of one pinned piece: in no case is there a call to
the driver for each block.

Memory is fast for a GPU when it is pinned. The store's pool, where it is mapped into this process, is registered once
(`cudaHostRegister`). Copies from and to other memory are right all the same, and slow.

What touches the driver is in `cuda_runtime`; all that is decided here is tested without a GPU.
"""

import threading
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from infinistore.tensors.device_copies import Pieces, addresses_of, merge
from infinistore.tensors.tensor_blocks import TensorBlocks, bytes_of_storage

if TYPE_CHECKING:
    import torch

__all__ = ["CudaCopies", "MappedArena", "Runtime"]

_FEW = 4
"""So many pieces are copied by a call each, where the driver takes no batch."""


class Runtime(Protocol):
    """What is asked of CUDA. Streams and events are whatever the runtime makes of them."""

    batches: bool
    """Whether `copy` copies any number of pieces by one call."""

    def new_stream(self, device: "torch.device") -> Any:
        """Make a stream beside those that compute."""

    def record(self, device: "torch.device") -> Any:
        """Return an event that comes when what this thread's current stream of the device was told so far is done."""

    def wait_event(self, stream: Any, event: Any) -> None:
        """Let what the stream is told from now on begin after the event."""

    def wait(self, event: Any) -> None:
        """Wait for the event. The interpreter's lock is free meanwhile."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """What PyTorch does inside, it does on this stream."""

    def copy(self, stream: Any, memory: "torch.Tensor", pieces: Pieces, *, to_host: bool) -> None:
        """Tell the stream to copy pieces: here, from the start of `memory` (uint8, on the device); there, addresses."""

    def finish(self, stream: Any) -> None:
        """Wait until the stream has done everything it was told. The interpreter's lock is free meanwhile."""

    def pinned(self, length: int) -> "torch.Tensor":
        """Make pinned memory of this process: uint8, `length` bytes."""

    def register(self, device: "torch.device", address: int, length: int, *, read_only: bool) -> bool:
        """Pin memory of this process; False if it cannot be pinned, or somebody else has pinned it.

        It is pinned for every device; `device` is one that the process uses anyway.
        """

    def unregister(self, device: "torch.device", address: int) -> None:
        """Undo that. Nothing may be copied there meanwhile."""


class MappedArena(NamedTuple):
    """An arena of the store's pool as it is mapped into this process: for reading, and, perhaps, for writing."""

    reading: memoryview
    writing: memoryview | None


class _Registered(NamedTuple):
    """An arena: where it is read, where the same bytes are pinned, and whether it was we who pinned them.

    `view` keeps the mapping alive.
    """

    reading: int
    pinned: int
    length: int
    device: "torch.device"
    ours: bool
    view: memoryview


class CudaCopies:
    """Tensors on GPUs. One for each store, because memory can be registered only once."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._streams: dict[tuple[torch.device, bool], Any] = {}
        self._pool: list[_Registered] = []
        self._gone: list[_Registered] = []
        self._copying = 0

    def mark(self, tensor: "torch.Tensor") -> Any:
        """Remember what the tensor's device was told so far, by this thread's current stream."""
        return self._runtime.record(tensor.device)

    def wait(self, after: Any) -> None:
        """Wait for what `mark` remembered."""
        self._runtime.wait(after)

    def host_memory(self, length: int) -> "torch.Tensor":
        """Make pinned memory."""
        return self._runtime.pinned(length)

    def to_host(self, blocks: TensorBlocks, targets: Sequence[memoryview], after: Any) -> None:
        """Copy the blocks into memory."""
        with self._ordered(blocks.tensor.device, after, to_host=True) as stream:
            there = addresses_of(targets)
            if blocks.starts is not None:
                memory = bytes_of_storage(blocks.tensor)
                pieces = self._pieces(blocks.starts, there, blocks.block_bytes)
                if self._are_few(pieces):
                    self._runtime.copy(stream, memory, pieces, to_host=True)
                    return
            with self._runtime.on(stream):
                gathered = blocks.gather()
            self._copy_rows(stream, gathered, targets, there, to_host=True)
            self._runtime.finish(stream)  # before `gathered` goes

    def to_device(self, sources: Sequence[memoryview], blocks: TensorBlocks, after: Any) -> None:
        """Copy memory into the blocks."""
        with self._ordered(blocks.tensor.device, after, to_host=False) as stream:
            there = self._where_pinned(addresses_of(sources))
            if blocks.starts is not None:
                pieces = self._pieces(blocks.starts, there, blocks.block_bytes)
                if self._are_few(pieces):
                    self._runtime.copy(stream, bytes_of_storage(blocks.tensor), pieces, to_host=False)
                    return
            with self._runtime.on(stream):
                rows = blocks.new_rows()
            self._copy_rows(stream, rows, sources, there, to_host=False)
            with self._runtime.on(stream):
                blocks.scatter(rows)
            self._runtime.finish(stream)  # before `rows` goes

    def _copy_rows(
        self,
        stream: Any,
        rows: "torch.Tensor",
        views: Sequence[memoryview],
        there: NDArray[np.int64],
        *,
        to_host: bool,
    ) -> None:
        """Copy between rows on the device and views of memory that need not be neighbours."""
        size = rows.shape[1]
        pieces = self._pieces(range(0, rows.numel(), size), there, size)
        if self._are_few(pieces):
            self._runtime.copy(stream, rows.view(-1), pieces, to_host=to_host)
            return
        beside = self._runtime.pinned(rows.numel())
        whole = Pieces([0], [beside.data_ptr()], [beside.numel()])
        lines: list[memoryview] = [row.data for row in beside.view(rows.shape).numpy()]
        if to_host:
            self._runtime.copy(stream, rows.view(-1), whole, to_host=True)
            self._runtime.finish(stream)
            for view, line in zip(views, lines, strict=True):
                view[:] = line
        else:
            for view, line in zip(views, lines, strict=True):
                line[:] = view
            self._runtime.copy(stream, rows.view(-1), whole, to_host=False)
            self._runtime.finish(stream)  # before `beside` goes

    @contextmanager
    def _ordered(self, device: "torch.device", after: Any, *, to_host: bool) -> Generator[Any, None, None]:
        """Give the stream, which begins after the event; at the end, wait for it whatever happened."""
        with self._lock:
            self._copying += 1
            stream = self._streams.get((device, to_host))
            if stream is None:
                stream = self._streams[device, to_host] = self._runtime.new_stream(device)
        try:
            self._runtime.wait_event(stream, after)
            try:
                yield stream
            finally:
                self._runtime.finish(stream)
        finally:
            with self._lock:
                self._copying -= 1
                self._unregister_gone()

    def _pieces(self, here: Sequence[int], there: NDArray[np.int64], size: int) -> Pieces:
        # A piece must not reach from one registered span of memory into another.
        ends = [end for arena in self._pool for end in (arena.pinned, arena.pinned + arena.length)]
        return merge(np.array(here, np.int64), there, size, ends)

    def _are_few(self, pieces: Pieces) -> bool:
        return self._runtime.batches or len(pieces.sizes) <= _FEW

    # The pool

    def use_pool(self, arenas: Sequence[MappedArena], device: "torch.device") -> None:
        """Register the arenas that are new, and unregister those that are not there any more."""
        with self._lock:
            known = {arena.reading: arena for arena in self._pool}
            found: list[_Registered] = []
            for arena in arenas:
                reading = int(addresses_of([arena.reading])[0])
                kept = known.pop(reading, None)
                found.append(self._register(reading, arena, device) if kept is None else kept)
            self._pool = found
            self._gone += known.values()
            self._unregister_gone()

    def close(self) -> None:
        """Unregister everything, when nothing is being copied any more."""
        with self._lock:
            self._gone += self._pool
            self._pool = []
            self._unregister_gone()

    def _register(self, reading: int, arena: MappedArena, device: "torch.device") -> _Registered:
        view = arena.reading if arena.writing is None else arena.writing
        pinned = int(addresses_of([view])[0])
        ours = self._runtime.register(device, pinned, len(view), read_only=arena.writing is None)
        return _Registered(reading, pinned, len(view), device, ours, view)

    def _unregister_gone(self) -> None:
        if not self._copying:
            for arena in self._gone:
                if arena.ours:
                    self._runtime.unregister(arena.device, arena.pinned)
            self._gone.clear()

    def _where_pinned(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the same bytes are pinned; addresses outside the pool stay as they are."""
        found = addresses.copy()
        for arena in self._pool:
            inside = (addresses >= arena.reading) & (addresses < arena.reading + arena.length)
            found[inside] += arena.pinned - arena.reading
        return found
