"""vLLM's publisher of KV cache events, which also gives dumps to who comes late.

It does all that vLLM's does, and vLLM's own code does that: batches have the numbers in
which they are handed over here, so counting them is enough to know a batch's number.
"""

import logging
import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import attrs
import msgspec
from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisherFactory,
    KVEventBatch,
    ZmqEventPublisher,
)

from infinistore.errors import ConfigError
from infinistore.integrations.vllm.block_events import Run, StoredBlocks
from infinistore.integrations.vllm.event_dumps import DumpAnswers, DumpServer

if TYPE_CHECKING:
    from vllm.config import KVEventsConfig

__all__ = ["DumpingPublisher", "batch_of", "follow", "offer_dumps"]

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


_ABOUT = (
    "block_size",
    "lora_id",
    "lora_name",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
)


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
            blocks.store(Run(place, names, event.parent_block_hash, event.token_ids, event.extra_keys or (), about))
        return
    for name in names:  # blocks between these are not kept, and nothing says which
        blocks.store(Run(place, [name], about=about))


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
