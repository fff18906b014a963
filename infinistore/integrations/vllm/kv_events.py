"""The connector's changes as vLLM's KV cache events, which vLLM's publisher sends; and
dumps of the stored blocks, by ZMQ, for routers that start later.

The publisher here derives from vLLM's, which numbers batches in the order in which they
are handed over. So counting batches is enough to know their numbers.

A router subscribes first. Then it asks for a dump, part by part, and applies the events
from the dump's `next` batch on. A dump is kept until somebody has asked for its last
part, so that all its parts are of the same moment.

A request is one frame: the word `dump` for the first part of a new dump, or 16 bytes:
eight that name a dump, and the number of a part, big-endian. An answer is two frames: a
header, which is a map in MessagePack, and the part, which is a batch of events as vLLM
sends them. A header with `error` says why there is no part.

A router asks for each part, so one that does not read has at most a few parts waiting.
Further parts are dropped, and the number in the next header shows the gap.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import attrs
import msgspec
import zmq
from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisherFactory,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_kv_cache_block_sizes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, get_kv_cache_spec_kind

from infinistore.errors import ConfigError
from infinistore.host import start_thread
from infinistore.integrations.vllm.block_events import BlockEvents, Dump, Run, SavedBlocks, StoredBlocks
from infinistore.integrations.vllm.blocks import LayerGroup
from infinistore.integrations.vllm.loading import LinkReport

if TYPE_CHECKING:
    from vllm.config import KVEventsConfig, VllmConfig


Stages: TypeAlias = Mapping[int, Mapping[int, tuple[str, ...]]]

_REMOTE = "REMOTE"
_MOST_BLOCKS = 512
"""How many blocks one event has at most."""


class WorkerMetadata(KVConnectorWorkerMetadata):
    """Reports of workers: the saves that have ended; by the number of a reset of the
    cache, how many workers are past it; the number of the step, if it has one, and what
    each rank has read; and, with the first step of a pipeline within a MultiConnector,
    the labels of each stage's layers, by the index of their group.
    """

    def __init__(
        self,
        saved: SavedBlocks,
        stages: Stages | None = None,
        past: Counter[int] | None = None,
        step: int = 0,
        links: Mapping[int, LinkReport] | None = None,
    ) -> None:
        self.saved = saved
        self.stages = stages or {}
        self.past = past or Counter()
        self.step = step
        self.links = links or {}

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        """Add another worker's."""
        assert isinstance(other, WorkerMetadata)
        stages, links = {**self.stages, **other.stages}, {**self.links, **other.links}
        step = max(self.step, other.step)
        return WorkerMetadata(self.saved + other.saved, stages, self.past + other.past, step, links)


@attrs.frozen
class _About:
    lora_id: int | None
    lora_name: str | None


@attrs.frozen
class Teller:
    """Makes events of the changes of one group's blocks, which vLLM calls a `kind`."""

    changes: BlockEvents
    group: LayerGroup
    kind: str

    def take(self) -> Iterator[BlockStored | BlockRemoved]:
        """Take the changes, as events."""
        for whole in self.changes.take():
            for first in range(0, len(whole.names), _MOST_BLOCKS):
                yield self._event(whole.part(first, first + _MOST_BLOCKS))

    def _event(self, change: Run) -> BlockStored | BlockRemoved:
        where = {"medium": MEDIUM_STORAGE, "group_idx": self.group.index, "locality": _REMOTE}
        if not change.tokens:
            return BlockRemoved(block_hashes=list(change.names), **where)
        return BlockStored(
            block_hashes=list(change.names),
            parent_block_hash=change.parent,
            token_ids=list(change.tokens),
            block_size=self.group.block_tokens,
            lora_id=change.about.lora_id,
            lora_name=change.about.lora_name,
            extra_keys=to_event_extra_keys(change.extra_keys),
            kv_cache_spec_kind=self.kind,
            **where,
        )


def teller_of(vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig, groups: Sequence[LayerGroup]) -> Teller | None:
    """Return the teller for the first group of full attention, if events are wanted."""
    told = next((group for group in groups if group.is_full), None)
    config = vllm_config.kv_events_config
    if told is None or config is None or not config.enable_kv_cache_events:
        return None
    _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    if told.block_tokens % hash_tokens:
        return None  # vLLM has no hashes of its blocks
    changes = BlockEvents(vllm_config.parallel_config.world_size, describer(told, hash_tokens))
    kind = get_kv_cache_spec_kind(kv_cache_config.kv_cache_groups[told.index].kv_cache_spec)
    return Teller(changes, told, kind.value)


def describer(group: LayerGroup, hash_tokens: int) -> Callable[[Any, int, int], Run]:
    """Return a function that describes this group's blocks of `hash_tokens` tokens."""
    each = group.block_tokens // hash_tokens

    def describe(request: Any, first: int, end: int) -> Run:
        ends = range(max(first, 1), end + 1)
        hashes = [maybe_convert_block_hash(request.block_hashes[number * each - 1]) for number in ends]
        parent = hashes.pop(0) if first else None
        tokens = request.all_token_ids[first * group.block_tokens : end * group.block_tokens]
        lora = request.lora_request
        about = _About(lora.adapter_id, lora.name) if lora else _About(None, None)
        return Run(tuple(hashes), parent, tuple(tokens), about, _extra_keys(request, group, first, end))

    return describe


def _extra_keys(request: Any, group: LayerGroup, first: int, end: int) -> tuple[Any, ...]:
    keys, image = [], 0
    for number in range(first, end):
        start = number * group.block_tokens
        own, image = generate_block_hash_extra_keys(request, start, start + group.block_tokens, image)
        keys.append(own)
    return tuple(keys) if any(keys) else ()


_NEW: Final = b"dump"
_NAME_BYTES: Final = 8
_MOST_DUMPS: Final = 8
_KEPT_S: Final = 30.0
"""How long a dump is kept after it was last read."""
_MOST_WAITING: Final = 4
"""Parts for one router that does not read them, beside what the kernel holds."""
_MOST_REQUEST_BYTES: Final = 1024


@attrs.define
class _Kept:
    dump: Dump
    read_s: float


class DumpAnswers:
    """Answers requests for dumps of these blocks. `encode` makes a batch of blocks."""

    def __init__(
        self,
        blocks: StoredBlocks,
        encode: Callable[[Iterable[Run]], bytes],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._blocks = blocks
        self._encode = encode
        self._clock = clock
        self._kept: dict[bytes, _Kept] = {}

    def answer(self, request: Sequence[bytes]) -> list[bytes]:
        """Return the frames of the answer to the frames of a request."""
        now = self._clock()
        self._kept = {name: kept for name, kept in self._kept.items() if now - kept.read_s < _KEPT_S}
        match [*request]:
            case [word] if word == _NEW:
                if len(self._kept) >= _MOST_DUMPS:
                    return _refusal(f"{_MOST_DUMPS} dumps are being read; ask again in a moment")
                name, number = os.urandom(_NAME_BYTES), 0
                self._kept[name] = _Kept(self._blocks.dump(), now)
            case [place] if len(place) == _NAME_BYTES + 8:
                name, number = place[:_NAME_BYTES], int.from_bytes(place[_NAME_BYTES:], "big")
            case _:
                return _refusal("a request is one frame: the word dump, or a dump's name and the number of a part")
        kept = self._kept.get(name)
        if kept is None or number >= kept.dump.parts:
            return _refusal("there is no such part any more; ask for a new dump")
        kept.read_s = now
        if number == kept.dump.parts - 1:
            del self._kept[name]
        header = {
            "dump": name,
            "next": kept.dump.next_batch,
            "part": number,
            "parts": kept.dump.parts,
            "blocks": len(kept.dump),
            "left_out": kept.dump.left_out,
        }
        return [msgspec.msgpack.encode(header), self._encode(kept.dump.part(number))]


def _refusal(error: str) -> list[bytes]:
    return [msgspec.msgpack.encode({"error": error}), b""]


class DumpServer:
    """Answers at an address, in a thread, from `start` to `close`.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, endpoint: str, answers: DumpAnswers) -> None:
        self._answers = answers
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, _MOST_WAITING)
        self._router.setsockopt(zmq.MAXMSGSIZE, _MOST_REQUEST_BYTES)
        try:
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"events_dump_endpoint: cannot listen at {endpoint}: {error}") from error
        self.endpoint: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._closing, self._closed = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._closed.bind("inproc://closed")
        self._closing.connect("inproc://closed")
        self._thread = threading.Thread(target=self._run, name="infinistore-dumps", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        start_thread(self._thread)

    def close(self) -> None:
        """Answer no more."""
        if self._thread.is_alive():
            self._closing.send(b"")
            self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._router, self._closed):
            poller.register(socket, zmq.POLLIN)
        while self._closed not in (ready := dict(poller.poll())):
            if self._router in ready:
                router, *request = self._router.recv_multipart()
                # A REQ socket sends an empty frame first, and a DEALER has to.
                answer = self._answers.answer(request[1:] if request[:1] == [b""] else ())
                self._router.send_multipart([router, b"", *answer])


LOG = logging.getLogger("vllm.infinistore")

_NAME = "zmq, with dumps at "


@attrs.frozen
class _Place:
    """What a removal says of its blocks, too."""

    medium: str | None
    group_idx: int | None
    ownership: str | None

    @classmethod
    def of(cls, event: BlockStored | BlockRemoved) -> "_Place":
        return cls(event.medium, event.group_idx, event.ownership)


_ABOUT = ("block_size", "lora_id", "lora_name", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality")


def offer_dumps(config: "KVEventsConfig | None", endpoint: str, blocks: int) -> None:
    """Have vLLM's scheduler create this publisher, from vLLM's own configuration.

    Raises:
        ConfigError: vLLM publishes no events, or not by ZMQ.
    """
    if config is None or not config.enable_kv_cache_events:
        raise ConfigError("events_dump_endpoint needs events: --kv-events-config '{\"enable_kv_cache_events\": true}'")
    if config.publisher.startswith(_NAME):
        LOG.warning("InfiniStore: two connectors have an events_dump_endpoint; the first one's dumps have all blocks")
        return
    if config.publisher != "zmq":
        raise ConfigError(f'events_dump_endpoint needs the publisher "zmq", not "{config.publisher}"')
    name = f"{_NAME}{endpoint}, of {blocks} blocks"
    try:
        EventPublisherFactory.register_publisher(
            name, partial(DumpingPublisher, dump_endpoint=endpoint, dump_blocks=blocks)
        )
    except KeyError:
        LOG.debug("InfiniStore: another engine of this process had the same dumps before")
    config.publisher = name


class DumpingPublisher(ZmqEventPublisher):
    """vLLM's, which gives dumps at `dump_endpoint` of at most `dump_blocks` blocks.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, data_parallel_rank: int, *, dump_endpoint: str, dump_blocks: int, **options: Any) -> None:
        self._blocks = StoredBlocks(most=dump_blocks)
        self._most_blocks = dump_blocks
        self._told_left_out = False
        answers = DumpAnswers(self._blocks, lambda runs: batch_of(runs, data_parallel_rank))
        self._dumps = DumpServer(self.offset_endpoint_port(dump_endpoint, data_parallel_rank), answers)
        self.dump_endpoint = self._dumps.endpoint
        super().__init__(data_parallel_rank, **options)
        self._dumps.start()

    def publish(self, events: EventBatch) -> None:
        """Publish a batch, and remember what it tells."""
        super().publish(events)
        with self._blocks.batch():
            for event in events.events:
                follow(self._blocks, event)
        if self._blocks.left_out and not self._told_left_out:
            self._told_left_out = True
            LOG.warning(
                "InfiniStore: dumps of events are no longer complete: there are more than %d blocks; set a larger"
                " events_dump_blocks",
                self._most_blocks,
            )

    def shutdown(self) -> None:
        """Stop both."""
        super().shutdown()
        self._dumps.close()


def follow(blocks: StoredBlocks, event: object) -> None:
    """Note what an event tells of these blocks."""
    if isinstance(event, BlockStored):
        _store(blocks, event)
    elif isinstance(event, BlockRemoved):
        blocks.remove(_Place.of(event), event.block_hashes)
    elif isinstance(event, AllBlocksCleared):
        blocks.clear(lambda place: place.medium in (MEDIUM_GPU, None))


def _store(blocks: StoredBlocks, event: BlockStored) -> None:
    place, names = _Place.of(event), event.block_hashes
    about = tuple(getattr(event, name) for name in _ABOUT)
    if len(event.token_ids) in (0, event.block_size * len(names)):
        if names:
            blocks.store(Run(names, event.parent_block_hash, event.token_ids, about, event.extra_keys or (), place))
        return
    for name in names:  # blocks between these are not kept, and nothing says which
        blocks.store(Run([name], about=about, place=place))


def batch_of(runs: Iterable[Run], data_parallel_rank: int) -> bytes:
    """Return a batch that stores these blocks, as vLLM sends it."""
    events = [
        BlockStored(
            block_hashes=list(run.names),
            parent_block_hash=run.parent,
            token_ids=list(run.tokens),
            extra_keys=list(run.extra_keys) or None,
            **attrs.asdict(cast("_Place", run.place)),
            **dict(zip(_ABOUT, cast("tuple[Any, ...]", run.about), strict=True)),
        )
        for run in runs
    ]
    encoded: bytes = msgspec.msgpack.encode(KVEventBatch(time.time(), events, data_parallel_rank))
    return encoded
