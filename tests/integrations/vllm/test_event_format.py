"""The connector's events as bytes: what routers get that read them with a decoder of
their own.
"""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from infinistore.integrations.vllm.block_events import StoredBlocks

pytest.importorskip("vllm", reason="needs vLLM: make test-integrations")
pytestmark = pytest.mark.filterwarnings("ignore")

BLOCK_TOKENS = 4
HASHES = [bytes([number]) * 32 for number in (1, 2)]
TOKENS = list(range(100, 108))
EXTRA_KEYS = ((("lora", "adapter"), ("cache_salt", "s")), (("lora", "adapter"), ("mm", "image", 3)))
"""As the hashes have them; events have them without their kinds."""
BY_PLACE = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
"""A stored block, after its tag, as routers read it; then extra keys and the group."""


def published(
    lora_name: str | None = None,
    names: Sequence[Any] = HASHES,
    parent: Any = b"\x09" * 32,
    kind: str = "full_attention",
) -> bytes:
    """What vLLM's publisher sends: two stored blocks, and the second removed."""
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch

    from infinistore.integrations.vllm.block_events import Run
    from infinistore.integrations.vllm.kv_events import Teller

    about = SimpleNamespace(lora_id=7 if lora_name else None, lora_name=lora_name)

    class Changes:
        def take(self) -> Iterator[Run]:
            yield Run(tuple(names), parent, tuple(TOKENS), about, EXTRA_KEYS if lora_name else ())
            yield Run((names[1],), None, ())

    group = SimpleNamespace(index=0, block_tokens=BLOCK_TOKENS)
    changes: Any = Changes()
    made: Any = group
    batch = KVEventBatch(ts=1.5, events=list(Teller(changes, made, kind).take()), data_parallel_rank=0)
    written: bytes = msgspec.msgpack.encode(batch)
    return written


@pytest.mark.parametrize("lora_name", [None, "adapter"])
def test_the_bytes_are_those_of_a_plain_encoder(lora_name: str | None) -> None:
    """A map for each event, in an array of the time, the events and the rank."""
    import msgspec

    stored = {
        "type": "BlockStored",
        "block_hashes": HASHES,
        "parent_block_hash": b"\x09" * 32,
        "token_ids": TOKENS,
        "block_size": BLOCK_TOKENS,
        "lora_id": 7 if lora_name else None,
        "medium": "STORAGE",
        "lora_name": lora_name,
        **({"extra_keys": [["adapter", "s"], ["adapter", ["image", 3]]]} if lora_name else {}),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "locality": "REMOTE",
    }
    removed = {
        "type": "BlockRemoved",
        "block_hashes": HASHES[1:],
        "medium": "STORAGE",
        "group_idx": 0,
        "locality": "REMOTE",
    }

    assert published(lora_name) == msgspec.msgpack.encode([1.5, [stored, removed], 0])


def test_fields_have_the_places_that_readers_of_arrays_know() -> None:
    """An event is an array, without names, where the engine writes it as one."""
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    assert list(BlockStored.__struct_fields__[:9]) == [*BY_PLACE, "extra_keys", "group_idx"]
    assert list(BlockRemoved.__struct_fields__[:3]) == ["block_hashes", "medium", "group_idx"]


@pytest.mark.parametrize("lora_name", [None, "adapter"])
@pytest.mark.parametrize("router", ["llm_d", "aibrix"])
def test_the_rules_of_routers_in_go_take_every_event(router: str, lora_name: str | None) -> None:
    """By numbers, as is vLLM's default, and by bytes."""
    read = reader(router)
    medium = "storage" if router == "llm_d" else "STORAGE"
    names = [(1 << 64) - 1, 7]

    stored, gone = read(published(lora_name, names, 9))
    assert (stored.hashes, stored.parent, stored.tokens, stored.medium) == (names, 9, len(TOKENS), medium)
    assert (gone.kind, gone.hashes, gone.medium) == ("BlockRemoved", [7], medium)
    assert [event.hashes for event in read(published(lora_name))] == [
        [int.from_bytes(name[:8], "big") for name in HASHES],
        [int.from_bytes(HASHES[1][:8], "big")],
    ]


@pytest.mark.parametrize("router", ["llm_d", "aibrix"])
def test_the_rules_of_routers_in_go_take_a_dump(router: str) -> None:
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch

    from infinistore.integrations.vllm.kv_events import batch_of, follow

    blocks = StoredBlocks(most=10)
    told = msgspec.msgpack.Decoder(KVEventBatch).decode(published("adapter", [5, 7], 9)).events
    with blocks.batch():
        follow(blocks, told[0])

    (stored,) = reader(router)(batch_of(blocks.dump().part(0), 0))
    assert (stored.hashes, stored.parent, stored.tokens) == ([5, 7], 9, len(TOKENS))


def test_the_rules_of_llm_d_leave_out_what_does_not_say_its_kind() -> None:
    with pytest.raises(ValueError, match="a group says what it is"):
        reader("llm_d")(published(kind="mamba"))


def reader(router: str) -> Callable[[bytes], Any]:
    from .router_rules import read_as_aibrix, read_as_llm_d

    return read_as_llm_d if router == "llm_d" else read_as_aibrix
