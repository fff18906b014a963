"""The story that the demonstration tells, from the text to the table.

1. A server starts, unless the address of one is given.
2. The text becomes tokens, and the tokens two prompts: A is the text, B the text with
   one sentence put in.
3. A prefill and a decode process start and connect to the server.
4. For A, then for B: prefill finds what the store already has, computes the rest and
   stores it layer by layer; then decode finds it, loads it, and checks every byte.
5. With a disk: other prompts fill the pool, the server is restarted, and decode finds A
   again (`restart.py`).
6. With several nodes: one is killed, and another one joins (`nodes.py`).

This process plays the part of a router: it hands out the prompts and never touches a
byte of the cache.
"""

from collections.abc import Callable
from pathlib import Path

import trio

import infinistore
from infinistore.demo.display import Display, Plan
from infinistore.demo.layout import KVLayout
from infinistore.demo.messages import DemoError, Event, Job, Setup, expected_error
from infinistore.demo.nodes import ClusterActs, wait_for_view
from infinistore.demo.own_cluster import OwnCluster, own_cluster
from infinistore.demo.processes import OwnServer, WorkerProcess, own_server, start_worker
from infinistore.demo.restart import RestartAct
from infinistore.demo.result import DemoResult, PromptResult
from infinistore.demo.settings import CONTEXT_TOKENS, DemoSettings
from infinistore.demo.text import INSERTED_SENTENCE, Prompt, insertion_place, sample_text_file, token_ids, two_prompts
from infinistore.demo.watching import watched
from infinistore.sizes import describe_size

__all__ = ["prepare_text", "run_demo", "tokens_that_fit"]

_MAX_TEXT_BYTES = 1 << 20  # more than CONTEXT_TOKENS, for any text that people write
_USABLE_PART_OF_POOL = 0.75  # below what a server evicts at, so that nothing is lost between prefill and decode


def prepare_text(settings: DemoSettings) -> tuple[str, str]:
    """Return the name and the text of the file to use.

    Raises `DemoError` if it cannot be read, or is too short, or if the pool of a server
    that is to be started is too small for it.
    """
    source, text = _read_text(settings.input_file)
    if settings.url is None:
        tokens_that_fit(settings.layout, len(token_ids(text)), settings.pool_bytes)
    return source, text


async def run_demo(settings: DemoSettings, display: Display, prepared: tuple[str, str] | None = None) -> DemoResult:
    """Run the whole story and return what was found. Cancelled, it ends all its
    processes before it returns. `prepared` is what `prepare_text` gave.

    Raises `DemoError`, one line for the reader, if anything went wrong: a byte that
    differs, a process that ended, a server that did not start, a text that cannot be
    read or is too short. A server at `url` that cannot be used raises what `open_store`
    raises.
    """
    source, text = prepared or prepare_text(settings)
    try:
        if settings.url is not None:
            return await _tell(settings, settings.url, source, text, display)
        if settings.nodes:
            async with own_cluster(settings.nodes, settings.pool_bytes, display) as cluster:
                return await _tell(settings, cluster.url, source, text, display, cluster=cluster)
        async with own_server(settings.pool_bytes, disk=settings.disk) as server:
            display.server_started(server)
            return await _tell(settings, server.url, source, text, display, server=server)
    except BaseExceptionGroup as group:
        raise expected_error(group) or group from None


async def _tell(
    settings: DemoSettings,
    url: str,
    source: str,
    text: str,
    display: Display,
    *,
    server: OwnServer | None = None,
    cluster: OwnCluster | None = None,
) -> DemoResult:
    """Tell the story with the server or the cluster at `url`, which is our own or
    somebody else's.
    """
    layout, speed, tokens = settings.layout, settings.prefill_tokens_per_s, token_ids(text)
    async with infinistore.open_store(url) as store, trio.open_nursery() as nursery:
        if cluster is not None:
            await wait_for_view(store, lambda nodes: [node.state for node in nodes] == ["serving"] * settings.nodes)
        statistics = await store.stats()
        # Of a cluster, what one node has room for fits even if it is alone.
        capacity_bytes = statistics.store.capacity_bytes // max(1, settings.nodes)
        used_tokens = tokens_that_fit(layout, len(tokens), capacity_bytes)
        display.plan(Plan(source, len(tokens), used_tokens, layout, speed, capacity_bytes))
        prefill, decode = await _start_workers(nursery, Setup(url, layout, speed), display.event)
        prompts = two_prompts(tokens[:used_tokens])
        async with watched(store, display):
            results = [await _serve(prompt, prefill, decode, display) for prompt in prompts]
        restarted = None
        if server is not None and server.disk is not None:
            act = RestartAct(server, store, layout, prefill, decode, display)
            restarted = await act.play(prompts, capacity_bytes)
        of_nodes = None
        if cluster is not None:
            of_nodes = await ClusterActs(cluster, store, layout, prefill, decode, display).play(prompts)
        await prefill.finish()
        await decode.finish()
    return DemoResult(url, statistics.transport, source, layout, speed, results, restarted, of_nodes)


async def _serve(prompt: Prompt, prefill: WorkerProcess, decode: WorkerProcess, display: Display) -> PromptResult:
    """Let both workers do their part for one prompt, one after the other."""
    display.prompt_started(prompt)
    job = Job(prompt.name, prompt.tokens)
    prefilled = await prefill.run(job)
    return PromptResult(prompt, prefilled, await decode.run(job))


async def _start_workers(
    nursery: trio.Nursery, setup: Setup, on_event: Callable[[str, Event], None]
) -> tuple[WorkerProcess, WorkerProcess]:
    """Start both workers at the same time: most of it is the import of Python
    modules.
    """
    started: dict[str, WorkerProcess] = {}

    async def start(title: str) -> None:
        started[title] = await start_worker(nursery, title, setup, on_event)

    async with trio.open_nursery() as starting:
        for title in ("prefill", "decode"):
            starting.start_soon(start, title)
    return started["prefill"], started["decode"]


def tokens_that_fit(layout: KVLayout, tokens: int, capacity_bytes: int) -> int:
    """Return how many of `tokens` can be used, so that both prompts fit into a pool of
    `capacity_bytes` at once.

    Raises `DemoError` if that is less than one chunk.
    """
    if layout.whole_chunks(tokens) < 1:
        raise DemoError(
            f"the text has {tokens:,} tokens, and a chunk takes {layout.chunk_tokens:,}: "
            "take a longer text (--input) or shorter chunks (--chunk-tokens)"
        )
    room_chunks = int(capacity_bytes * _USABLE_PART_OF_POOL) // layout.chunk_footprint_bytes
    chunks = layout.whole_chunks(min(tokens, CONTEXT_TOKENS))
    if chunks + _chunks_of_b_alone(layout, min(tokens, CONTEXT_TOKENS)) <= room_chunks:
        return min(tokens, CONTEXT_TOKENS)
    while chunks and chunks + _chunks_of_b_alone(layout, chunks * layout.chunk_tokens) > room_chunks:
        chunks -= 1
    if not chunks:
        raise DemoError(
            f"the pool of {describe_size(capacity_bytes)} is too small: one chunk of the cache has "
            f"{describe_size(layout.chunk_bytes)}. Give the server more memory (--pool-size), or use "
            "shorter chunks (--chunk-tokens)"
        )
    return chunks * layout.chunk_tokens


def _chunks_of_b_alone(layout: KVLayout, tokens: int) -> int:
    """Return how many chunks prompt B has that prompt A, of `tokens` tokens,
    has not.
    """
    tokens_of_b = tokens + len(token_ids(INSERTED_SENTENCE))
    return layout.whole_chunks(tokens_of_b) - layout.whole_chunks(insertion_place(tokens))


def _read_text(file: Path | None) -> tuple[str, str]:
    """Return the name and the text of `file`, or of the text that the package ships; of
    a long one the first MiB.
    """
    source = sample_text_file() if file is None else file
    try:
        with source.open("rb") as stream:
            data = stream.read(_MAX_TEXT_BYTES)
    except OSError as error:
        raise DemoError(f"cannot read {file}: {error.strerror or error}") from None
    return source.name, data.decode(errors="replace")
