"""A worker's half: moves blocks between vLLM's KV cache and the store.

Reading: a thread reads a request's blocks directly into the KV cache while the engine
computes for other requests. A block fails if any part of it is missing, has another
size, or does not match its checksum; vLLM then computes it.

Writing: after each layer, its full blocks go to a `LayerWriter`, which writes them from
the KV cache in place while the next layer is computed. They must not be given to other
requests before they are written: until then a finished request is not reported as sent,
and a preempted one is waited for.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import attrs

from infinistore.blocking import BlockingStore
from infinistore.errors import ConfigError, DeadlineExceeded, InfiniStoreException
from infinistore.integrations.internal.record import Record
from infinistore.integrations.vllm.names import BlockNames
from infinistore.integrations.vllm.settings import ConnectorSettings
from infinistore.integrations.vllm.step import Load, Save, Step
from infinistore.tensors import BlocksMissing, LayerWriter, Ticket, read_blocks

if TYPE_CHECKING:
    import torch

__all__ = ["LayerCache", "WorkerSide"]

_READ_BYTES = 64 * 1024 * 1024
"""Size of one read."""
_IDLE_WAIT_S = 0.005
"""How long a step without computation waits for a read or write, to avoid polling."""


@attrs.frozen
class LayerCache:
    """The KV cache of one layer as bytes: block i is contiguous at i *
    `stride_bytes`.
    """

    label: str
    memory: "torch.Tensor"
    view: memoryview | None
    """The same, if it is host memory."""
    block_bytes: int
    stride_bytes: int

    def block(self, number: int) -> memoryview:
        """Return one block in host memory."""
        assert self.view is not None
        return self.view[number * self.stride_bytes : number * self.stride_bytes + self.block_bytes]

    @classmethod
    def of(cls, name: str, label: str, cache: "torch.Tensor | None", num_blocks: int) -> "LayerCache":
        """View a layer's tensor, whose first dimension counts blocks, as blocks.

        Raises:
            ConfigError: a block is not contiguous.
        """
        import torch

        if not isinstance(cache, torch.Tensor) or cache.shape[0] != num_blocks:
            raise ConfigError(f"the KV cache of {name} does not consist of {num_blocks} blocks; it cannot be stored")
        size = cache.element_size()
        block_bytes = math.prod(cache.shape[1:]) * size
        spanned = 1 + sum((n - 1) * stride for n, stride in zip(cache.shape[1:], cache.stride()[1:], strict=True))
        if spanned * size != block_bytes:
            raise ConfigError(
                f"a block of {name} is scattered over memory; choose a KV cache layout in which it is not, by the"
                " environment variable VLLM_KV_CACHE_LAYOUT=LBHNC"
            )
        stride_bytes = cache.stride(0) * size
        length = (num_blocks - 1) * stride_bytes + block_bytes
        memory = torch.empty(0, dtype=torch.uint8, device=cache.device)
        memory.set_(cache.untyped_storage(), cache.storage_offset() * size, (length,), (1,))
        array: Any = memory.numpy() if memory.device.type == "cpu" else None
        view = None if array is None else memoryview(array)
        return cls(label, memory, view, block_bytes, stride_bytes)


@attrs.define
class _Saving:
    tickets: list[Ticket] = attrs.field(factory=list)
    ended: bool = False
    """Whether vLLM has finished the request, and waits for its blocks to be saved."""

    @property
    def done(self) -> bool:
        return all(ticket.done for ticket in self.tickets)


class WorkerSide:
    """A worker's half of the connector. vLLM's thread calls it; others move blocks.

    `labels` maps the names of the stored layers to their labels. `shard` is this
    worker's part of each layer. `writes`: it writes that part (one of the workers with
    the same part does). `delivers`: a step ends only when its blocks are stored,
    because a decoder elsewhere asks for them.
    """

    def __init__(
        self,
        store: BlockingStore,
        names: BlockNames,
        settings: ConnectorSettings,
        record: Record,
        *,
        labels: Mapping[str, str],
        shard: int = 0,
        writes: bool = True,
        delivers: bool = False,
    ) -> None:
        self._store = store
        self._names = names
        self._labels = labels
        self._shard = shard
        self._writes = writes
        self._delivers = delivers
        self._deadline_s = settings.deadline_s
        self._record = record
        self._layers: dict[str, LayerCache] = {}
        self._step = Step()
        self._writer = LayerWriter(
            store,
            max_pending_bytes=settings.max_pending_bytes,
            when_full=settings.when_full or ("block" if delivers else "drop"),
            deadline_s=settings.deadline_s,
        )
        self._writer.__enter__()
        self._saving: dict[str, _Saving] = {}
        self._readers = ThreadPoolExecutor(settings.load_threads, thread_name_prefix="infinistore-load")
        self._progress = threading.Condition()
        self._reading = 0
        self._read: set[str] = set()
        self._failed_blocks: set[int] = set()

    def register(self, caches: Mapping[str, "torch.Tensor"], num_blocks: int) -> int:
        """Register the KV cache. Returns the bytes of one block in all layers.

        Raises:
            ConfigError: its layout is not supported.
        """
        self._layers = {
            name: LayerCache.of(name, label, caches.get(name), num_blocks) for name, label in self._labels.items()
        }
        return sum(layer.block_bytes for layer in self._layers.values())

    def begin(self, step: Step) -> None:
        """Begin a step: wait for the writes of preempted requests' blocks."""
        self._step = step
        for request_id in step.preempted:
            for ticket in self._saving.pop(request_id, _Saving()).tickets:
                self._wait(ticket)

    def start_loads(self, after: Callable[[], object] = lambda: None) -> None:
        """Start the loads in the background; `after` returns when blocks may be
        filled.
        """
        for load in self._step.loads:
            with self._progress:
                self._reading += 1
            self._readers.submit(self._load, load, after)

    def save_layer(self, name: str) -> None:
        """Start the saves of a layer that has just been computed."""
        layer = self._layers.get(name)
        if layer is None or not self._step.saves:
            return
        for save in self._step.saves:
            saving = self._saving.setdefault(save.request_id, _Saving())
            if self._writes:
                ticket = self._write(layer, save)
                if ticket is not None:
                    saving.tickets.append(ticket)

    def end_saves(self) -> None:
        """End the saves of a step. If a decoder waits for the blocks, wait for them."""
        for save in self._step.saves:
            saving = self._saving.setdefault(save.request_id, _Saving())
            if self._delivers:
                for ticket in saving.tickets:
                    self._wait(ticket)
            saving.tickets = [ticket for ticket in saving.tickets if not self._ended(ticket)]

    def poll(self, finished: Iterable[str]) -> tuple[set[str], set[str]]:
        """Return the finished requests that are saved, and those whose loads have
        ended.
        """
        for request_id in finished:
            if (saving := self._saving.get(request_id)) is not None:
                saving.ended = True
        if not self._step.computes:
            self._wait_a_little()
        sent = {request_id for request_id, saving in self._saving.items() if saving.ended and saving.done}
        for request_id in sent:
            for ticket in self._saving.pop(request_id).tickets:
                self._ended(ticket)
        with self._progress:
            read, self._read = self._read, set()
        return sent, read

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks that could not be read since the last call."""
        with self._progress:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        """Finish the writes if the store is available, and end the threads."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        try:
            self._writer.flush(self._deadline_s)
            self._writer.close()
        except InfiniStoreException as error:
            self._record.failed("save", error)
            self._writer.__exit__(type(error), error, None)

    def _write(self, layer: LayerCache, save: Save) -> Ticket | None:
        blocks = [
            (self._names.key(block_hash, self._shard, layer.label), block_id * layer.stride_bytes)
            for block_hash, block_id in zip(save.hashes, save.block_ids, strict=True)
        ]
        for _ in range(2):  # an earlier write's error comes first, and then this one has its turn
            try:
                return self._writer.write(layer.memory, blocks, layer.block_bytes)
            except (InfiniStoreException, ValueError) as error:
                self._record.failed("save", error)
        return None

    def _wait(self, ticket: Ticket) -> None:
        """Wait until a write has ended, with or without success."""
        while not ticket.done:
            try:
                ticket.wait(self._deadline_s)
            except DeadlineExceeded:
                continue
            except InfiniStoreException as error:
                self._record.failed("save", error)

    def _ended(self, ticket: Ticket) -> bool:
        """Whether a write has ended; log its failure once."""
        if ticket.done and ticket.failure is not None:
            self._record.failed("save", ticket.failure.again())
        elif ticket.done and not ticket.dropped:
            self._record.succeeded("save")
        return ticket.done

    def _wait_a_little(self) -> None:
        pending = next((t for s in self._saving.values() if s.ended for t in s.tickets if not t.done), None)
        if pending is not None:
            try:
                pending.wait(_IDLE_WAIT_S)
            except InfiniStoreException:  # not yet, or it failed: both are seen to elsewhere
                return
        else:
            with self._progress:
                self._progress.wait_for(lambda: self._read or not self._reading, _IDLE_WAIT_S)

    def _load(self, load: Load, after: Callable[[], object]) -> None:
        """In a thread: read a request's blocks layer by layer; always report the
        request.
        """
        failed = set(load.block_ids)
        try:
            after()
            failed = self._read_layers(load)
            self._record.succeeded("load")
        except InfiniStoreException as error:
            self._record.failed("load", error)
        finally:
            with self._progress:
                self._reading -= 1
                self._failed_blocks |= failed
                self._read.add(load.request_id)
                self._progress.notify_all()
        if load.hold:
            try:
                self._store.release_hold(load.hold)
            except InfiniStoreException as error:
                self._record.failed("release of a hold", error)

    def _read_layers(self, load: Load) -> set[int]:
        """Read all layers of the leading blocks. Returns the incomplete blocks."""
        good = len(load.block_ids)
        for layers in self._batches(good):
            while good and (found := self._read_batch(load, layers, good)) < good:
                good = found  # and once more: only a read of nothing but what is there says that all of it is right
        return set(load.block_ids[good:])

    def _batches(self, blocks: int) -> Iterator[list[LayerCache]]:
        """Return the layers in groups of the size of one read: few large reads are
        fast.
        """
        batch: list[LayerCache] = []
        batch_bytes = 0
        for layer in self._layers.values():
            if batch and (layer.view is None or batch_bytes + blocks * layer.block_bytes > _READ_BYTES):
                yield batch
                batch, batch_bytes = [], 0
            batch.append(layer)
            batch_bytes += blocks * layer.block_bytes
        yield batch

    def _read_batch(self, load: Load, layers: list[LayerCache], count: int) -> int:
        """Read some layers of the first `count` blocks.

        Returns the number of leading complete blocks.
        """
        hashes, block_ids = load.hashes[:count], load.block_ids[:count]
        if layers[0].view is None:
            (layer,) = layers
            keys = [self._names.key(block_hash, self._shard, layer.label) for block_hash in hashes]
            offsets = [block_id * layer.stride_bytes for block_id in block_ids]
            try:
                read_blocks(self._store, list(zip(keys, offsets, strict=True)), layer.block_bytes, layer.memory)
            except BlocksMissing as error:
                self._record.count(missing=len(error.keys))
                return keys.index(error.keys[0])
            return count
        lengths = self._store.get_many_into(
            (self._names.key(block_hash, self._shard, layer.label), layer.block(block_id))
            for layer in layers
            for block_hash, block_id in zip(hashes, block_ids, strict=True)
        )
        wrong = [
            number % count for number, length in enumerate(lengths) if length != layers[number // count].block_bytes
        ]
        self._record.count(missing=len(wrong))
        return min(wrong, default=count)
