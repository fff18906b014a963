"""A worker's half: moves blocks between vLLM's KV cache and the store.

Reading: a thread reads a request's blocks directly into the KV cache while the engine
computes for other requests. A block fails if any part of it is missing, has another
size, or does not match its checksum; vLLM then computes it. A worker reads few requests
at a time, and what waits to be read is held in the background, so that neither the
engine nor a read waits for that; a load that begins at once needs no hold.

Writing: after each layer, its full blocks go to a `LayerWriter`, which writes them from
the KV cache in place while the next layer is computed. They must not be given to other
requests before they are written: until then a finished request is not reported as sent,
and a preempted one is waited for. Blocks of windows and states are copied first: vLLM
gives these to others while their request goes on.

If there is anything but one group of layers that attend to all tokens, a load fails as
a whole, because vLLM cannot compute a part of it.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from infinistore.blocking import BlockingStore
from infinistore.errors import ConfigError, DeadlineExceeded, InfiniStoreException
from infinistore.integrations.internal.record import Record
from infinistore.integrations.vllm.background import Background
from infinistore.integrations.vllm.block_events import SavedBlocks
from infinistore.integrations.vllm.blocks import BlockNames, Blocks, LayerGroup, LayerGroups, Load, Step
from infinistore.integrations.vllm.loading import LinkMeter, LinkReport
from infinistore.integrations.vllm.observations import Observations
from infinistore.integrations.vllm.resets import LateWrites
from infinistore.integrations.vllm.settings import ConnectorSettings
from infinistore.tensors import BlocksMissing, LayerWriter, Ticket, read_blocks

if TYPE_CHECKING:
    import torch


@attrs.frozen
class LayerCache:
    """One shard of the KV cache of a layer as bytes: that of block i is contiguous at
    i * `stride_bytes`.
    """

    label: str
    shard: int
    memory: "torch.Tensor"
    view: memoryview | None
    """The same memory, if it is the host's."""
    block_bytes: int
    stride_bytes: int

    def block(self, number: int) -> memoryview:
        """Return one block in host memory."""
        assert self.view is not None
        return self.view[number * self.stride_bytes : number * self.stride_bytes + self.block_bytes]

    def copy(self, numbers: Sequence[int]) -> "torch.Tensor":
        """Return a copy of some blocks, one behind the other."""
        import torch

        starts = [number * self.stride_bytes for number in numbers]
        return torch.cat([self.memory[start : start + self.block_bytes] for start in starts])

    @classmethod
    def of(
        cls, name: str, label: str, cache: "torch.Tensor | None", num_blocks: int, shards: range
    ) -> "list[LayerCache]":
        """View a layer's tensor, whose first dimension counts blocks and whose second
        one counts heads, as blocks of these shards.

        Raises:
            ConfigError: a shard of a block is not contiguous.
        """
        import torch

        if not isinstance(cache, torch.Tensor) or cache.shape[0] == 0 or cache.shape[0] % num_blocks:
            raise ConfigError(f"the KV cache of {name} does not consist of {num_blocks} blocks; it cannot be stored")
        cache = cache.view(num_blocks, -1, *cache.shape[1:])  # a kernel may cut a block into several
        if len(shards) == 1:
            return [cls._of(f"a block of {name}", label, shards[0], cache)]
        if cache.dim() != 5 or cache.shape[2] % len(shards):
            raise ConfigError(
                f"the KV heads of {name} cannot be told apart; leave shards out of kv_connector_extra_config"
            )
        heads = cache.chunk(len(shards), 2)
        return [
            cls._of(f"a shard of a block of {name}", label, shard, part)
            for shard, part in zip(shards, heads, strict=True)
        ]

    @classmethod
    def _of(cls, what: str, label: str, shard: int, cache: "torch.Tensor") -> "LayerCache":
        import torch

        size = cache.element_size()
        block_bytes = math.prod(cache.shape[1:]) * size
        spanned = 1 + sum((n - 1) * stride for n, stride in zip(cache.shape[1:], cache.stride()[1:], strict=True))
        if spanned * size != block_bytes:
            raise ConfigError(
                f"{what} is scattered over memory; choose a KV cache layout in which it is not, by the environment"
                " variable VLLM_KV_CACHE_LAYOUT=LBHNC"
            )
        stride_bytes = cache.stride(0) * size
        length = (len(cache) - 1) * stride_bytes + block_bytes
        memory = torch.empty(0, dtype=torch.uint8, device=cache.device)
        memory.set_(cache.untyped_storage(), cache.storage_offset() * size, (length,), (1,))
        array: Any = memory.numpy() if memory.device.type == "cpu" else None
        view = None if array is None else memoryview(array)
        return cls(label, shard, memory, view, block_bytes, stride_bytes)


_Keys = Mapping[tuple[str, int], Sequence[str]]
"""The keys of blocks, by the label of a layer and the shard of it."""


@attrs.define(eq=False)
class _Reading:
    """A load that is under way, or waits for a thread."""

    load: Load
    tokens_a_byte: float
    """How many tokens a byte of it spares to compute."""
    keys: list[_Keys] = attrs.field(factory=list)
    """For each part of the load. They are made when a hold or the read needs them
    first."""
    hold: str = ""
    """The token of the hold on its blocks, if one was placed."""
    read_tokens: float = 0.0
    ends: float = math.inf
    """When it is given up."""
    is_over: bool = False


_READ_BYTES = 64 * 1024 * 1024
"""Size of one read."""
_IDLE_WAIT_S = 0.005
"""How long a step without computation waits for a read or write, to avoid polling."""


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

    `groups` are the groups of layers, and `layers` the names of all of them with their
    labels. `shards` are this worker's part of each layer. `writes`: it writes that part
    (one of the workers with the same part does). `delivers`: a step ends only when its
    blocks are stored, because a decoder elsewhere asks for them.
    """

    def __init__(
        self,
        store: BlockingStore,
        names: BlockNames,
        settings: ConnectorSettings,
        record: Record,
        *,
        groups: Sequence[LayerGroup],
        layers: Mapping[str, str],
        shards: range = range(1),
        writes: bool = True,
        delivers: bool = False,
        background: Background,
        observations: Observations | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._clock = clock
        self._memory, self._disk = LinkMeter(clock), LinkMeter(clock)
        self._observed = observations or Observations()
        self._names = names
        self._groups = LayerGroups(groups)
        self._labels = layers
        self._group_of = {label: number for number, group in enumerate(groups) for label in group.layers}
        self._shards = shards
        self._writes = writes
        self._delivers = delivers
        self._deadline_s = settings.deadline_s
        self._record = record
        self._layers: dict[str, list[LayerCache]] = {}
        """The shards of each layer, by its name."""
        self._step = Step()
        self._saved: set[str] = set()
        self.writer = LayerWriter(
            store,
            max_pending_bytes=settings.max_pending_bytes,
            when_full=settings.when_full or ("block" if delivers else "drop"),
            deadline_s=settings.deadline_s,
            ttl_s=settings.ttl_s,
        )
        self.writer.__enter__()
        self._written = self.writer.statistics()
        self._background = background
        self.late_writes = LateWrites(store, record, names.key, background=background)
        """What is written before a reset of the cache, and may be stored after it."""
        self._saving: dict[str, _Saving] = {}
        self._numbered: dict[int, list[Ticket | None]] = {}
        self._hold_s = settings.hold_s
        self._load_threads = settings.load_threads
        self._readers = ThreadPoolExecutor(settings.load_threads, thread_name_prefix="infinistore-load")
        self._progress = threading.Condition()
        self._reading = 0
        self._read: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()

    def register(self, caches: Mapping[str, "torch.Tensor"], num_blocks: int) -> list[int]:
        """Register the KV cache. Returns for each group the bytes of one block in all
        layers.

        Raises:
            ConfigError: its layout is not supported.
        """
        self._layers = {
            name: LayerCache.of(name, label, caches.get(name), num_blocks, self._shards)
            for name, label in self._labels.items()
            if label in self._group_of
        }
        return [sum(layer.block_bytes for layer in self._layers_of(number)) for number in range(len(self._groups))]

    def begin(self, step: Step) -> None:
        """Begin a step: wait for the writes of preempted requests' blocks."""
        self._step = step
        self._saved = set()
        for request_id in step.preempted:
            for ticket in self._saving.pop(request_id, _Saving()).tickets:
                self._wait(ticket)
        self.late_writes.begin(step.resets)

    def start_loads(self, after: Callable[[], object] = lambda: None) -> None:
        """Start the loads in threads; `after` returns when blocks may be filled. The
        blocks of a load that waits for a thread are held meanwhile.
        """
        for load in self._step.loads:
            load_bytes = sum(
                len(part.block_ids) * layer.block_bytes for part in load.parts for layer in self._layers_of(part.group)
            )
            reading = _Reading(load, load.tokens / max(1, load_bytes))
            self._meter_of(load).queue(load.tokens)
            with self._progress:
                self._reading += 1
                waits = self._reading > self._load_threads
            if waits:
                self._background.submit(partial(self._hold, reading), None)
            self._readers.submit(self._load, reading, after)

    def save_layer(self, name: str) -> None:
        """Start the saves of a layer that has just been computed."""
        layers = self._layers.get(name)
        if layers is None or not self._step.saves or name in self._saved:
            return
        self._saved.add(name)
        for save in self._step.saves:
            saving = self._saving.setdefault(save.request_id, _Saving())
            if not self._writes or save.blocks.group != self._group_of[layers[0].label]:
                continue
            for layer in layers:
                ticket = self._write(layer, save.blocks, save.ttl_s)
                if save.number:
                    self._numbered.setdefault(save.number, []).append(ticket)
                if ticket is not None:
                    saving.tickets.append(ticket)

    def end_saves(self) -> None:
        """End the saves of a step, also of layers of which vLLM does not say that they
        are computed. If a decoder waits for the blocks, wait for them.
        """
        for name in self._layers:
            self.save_layer(name)
        for save in self._step.saves:
            saving = self._saving.setdefault(save.request_id, _Saving())
            if self._delivers:
                for ticket in saving.tickets:
                    self._wait(ticket)
            saving.tickets = [ticket for ticket in saving.tickets if not self._ended(ticket)]
            if save.number:
                self._numbered.setdefault(save.number, [])  # another worker writes it

    def take_saved(self) -> SavedBlocks:
        """Return which numbered saves have ended since the last call."""
        saved = SavedBlocks()
        for number, tickets in list(self._numbered.items()):
            if all(ticket is None or ticket.done for ticket in tickets):
                del self._numbered[number]
                lost = any(ticket is None or ticket.dropped or ticket.failure is not None for ticket in tickets)
                (saved.incomplete if lost else saved.complete)[number] += 1
        return saved

    def poll(self, finished: Iterable[str]) -> tuple[set[str], set[str]]:
        """Return the finished requests that are saved, and those that are loaded."""
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

    def take_failed_requests(self) -> set[str]:
        """Return the requests whose load failed as a whole since the last call."""
        with self._progress:
            failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_link_report(self) -> tuple[int, LinkReport | None]:
        """Return the number of this step, and what was read since the last report, if
        that is worth one."""
        number = self._step.number
        memory, disk = (self._memory.take(), self._disk.take()) if number else (None, None)
        return number, LinkReport(memory, disk) if memory or disk else None

    def observe_writes(self) -> None:
        """Count what has been written since the last call."""
        before, self._written = self._written, self.writer.statistics()
        self._observed.count(
            written_bytes=self._written.stored_bytes - before.stored_bytes,
            dropped_bytes=self._written.dropped_bytes - before.dropped_bytes,
            failed_writes=self._written.failed_writes - before.failed_writes,
        )

    def close(self) -> None:
        """Finish the writes if the store is available, and end the threads."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        try:
            self.writer.flush(self._deadline_s)
            self.writer.close()
        except InfiniStoreException as error:
            self._record.failed("save", error)
            self.writer.__exit__(type(error), error, None)

    def _layers_of(self, group: int) -> list[LayerCache]:
        return [layer for of in self._layers.values() for layer in of if self._group_of[layer.label] == group]

    def _write(self, layer: LayerCache, blocks: Blocks, ttl_s: float | None) -> Ticket | None:
        memory, stride_bytes, numbers = layer.memory, layer.stride_bytes, blocks.block_ids
        if not self._groups[blocks.group].is_full:
            memory, stride_bytes, numbers = layer.copy(numbers), layer.block_bytes, list(range(len(numbers)))
        places = [
            (self._names.key(block_hash, layer.shard, layer.label), number * stride_bytes)
            for block_hash, number in zip(blocks.hashes, numbers, strict=True)
        ]
        for _ in range(2):  # an earlier write's error comes first, and then this one has its turn
            try:
                ticket = self.writer.write(memory, places, layer.block_bytes, ttl_s=ttl_s)
            except (InfiniStoreException, ValueError) as error:
                self._record.failed("save", error)
            else:
                self.late_writes.wrote(ticket, blocks.hashes, layer.shard, layer.label)
                return ticket
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

    def _load(self, reading: _Reading, after: Callable[[], object]) -> None:
        """In a thread: read a request's blocks layer by layer; always report it."""
        load = reading.load
        failed = set(load.block_ids)
        meter = self._meter_of(load)
        meter.begin()
        try:
            with self._record.trying("load"):
                after()
                if load.limit_s is not None:
                    reading.ends = self._clock() + load.limit_s
                with self._observed.timed("read"):
                    failed = self._read_parts(reading)
        finally:
            meter.end(load.tokens - reading.read_tokens)
            self._observed.count(failed_reads=int(bool(failed) and load.limit_s is None))
            with self._progress:
                self._reading -= 1
                if self._groups.is_uniform:
                    self._failed_blocks |= failed
                elif failed:
                    self._failed_requests.add(load.request_id)
                self._read.add(load.request_id)
                reading.is_over = True
                hold = reading.hold
                self._progress.notify_all()
        self._release(hold)

    def _hold(self, reading: _Reading) -> None:
        """In the background: hold the leading blocks until they are read."""
        if reading.is_over:
            return
        keys = [
            key for part in self._keys(reading) for of_block in zip(*part.values(), strict=True) for key in of_block
        ]
        with self._record.trying("hold"):
            hold = self._store.match_prefix(keys, hold_s=self._hold_s).hold
            with self._progress:
                reading.hold, is_over = hold, reading.is_over
            if is_over:
                self._release(hold)

    def _release(self, hold: str) -> None:
        if hold:
            with self._record.trying("release of a hold"):
                self._store.release_hold(hold)

    def _keys(self, reading: _Reading) -> list[_Keys]:
        """Return the keys of this worker's shards of all blocks of a load."""
        reading.keys = reading.keys or [
            {
                (layer.label, layer.shard): [
                    self._names.key(block_hash, layer.shard, layer.label) for block_hash in part.hashes
                ]
                for layer in self._layers_of(part.group)
            }
            for part in reading.load.parts
        ]
        return reading.keys

    def _read_parts(self, reading: _Reading) -> set[int]:
        """Read all layers; return the incomplete blocks: all, with several groups."""
        load, keys = reading.load, self._keys(reading)
        if self._groups.is_uniform:
            (part,) = load.parts
            return set(part.block_ids[self._read_leading(reading, part, keys[0]) :])
        complete = all(
            self._read_batch(reading, layers, part.block_ids[:count], of_part) == count
            for part, of_part in zip(load.parts, keys, strict=True)
            for layers, count in self._batches(reading, part)
        )
        return set() if complete else set(load.block_ids)

    def _read_leading(self, reading: _Reading, part: Blocks, keys: _Keys) -> int:
        """Read all layers of the leading blocks. Returns how many are complete."""
        good = len(part.hashes)
        for layers, most in self._batches(reading, part):
            # Again after a miss: only a read of nothing but what is there says that all
            # of it is right.
            while (count := min(good, most)) and (
                found := self._read_batch(reading, layers, part.block_ids[:count], keys)
            ) < count:
                good = found
        return good

    def _batches(self, reading: _Reading, part: Blocks) -> Iterator[tuple[list[LayerCache], int]]:
        """Return the layers of a part in batches, each with how many of its leading
        blocks are read.

        Few large reads are fast. A load that may be given up has the layers one by one,
        and before them ever more blocks of the first one: so none of its reads lasts
        much longer than all those before.
        """
        blocks, layers = len(part.hashes), self._layers_of(part.group)
        is_trial = reading.load.limit_s is not None
        if is_trial and layers:
            yield from ((layers[:1], 1 << number) for number in range((blocks - 1).bit_length()))
        batch: list[LayerCache] = []
        batch_bytes = 0
        for layer in layers:
            if batch and (is_trial or layer.view is None or batch_bytes + blocks * layer.block_bytes > _READ_BYTES):
                yield batch, blocks
                batch, batch_bytes = [], 0
            batch.append(layer)
            batch_bytes += blocks * layer.block_bytes
        if batch:
            yield batch, blocks

    def _read_batch(
        self,
        reading: _Reading,
        layers: list[LayerCache],
        block_ids: Sequence[int],
        keys: _Keys,
    ) -> int:
        """Read some layers of the first blocks of a part into these of the cache.

        Returns the number of leading complete blocks.
        """
        count = len(block_ids)
        if self._clock() >= reading.ends:
            return 0
        if layers[0].view is None:
            (layer,) = layers
            offsets = [block_id * layer.stride_bytes for block_id in block_ids]
            of_layer = keys[layer.label, layer.shard]
            blocks = list(zip(of_layer, offsets, strict=False))
            try:
                read_blocks(self._store, blocks, layer.block_bytes, layer.memory)
            except BlocksMissing as error:
                return of_layer.index(error.keys[0])
            self._note_read(reading, count * layer.block_bytes)
            return count
        lengths = self._store.get_many_into(
            (key, layer.block(block_id))
            for layer in layers
            for key, block_id in zip(keys[layer.label, layer.shard], block_ids, strict=False)
        )
        wrong = [
            number % count for number, length in enumerate(lengths) if length != layers[number // count].block_bytes
        ]
        self._note_read(reading, sum(length or 0 for length in lengths))
        return min(wrong, default=count)

    def _note_read(self, reading: _Reading, size_bytes: int) -> None:
        tokens = size_bytes * reading.tokens_a_byte
        reading.read_tokens += tokens
        self._meter_of(reading.load).read(tokens)
        self._observed.count(read_bytes=size_bytes)

    def _meter_of(self, load: Load) -> LinkMeter:
        return self._disk if load.is_on_disk else self._memory
