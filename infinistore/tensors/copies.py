"""Copies of blocks between a tensor on a GPU and the memory of this process.

Adjacent blocks are merged, so that the cost of a copy depends on the number of pieces
of memory, not on the number of blocks.

Copies run on streams of their own, concurrently with the computation. Events
order them: a copy begins when the earlier work of the computing stream is done. Several
pieces of memory take one call to the driver (`cudaMemcpyBatchAsync`, through
cuda-bindings). Without that call, the GPU first gathers blocks that are scattered over
the tensor, and scattered host memory is reached through one pinned piece. There is
never a driver call for each block.

Pinned memory is fast for a GPU. The store's pool, if it is mapped into this process, is
registered once (`cudaHostRegister`). Copies from and to other memory are correct, but
slow.

The calls to the driver are in `cuda_runtime`. All decisions are here, and are tested
without a GPU.
"""

import os
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infinistore.tensors.cuda_runtime import Pieces, TorchCuda
from infinistore.tensors.tensor_blocks import TensorBlocks, bytes_of_storage

if TYPE_CHECKING:
    import torch


_Numbers = NDArray[np.int64]


def merge(here: _Numbers, there: _Numbers, size: int, boundaries: Sequence[int] = ()) -> Pieces:
    """Merge blocks of `size` bytes that are adjacent on both sides.

    Never merges across a boundary `there`.
    """
    if not len(here):
        return Pieces([], [], [])
    apart = (np.diff(here) != size) | (np.diff(there) != size)
    if boundaries:
        apart |= np.diff(np.searchsorted(np.array(sorted(boundaries)), there, side="right")) != 0
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    counts = np.diff(np.concatenate((first, [len(here)])))
    return Pieces(here[first].tolist(), there[first].tolist(), (counts * size).tolist())


def addresses_of(views: Sequence[memoryview]) -> _Numbers:
    """Return the address of each view. It does not keep the views alive."""
    found = [np.frombuffer(view, np.uint8).__array_interface__["data"][0] for view in views]
    return np.array(found, np.int64)


_FEW = 4
"""So many pieces are copied by a call each, where the driver takes no batch."""


class MappedArena(NamedTuple):
    """An arena of the store's pool in this process: to read, and perhaps to write."""

    reading: memoryview
    writing: memoryview | None


class _Registered(NamedTuple):
    """An arena: where it is read, where the same bytes are pinned, and who pinned them.

    `view` keeps the mapping alive.
    """

    reading: int
    pinned: int
    length: int
    device: "torch.device"
    ours: bool
    view: memoryview


class CudaCopies:
    """Copies for tensors on GPUs. One per store: memory can be registered only once.

    Any thread may call.
    """

    def __init__(self, runtime: TorchCuda) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._streams: dict[tuple[torch.device, bool], Any] = {}
        self._pool: list[_Registered] = []
        self._gone: list[_Registered] = []
        self._copying = 0
        self._pid = os.getpid()

    def mark(self, tensor: "torch.Tensor") -> Any:
        """Return an event after this thread's earlier work on the tensor's device.

        Called by the thread that computes.
        """
        return self._runtime.record(tensor.device)

    def wait(self, after: Any) -> None:
        """Wait for the event of `mark`."""
        self._runtime.wait(after)

    def host_memory(self, length: int) -> "torch.Tensor":
        """Make pinned memory: uint8, `length` bytes."""
        return self._runtime.pinned(length)

    def to_host(self, blocks: TensorBlocks, targets: Sequence[memoryview], after: Any) -> None:
        """Copy the blocks into memory, one target for each, after the event `after`.

        When this returns or raises, nobody reads the tensor or writes to the targets
        any more.
        """
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
        """Copy memory into the blocks, one source for each, after the event `after`.

        When this returns or raises, nobody reads the sources or writes to the tensor
        any more.
        """
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
        self, stream: Any, rows: "torch.Tensor", views: Sequence[memoryview], there: NDArray[np.int64], *, to_host: bool
    ) -> None:
        """Copy between rows on the device and views that need not be adjacent."""
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
        """Return the stream, ordered after the event; at the end, wait for it."""
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
        """Register new arenas, and unregister those that are gone."""
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
        """Unregister everything, when nothing is being copied any more.

        Does nothing in a forked child, where CUDA refuses every call: the memory is
        registered for the parent.
        """
        if os.getpid() != self._pid:
            return
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
        """Return where the same bytes are pinned; other addresses stay as they are."""
        found = addresses.copy()
        for arena in self._pool:
            inside = (addresses >= arena.reading) & (addresses < arena.reading + arena.length)
            found[inside] += arena.pinned - arena.reading
        return found
