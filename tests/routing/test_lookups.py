"""What a router finds out of a prompt: its tokens, and what the store has of it."""

import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from infinistore.addresses import ROUTER_STATUS_PATH
from infinistore.client import AsyncStore, open_store
from infinistore.errors import StoreUnavailable
from infinistore.integrations.internal.prefix_keys import PrefixChain
from infinistore.integrations.vllm.announcements import ENGINES_PREFIX, URLS_PREFIX, AnnouncedBlocks, AnnouncedEngine
from infinistore.integrations.vllm.blocks import BlockNames, salt_key
from tests.routing.fakes import MODEL, FakeEngine, World, routed

KIND = AnnouncedBlocks(
    BlockNames(f"vllm/{MODEL}/0123", ("0", "1")), block_tokens=16, hash_tokens=16, bytes_per_token=64
)


@asynccontextmanager
async def with_store(*names: str, **options: Any) -> AsyncIterator[tuple[World, AsyncStore]]:
    """A router before engines that have announced themselves in a store of its own."""
    async with open_store(pool_bytes=16 * 1024 * 1024) as store:
        await announce(store, *names)
        async with routed(*names, store=store, policy="soonest", **options) as world:
            yield world, store


async def announce(store: AsyncStore, *names: str, kind: AnnouncedBlocks = KIND) -> None:
    """Do as engines with this URL do."""
    where = f"vllm-engines/{kind.names.prefix.removeprefix('vllm/')}"
    await store.put(where, kind.write())
    for name in names:
        engine = AnnouncedEngine(f"http://{name}", where, 16_000)
        await store.put(engine.key, engine.write())


async def put_blocks(store: AsyncStore, tokens: Sequence[int], salt: str = "", kind: AnnouncedBlocks = KIND) -> None:
    """Store the full blocks of a prompt, as an engine does."""
    hashes = PrefixChain(kind.hash_tokens, extra=lambda first, end: salt_key(salt, first)).extend(tokens)
    await store.put_many([(key, b"block") for key in kind.names.all_keys(hashes)])


def sources(metrics: str) -> dict[str, float]:
    """Where the tokens of prompts were expected."""
    lines = [line for line in metrics.splitlines() if line.startswith("infinistore_router_prompt_tokens_total{")]
    return {line.partition('"')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_what_the_store_has_of_a_prompt_is_expected_from_there(autojump_clock: MockClock) -> None:
    async with with_store("a") as (world, store):
        tokens = list(range(100))
        await put_blocks(store, tokens[:64])
        await world.complete(tokens)
        assert sources((await world.ask("/metrics"))[1]) == {"engine": 0, "store": 64, "computed": 36}
        await world.complete(tokens)  # which the engine has now
        assert sources((await world.ask("/metrics"))[1]) == {"engine": 96, "store": 64, "computed": 40}


async def test_a_text_is_looked_up_by_the_tokens_that_an_engine_makes_of_it(autojump_clock: MockClock) -> None:
    async with with_store("a") as (world, store):
        await put_blocks(store, [ord(one) for one in "x" * 64])
        await world.complete("x" * 100)
        assert sources((await world.ask("/metrics"))[1])["store"] == 64


async def test_prompts_with_another_salt_have_other_blocks(autojump_clock: MockClock) -> None:
    async with with_store("a") as (world, store):
        await put_blocks(store, range(64), salt="mine")
        await world.complete(list(range(100)))
        assert sources((await world.ask("/metrics"))[1])["store"] == 0
        await world.complete(list(range(100)), cache_salt="mine")
        assert sources((await world.ask("/metrics"))[1])["store"] == 64


async def test_the_last_token_of_a_prompt_is_computed_even_if_all_is_stored(autojump_clock: MockClock) -> None:
    async with with_store("a") as (world, store):
        await put_blocks(store, range(64))
        await world.complete(list(range(64)))
        assert sources((await world.ask("/metrics"))[1]) == {"engine": 0, "store": 63, "computed": 1}


async def test_turns_of_a_chat_are_looked_up_by_what_the_whole_chat_is(autojump_clock: MockClock) -> None:
    """Its beginning is not tokenized again, and its blocks are those of the whole."""
    turns = ["a long question about something " * 8, "an answer that is as long " * 8, "what?"]
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
    whole = "".join(f"<{one['role']}>{one['content']}</s>" for one in messages) + "<assistant>"
    async with with_store("a") as (world, store):
        await put_blocks(store, [ord(one) for one in whole])
        await world.ask("/v1/chat/completions", {"model": MODEL, "messages": messages[:1]})
        before = sources((await world.ask("/metrics"))[1])
        await world.ask("/v1/chat/completions", {"model": MODEL, "messages": messages})
        after = sources((await world.ask("/metrics"))[1])
        assert sum(after.values()) - sum(before.values()) == len(whole)
        assert after["store"] + after["engine"] - before["store"] - before["engine"] == len(whole) // 16 * 16
        assert [len(one["messages"]) for one in world.engines["http://a"].tokenized] == [1, 3]


async def test_a_chat_whose_beginning_was_cut_is_looked_up_as_it_is_now(autojump_clock: MockClock) -> None:
    texts = [f"message number {number} of a chat " * 4 for number in range(7)]
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    async with with_store("a") as (world, _):
        for kept in (messages[:5], messages[2:]):
            await world.ask("/v1/chat/completions", {"model": MODEL, "messages": kept})
        assert len(world.engines["http://a"].tokenized[-1]["messages"]) == 5


async def test_a_store_that_is_lost_is_no_error_and_counted(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_store("a") as (world, store):

        async def lost(*_: object, **__: object) -> int:
            raise StoreUnavailable("it is gone")

        monkeypatch.setattr(store, "match_prefix", lost)
        assert (await world.complete(list(range(100))))[0] == 200
        assert "infinistore_router_store_failures_total 1.0" in (await world.ask("/metrics"))[1]


async def test_a_store_that_says_nothing_costs_no_more_than_it_may(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_store("a", tokenize_s=0.05) as (world, store):

        async def hangs(*_: object, **__: object) -> int:
            await trio.sleep_forever()
            raise AssertionError("not reached")

        monkeypatch.setattr(store, "match_prefix", hangs)
        began = trio.current_time()
        assert (await world.complete(list(range(100))))[0] == 200
        assert trio.current_time() - began < 0.2


async def test_engines_come_and_go_with_what_they_announce(autojump_clock: MockClock) -> None:
    late = {"http://late": FakeEngine("http://late")}
    async with (
        open_store(pool_bytes=16 * 1024 * 1024) as store,
        routed(engines=late, store=store, announced=True) as world,
    ):
        assert (await world.complete())[0] == 503
        await announce(store, "late")
        await trio.sleep(31)
        assert (await world.complete())[0] == 200
        await store.delete(await store.keys(URLS_PREFIX))
        await trio.sleep(31)
        assert (await world.complete())[0] == 200  # it answers: its announcement may have been evicted
        late["http://late"].is_down = True
        await trio.sleep(60)
        assert len(world.router.fleet) == 0


async def test_junk_that_others_put_where_engines_announce_themselves_is_passed_over(
    autojump_clock: MockClock,
) -> None:
    async with open_store(pool_bytes=16 * 1024 * 1024) as store:
        await announce(store, "a")
        await store.put_many([(f"{URLS_PREFIX}{name}", value) for name in ("", "http://[", "x") for value in [b"\xff"]])
        for url in ("http://[", "http://a/\u00fc", "http://a b", f"http://{'a' * 70}"):
            await store.put(f"{URLS_PREFIX}{url}", AnnouncedEngine(url, f"{ENGINES_PREFIX}x", 3).write())
        await store.put(f"{ENGINES_PREFIX}junk", b"[[[[")
        async with routed("a", store=store, announced=True) as world:
            assert (await world.complete())[0] == 200
            engines = json.loads((await world.ask(ROUTER_STATUS_PATH))[1])["engines"]
            assert {one["url"]: one["up"] for one in engines} == {"http://a": True, f"http://{'a' * 70}": False}


async def test_engines_follow_a_file_that_changes_and_stay_if_it_is_wrong(
    autojump_clock: MockClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    both = {f"http://{name}": FakeEngine(f"http://{name}") for name in "ab"}
    file = tmp_path / "engines"
    file.write_text("http://a\n")
    async with routed(engines=both, engines_file=file) as world:

        async def urls_after(text: str) -> list[str]:
            file.write_text(text)
            await trio.sleep(3)
            return [member.address.url for member in world.router.fleet]

        assert await urls_after("http://b decode\nhttp://a\n") == ["http://a", "http://b"]
        with caplog.at_level(logging.WARNING):
            assert await urls_after("nonsense\n") == ["http://a", "http://b"]
        assert await urls_after("http://b decode\n") == ["http://b"]
        assert (await world.complete())[2]["x-infinistore-engine"] == "http://b"
    assert [record.getMessage() for record in caplog.records] == ["the engines stay as they were"]
