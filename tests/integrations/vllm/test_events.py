"""vLLM's own publisher of KV cache events, with what the connector tells: who follows
knows which blocks are in the store, by the hashes that vLLM has for its own.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from infinistore import blocking
from infinistore.integrations.vllm.block_events import BlockEvents, Run
from infinistore.integrations.vllm.blocks import LayerGroup
from tests.bad_days.servers import running_server_process

from .dumps import following
from .marks import NEEDS_VLLM
from .running import BENCH, Engines, made_prompts, tokens_of, url_of

pytestmark = [*NEEDS_VLLM, pytest.mark.process]

BLOCK = 32
END = 2**64 - 1
"""What a replay ends with in place of a number."""


class Batch(NamedTuple):
    """A batch of events, as vLLM's own types read it."""

    number: int
    events: list[Any]


def decoded(number: bytes, payload: bytes) -> Batch:
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch

    return Batch(int.from_bytes(number, "big"), msgspec.msgpack.Decoder(KVEventBatch).decode(payload).events)


@contextmanager
def socket_of(kind: int, endpoint: str, *, most: int = 100_000) -> Iterator[Any]:
    import zmq

    context = zmq.Context()
    with context.socket(kind) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 120_000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.set_hwm(most)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        yield socket
    context.term()


def replayed(asking: Any, first: int) -> list[Batch]:
    """Ask by a DEALER for all batches from a number on."""
    asking.send_multipart([b"", first.to_bytes(8, "big")])
    batches = []
    _, _, number, payload = asking.recv_multipart()
    while int.from_bytes(number, "big") != END:
        batches.append(decoded(number, payload))
        _, _, number, payload = asking.recv_multipart()
    return batches


class Follower:
    """A router's view of an engine: the names of the blocks of each medium."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[object]] = {"GPU": set(), "STORAGE": set()}
        self.tokens: dict[object, list[int]] = {}
        self.parents: dict[object, object] = {}
        self.numbers: list[int] = []

    def follow(self, batch: Batch) -> None:
        from vllm.distributed.kv_events import BlockRemoved

        self.numbers.append(batch.number)
        for event in batch.events:
            known = self.blocks[event.medium]
            if isinstance(event, BlockRemoved):
                known.difference_update(event.block_hashes)
                continue
            known.update(event.block_hashes)
            parent = event.parent_block_hash
            for place, name in enumerate(event.block_hashes):
                tokens = event.token_ids[place * event.block_size : (place + 1) * event.block_size]
                assert self.tokens.setdefault(name, tokens) == tokens
                assert self.parents.setdefault(name, parent) == parent
                parent = name


@pytest.mark.nightly
def test_who_follows_the_events_knows_what_is_stored(tmp_path: Path) -> None:
    import zmq
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved

    model = tmp_path / "model"
    command = [sys.executable, "-P", str(BENCH / "small_llama.py"), str(model), "--layers", "2", "--hidden", "192"]
    subprocess.run(command, check=True, capture_output=True)
    live, replay = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": live, "replay_endpoint": replay}
    with ExitStack() as stack:
        server = stack.enter_context(running_server_process("--prealloc-size", "64MiB"))
        store = stack.enter_context(blocking.open_store(server.url))
        subscriber = stack.enter_context(socket_of(zmq.SUB, live))
        engines = Engines(model, tmp_path, stack)
        settings = {"url": url_of(server), "events_dump_endpoint": f"ipc://{tmp_path}/dumps"}
        engine = engines.start("events", "kv_both", settings, kv_events_config=config)
        engine.wait_until_ready()
        prompts = made_prompts(21)
        follower = Follower()

        def next_batch() -> Batch:
            while not subscriber.poll(500):
                engine.ask([[7] * 5], max_tokens=1)  # it publishes where it computes
            return decoded(*subscriber.recv_multipart()[1:])

        def follow_until(blocks: int) -> None:
            while len(follower.blocks["STORAGE"]) != blocks:
                follower.follow(next_batch())

        cold = tokens_of(engine.ask(prompts))
        # Three blocks of 32 tokens are common to all, and each prompt has six more.
        follow_until(3 + 3 * 6)
        assert follower.blocks["STORAGE"] <= follower.blocks["GPU"]  # there are generated tokens, too
        assert follower.numbers == list(range(len(follower.numbers)))
        roots = {name for name in follower.blocks["STORAGE"] if follower.parents[name] is None}
        assert [follower.tokens[name] for name in roots] == [prompts[0][:BLOCK]]

        # Who comes late asks for what it has missed.
        late = Follower()
        for batch in replayed(stack.enter_context(socket_of(zmq.DEALER, replay)), 0):
            late.follow(batch)
        assert late.blocks == follower.blocks

        # Or it takes a dump, which has all, however old it is.
        with following(tmp_path) as later:
            while len(follower.numbers) < later.next_batch:
                follower.follow(next_batch())
            for medium, blocks in follower.blocks.items():
                assert {block for of, _, block in later.blocks if of == medium} == blocks
            assert later.left_out == 0

        # What is lost is told when a request misses it, and told as stored when it has
        # been written again.
        store.delete(store.keys("vllm/"))
        engine.reset()
        follower.blocks["GPU"].clear()
        assert tokens_of(engine.ask(prompts)) == cold
        before = len(follower.numbers)
        removed: list[object] = []
        while len(follower.blocks["STORAGE"]) != 21 or not removed:
            number, events = next_batch()
            removed += [name for event in events if isinstance(event, BlockRemoved) for name in event.block_hashes]
            follower.follow(Batch(number, [event for event in events if not isinstance(event, AllBlocksCleared)]))
        assert len(follower.numbers) > before
        assert follower.numbers == list(range(len(follower.numbers)))
        assert roots <= set(removed)


def test_a_subscriber_that_does_not_read_misses_batches_and_sees_that_it_did(tmp_path: Path) -> None:
    """What it has not read is dropped, and waits nowhere: neither the publisher nor
    other subscribers notice. The numbers have a gap, and a replay fills it as far as
    the publisher remembers.
    """
    import zmq
    from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

    from infinistore.integrations.vllm.kv_events import Teller

    # Of a replay that is read slowly, what is above ZMQ's bound of 1,000 would be
    # dropped, too.
    count, remembered, most = 4000, 900, 200
    live, replay = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"
    publisher = ZmqEventPublisher(0, live, replay, buffer_steps=remembered, hwm=most)
    group, about = LayerGroup(("0",), 8 * BLOCK), SimpleNamespace(lora_id=None, lora_name=None)
    tokens = tuple(range(100_000, 100_000 + 8 * BLOCK))  # more than the kernel has room for
    changes = BlockEvents(1, lambda request, first, end: Run((first,), first - 1, tokens, about))
    teller = Teller(changes, group, "full_attention")
    with ExitStack() as stack:
        slow = stack.enter_context(socket_of(zmq.SUB, live, most=most))
        quick = stack.enter_context(socket_of(zmq.SUB, live))
        while not (slow.poll(100) and quick.poll(100)):  # until both have subscribed
            publisher.publish(KVEventBatch(ts=0.0, events=[]))
        last = behind = decoded(*quick.recv_multipart()[1:]).number
        for number in range(count):
            changes.found(None, [str(number)])
            publisher.publish(KVEventBatch(ts=0.0, events=list(teller.take())))
            last = decoded(*quick.recv_multipart()[1:]).number
            while quick.poll(0):
                last = decoded(*quick.recv_multipart()[1:]).number
        while last < behind + count:
            last = decoded(*quick.recv_multipart()[1:]).number

        seen = [decoded(*slow.recv_multipart()[1:]).number]
        while slow.poll(1000):
            seen.append(decoded(*slow.recv_multipart()[1:]).number)
        assert len(seen) < count / 2, "what a subscriber has not read is not bounded"
        publisher.publish(KVEventBatch(ts=0.0, events=[]))
        after = decoded(*slow.recv_multipart()[1:]).number
        assert after > seen[-1] + 1, "it cannot see what it has missed"

        late = replayed(stack.enter_context(socket_of(zmq.DEALER, replay)), seen[-1] + 1)
        numbers = [batch.number for batch in late]
        assert numbers == list(range(after + 1 - remembered, after + 1))
        assert numbers[0] > seen[-1] + 1, "nor that it has missed more than is remembered"
    publisher.shutdown()
