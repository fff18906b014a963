"""Dumps of what vLLM's events have told, by vLLM's own publisher and types: who comes
late knows what one does who has followed from the start.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.errors import ConfigError
from infinistore.integrations.vllm.block_events import StoredBlocks
from tests.ports import own_ports

from .dumps import following
from .marks import NEEDS_VLLM

pytestmark = NEEDS_VLLM

BLOCK = 4
MOST = 100_000


def stored(names: Sequence[int], parent: int | None = None, medium: str = "GPU", **changes: Any) -> Any:
    """Blocks with these names, one behind the other."""
    from vllm.distributed.kv_events import BlockStored

    tokens = [name * BLOCK + place for name in names for place in range(BLOCK)]
    given = {"block_size": BLOCK, "lora_id": None, "lora_name": None, "group_idx": 0, **changes}
    return BlockStored(block_hashes=[*names], parent_block_hash=parent, token_ids=tokens, medium=medium, **given)


def removed(names: Sequence[int], medium: str = "GPU") -> Any:
    from vllm.distributed.kv_events import BlockRemoved

    return BlockRemoved(block_hashes=[*names], medium=medium, group_idx=0)


@contextmanager
def publishing(folder: Path, **options: Any) -> Iterator[Any]:
    from infinistore.integrations.vllm.kv_events import DumpingPublisher

    given = {"dump_endpoint": f"ipc://{folder}/dumps", "dump_blocks": MOST, "endpoint": f"ipc://{folder}/live"}
    publisher = DumpingPublisher(0, **{**given, "replay_endpoint": f"ipc://{folder}/replay", **options})
    try:
        yield publisher
    finally:
        publisher.shutdown()


def publish(publisher: Any, *events: Any) -> None:
    from vllm.distributed.kv_events import KVEventBatch

    publisher.publish(KVEventBatch(ts=0.0, events=[*events]))


@contextmanager
def asking(folder: Path, *, most: int = 1000) -> Iterator[Any]:
    import zmq

    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, 60_000)
            socket.setsockopt(zmq.RCVHWM, most)
            socket.connect(f"ipc://{folder}/dumps")
            yield socket
    finally:
        context.destroy(linger=0)


def decoded(answer: Sequence[bytes]) -> tuple[dict[str, Any], list[Any]]:
    """An answer's header, and its events by vLLM's own types."""
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch

    header, batch = answer
    events = msgspec.msgpack.Decoder(KVEventBatch).decode(batch).events if batch else []
    return msgspec.msgpack.decode(header), events


def all_events(answers: Any) -> list[Any]:
    header, events = decoded(answers.answer([b"dump"]))
    for part in range(1, header["parts"]):
        events += decoded(answers.answer([header["dump"] + part.to_bytes(8, "big")]))[1]
    return events


def numbered(header: dict[str, Any], part: int) -> list[bytes]:
    dump: bytes = header["dump"]
    return [dump + part.to_bytes(8, "big")]


class MadePublisher:
    """Without sockets."""

    def __init__(self, most: int = MOST, clock: Callable[[], float] = lambda: 0.0) -> None:
        from infinistore.integrations.vllm.kv_events import DumpAnswers, batch_of, follow

        self.blocks = StoredBlocks(most=most)
        self._follow = follow
        self.answers = DumpAnswers(self.blocks, lambda runs: batch_of(runs, 0), clock=clock)

    def tell(self, *events: Any) -> None:
        with self.blocks.batch():
            for event in events:
                self._follow(self.blocks, event)


def test_events_are_told_again_as_they_were() -> None:
    made = MadePublisher()
    whole = [
        stored([1, 2, 3], extra_keys=[("salt",), None, ("image", 7)], lora_id=3, lora_name="adapter"),
        stored([4], 3, block_size=2 * BLOCK // 2, kv_cache_spec_kind="full_attention"),
        stored([1, 2], medium="STORAGE", locality="REMOTE", kv_cache_spec_kind="full_attention"),
        stored([5], group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=128),
        stored([6], 5, group_idx=1, ownership="tier 2"),
        stored([7], session_id=None),
    ]
    made.tell(*whole)

    def key(event: Any) -> str:
        return repr((event.medium, event.group_idx, event.ownership, event.block_hashes))

    assert sorted(all_events(made.answers), key=key) == sorted(whole, key=key)


def test_blocks_of_which_nothing_says_where_they_are_are_told_without_tokens() -> None:
    """vLLM tells all tokens of a window, and not which blocks of it are kept."""
    made = MadePublisher()
    event = stored([1, 2, 3, 4])
    event.block_hashes = [2, 4]
    made.tell(event, removed([2]))

    assert [(event.block_hashes, event.token_ids, event.parent_block_hash) for event in all_events(made.answers)] == [
        ([4], [], None)
    ]


def test_a_reset_of_the_engines_memory_leaves_what_is_stored_elsewhere() -> None:
    from vllm.distributed.kv_events import AllBlocksCleared

    made = MadePublisher()
    made.tell(stored([1, 2]), stored([1], medium="STORAGE"), AllBlocksCleared())

    assert [(event.medium, event.block_hashes) for event in all_events(made.answers)] == [("STORAGE", [1])]


def test_an_empty_dump_has_one_part_and_says_which_batch_is_next() -> None:
    made = MadePublisher()
    header, events = decoded(made.answers.answer([b"dump"]))
    assert (header["next"], header["parts"], header["blocks"], header["left_out"], events) == (0, 1, 0, 0, [])
    made.tell(stored([1]))
    made.tell()
    header, _ = decoded(made.answers.answer([b"dump"]))
    assert (header["next"], header["blocks"]) == (2, 1)


def test_all_parts_of_a_dump_are_of_the_same_moment() -> None:
    made = MadePublisher()
    made.tell(stored(range(1, 3001)))
    header, events = decoded(made.answers.answer([b"dump"]))
    made.tell(removed(range(1, 3001)))
    assert (header["next"], header["parts"]) == (1, 3)
    for part in (1, 2):
        told, more = decoded(made.answers.answer(numbered(header, part)))
        assert (told["part"], told["dump"], told["next"]) == (part, header["dump"], 1)
        events += more

    assert [name for event in events for name in event.block_hashes] == [*range(1, 3001)]
    assert decoded(made.answers.answer(numbered(header, 2)))[0].keys() == {"error"}  # it has been read
    assert decoded(made.answers.answer([b"dump"]))[0]["blocks"] == 0


def test_dumps_that_nobody_reads_on_are_forgotten_and_there_are_only_so_many() -> None:
    now = 0.0
    made = MadePublisher(clock=lambda: now)
    made.tell(stored(range(1, 3001)))
    begun = [decoded(made.answers.answer([b"dump"]))[0] for _ in range(8)]
    assert "8 dumps are being read" in decoded(made.answers.answer([b"dump"]))[0]["error"]
    now = 29.0
    assert decoded(made.answers.answer(numbered(begun[0], 1)))[0]["part"] == 1
    now = 31.0
    assert "ask for a new dump" in decoded(made.answers.answer(numbered(begun[1], 1)))[0]["error"]
    assert decoded(made.answers.answer(numbered(begun[0], 2)))[0]["part"] == 2
    assert decoded(made.answers.answer([b"dump"]))[0]["parts"] == 3


def test_a_dump_says_how_many_blocks_are_left_out() -> None:
    made = MadePublisher(most=3)
    made.tell(stored([1, 2, 3, 4, 5]))
    header, events = decoded(made.answers.answer([b"dump"]))
    assert (header["blocks"], header["left_out"], events) == (3, 2, [stored([1, 2, 3])])
    made.tell(removed([4]))
    assert decoded(made.answers.answer([b"dump"]))[0]["left_out"] == 1


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_request_has_an_answer(frames: list[bytes]) -> None:
    header, _ = decoded(MadePublisher().answers.answer(frames))

    assert header.keys() == ({"error"} if frames != [b"dump"] else header.keys())


def test_who_joins_while_batches_are_published_has_the_same_as_who_saw_all(tmp_path: Path) -> None:
    """Chains that are stored, prolonged and removed, in memory and in a store."""
    with ExitStack() as stack:
        publisher = stack.enter_context(publishing(tmp_path))
        followers = [stack.enter_context(following(tmp_path))]
        stop = threading.Event()

        def work() -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                first, middle, end, last = (turn * 50 + place for place in (0, 20, 50, -5000))
                publish(publisher, stored(range(first, middle)))
                publish(publisher, stored([first], medium="STORAGE"), removed([first + 7]))
                publish(publisher, stored([first + 7], first + 6), stored(range(middle, end), middle - 1))
                if last >= 50:
                    publish(publisher, removed(range(last, last + 50)))

        writer = threading.Thread(target=work)
        writer.start()
        for _ in range(6):
            followers.append(stack.enter_context(following(tmp_path)))
            for follower in followers:
                follower.follow(0.1)
        stop.set()
        writer.join()
        followers.append(stack.enter_context(following(tmp_path)))
        publish(publisher, stored([49]))
        for follower in followers:
            while ("GPU", 0, 49) not in follower.blocks:
                assert follower.follow(60.0)

        first = followers[0]
        assert {medium for medium, _, _ in first.blocks} == {"GPU", "STORAGE"}
        for follower in followers[1:]:
            assert (follower.blocks, follower.left_out) == (first.blocks, 0)


def test_one_that_missed_batches_or_an_end_of_its_engine_takes_a_new_dump(tmp_path: Path) -> None:
    with publishing(tmp_path) as publisher, following(tmp_path) as follower:
        while not follower.follow(0.1):  # until it has subscribed
            publish(publisher)
        while follower.follow(0.1):
            pass
        before = follower.dumps
        publish(publisher, stored([1, 2]))
        follower.miss(60.0)
        publish(publisher, removed([1]))
        assert follower.follow(60.0)
        assert (follower.blocks, follower.dumps) == (Counter({("GPU", 0, 2): 1}), before + 1)
        publisher.shutdown()
        with publishing(tmp_path) as another:
            publish(another, stored([3]))
            while follower.blocks != Counter({("GPU", 0, 3): 1}):
                follower.follow(0.1)
        assert follower.dumps == before + 2


def zmq_constant(name: str) -> Any:
    import zmq

    return getattr(zmq, name)


def test_one_that_does_not_read_has_few_parts_waiting_and_sees_which_are_missing(tmp_path: Path) -> None:
    from infinistore.integrations.vllm.kv_events import DumpServer

    made = MadePublisher()
    made.tell(stored(range(1, 60_001)))
    answered = threading.Semaphore(0)

    class Counted:
        def answer(self, request: Sequence[bytes]) -> list[bytes]:
            try:
                return made.answers.answer(request)
            finally:
                answered.release()

    counted: Any = Counted()
    server = DumpServer(f"ipc://{tmp_path}/dumps", counted)
    server.start()
    with asking(tmp_path, most=1) as slow, asking(tmp_path) as quick:
        slow.send_multipart([b"", b"dump"])
        header, _ = decoded(slow.recv_multipart()[1:])
        assert header["parts"] == 59
        for part in range(1, 58):  # and never reads
            slow.send_multipart([b"", *numbered(header, part)])
        for _ in range(58):
            assert answered.acquire(timeout=60)
        quick.send_multipart([b"", b"dump"])
        assert decoded(quick.recv_multipart()[1:])[0]["parts"] == 59

        parts = []
        while slow.poll(1000):
            parts.append(decoded(slow.recv_multipart()[1:])[0]["part"])
        assert parts == sorted(set(parts))
        assert len(parts) < 40, "what is not read is not bounded"
    server.close()


def test_vllms_replay_is_what_it_was(tmp_path: Path) -> None:
    from .test_events import replayed, socket_of

    with publishing(tmp_path, buffer_steps=3) as publisher:
        for number in range(5):
            publish(publisher, stored([number + 1]))
        with socket_of(zmq_constant("DEALER"), f"ipc://{tmp_path}/replay") as socket:
            batches = replayed(socket, 0)
            while batches[-1].number < 4:
                batches = replayed(socket, 0)
            assert [(batch.number, batch.events) for batch in batches] == [(n, [stored([n + 1])]) for n in (2, 3, 4)]


def test_an_address_that_is_in_use_is_told_by_the_name_of_the_setting(tmp_path: Path) -> None:
    from infinistore.integrations.vllm.kv_events import DumpServer

    (port,) = own_ports(1)
    server = DumpServer(f"tcp://127.0.0.1:{port}", MadePublisher().answers)
    with pytest.raises(ConfigError, match=r"events_dump_endpoint: cannot listen at .* in use"):
        DumpServer(f"tcp://127.0.0.1:{port}", MadePublisher().answers)
    server.close()


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (None, "needs events"),
        (SimpleNamespace(enable_kv_cache_events=False, publisher="zmq"), "needs events"),
        (SimpleNamespace(enable_kv_cache_events=True, publisher="null"), 'needs the publisher "zmq", not "null"'),
    ],
)
def test_dumps_need_events(config: Any, complaint: str) -> None:
    from infinistore.integrations.vllm.kv_events import offer_dumps

    with pytest.raises(ConfigError, match=complaint):
        offer_dumps(config, "ipc://dumps", 10)


def test_vllms_scheduler_creates_the_publisher_that_gives_dumps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import EventPublisherFactory

    from infinistore.integrations.vllm.kv_events import DumpingPublisher, offer_dumps

    for _ in range(2):  # two engines in turn
        config = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/live")
        for _ in range(2):  # two connectors of one engine
            offer_dumps(config, f"ipc://{tmp_path}/dumps", 10)
        publisher = EventPublisherFactory.create(config)
        assert isinstance(publisher, DumpingPublisher)
        told = publisher.get_publisher_config()
        assert (told.publisher, told.endpoint) == ("zmq", f"ipc://{tmp_path}/live")
        publisher.shutdown()
