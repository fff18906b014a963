"""The ways of `serve_bench`: what each one starts, asks and measures. Its docstring says
what they are.
"""

import itertools
import json
import math
import os
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from operator import truediv
from pathlib import Path
from typing import Any, NamedTuple

import trio

import infinistore
from infinistore.routing.http import EngineFailed
from programs import ProgramError, free_port
from served import BLOCK_TOKENS, SEED, Bench, Round, Vllm, cluster
from slow_link import slow_down, speed_up

__all__ = ["OVERHEAD_AT_LEAST", "WAYS", "Outcome", "Row"]

OVERHEAD_ROUNDS = 4
OVERHEAD_AT_LEAST = 2
"""Rounds of each, however long they take."""
PAIR_TOKENS = 8
ALONE, ALONE_TOKENS = 5, 16
CONVERSATIONS, TURNS, TURN_TOKENS = 24, 10, 4
ROUTED_ROUNDS, ROUTED_LOAD, ROUTED_STEP_TOKENS = 5, 0.9, 256
STREAMS, STORM_PROMPT_TOKENS, STORM_TOKENS = 300, 48, 16
LMCACHE = {
    "kv_connector": "LMCacheConnectorOnCpu",
    "kv_connector_module_path": "lmcache_on_cpu",
    "kv_role": "kv_both",
}
LMCACHE_SERVER = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
SLOW_BYTES_PER_S, SLOW_ROUNDS, SLOW_LOAD, SLOW_LIMIT_S = 2_000_000, 3, 0.3, 180.0


class Alone(NamedTuple):
    """The mean time to the first token of prompts that come one by one, and the
    answers."""

    ttft_s: float
    answers: list[str]


class Row(NamedTuple):
    """A line of the table; `same` is whether it answered as the first of its way."""

    way: str
    what: str
    round: Round
    same: bool


class Outcome(NamedTuple):
    """What a way has measured: rounds, and figures and a sentence of its own."""

    rows: list[Row]
    figures: dict[str, float]
    text: str = ""
    failed: bool = False


def connector(url: str, role: str = "kv_both") -> dict[str, Any]:
    """Return the settings of the connector, as docs/vllm.md has them."""
    return {
        "kv_connector": "InfiniStoreConnector",
        "kv_connector_module_path": "infinistore.integrations.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": url},
    }


async def reuse(
    bench: Bench,
    way: str,
    transfer: dict[str, Any],
    *,
    lmcache: Path | None = None,
    model: Path | None = None,
    between: Callable[[], Awaitable[None]] | None = None,
) -> Outcome:
    """One vLLM after the other, with a store that both use."""
    async with bench.vllm(transfer, lmcache=lmcache, model=model) as server:
        cold = await all_and_a_few(bench, f"{way}, cold", server)
    if between is not None:
        await between()
    async with bench.vllm(transfer, lmcache=lmcache, model=model) as server:
        warm = await all_and_a_few(bench, f"{way}, warm", server)
    return compared(way, cold, warm)


async def all_and_a_few(bench: Bench, what: str, server: Vllm) -> tuple[Round, Alone]:
    """Ask all prompts at once, and then a few others one by one."""
    few = [bench.prompt(f"alone {number}") for number in range(ALONE)]
    return await bench.round(what, server), await one_by_one(bench, what, server, few)


def compared(way: str, cold: tuple[Round, Alone], warm: tuple[Round, Alone]) -> Outcome:
    """Return what was measured cold and warm, as an outcome."""
    (cold_round, cold_alone), (warm_round, warm_alone) = cold, warm
    same = (cold_round.answers, cold_alone.answers) == (warm_round.answers, warm_alone.answers)
    rows = [Row(way, "cold", cold_round, True), Row(way, "warm", warm_round, same)]
    figures = {
        "cold / warm": cold_round.ttft_mean_s / warm_round.ttft_mean_s,
        "cold / warm, alone": cold_alone.ttft_s / warm_alone.ttft_s,
    }
    text = f"{way}: a prompt that comes alone has its first token after {cold_alone.ttft_s:.3f} s cold, and"
    text += f" {warm_alone.ttft_s:.3f} s warm: 1/{figures['cold / warm, alone']:.1f}"
    return Outcome(rows, figures, text, failed=not warm_round.hit_tokens)


async def one_by_one(
    bench: Bench, what: str, server: Vllm, prompts: Sequence[list[int]], pause_s: float = 0.0
) -> Alone:
    """Ask prompts one after the other, with pauses, for an answer of some length."""
    bench.tell(f"{what}: one by one")
    made = []
    for prompt in prompts:
        made.append(await bench.streamed(server, prompt, ALONE_TOKENS, "alone"))
        await trio.sleep(pause_s)
    return Alone(statistics.fmean(took_s for took_s, _ in made), [text for _, text in made])


async def with_connector(bench: Bench) -> Outcome:
    async with bench.store() as store:
        return await reuse(bench, "connector", connector(f"infinistore://{store.address}"))


async def with_own_cache(bench: Bench) -> Outcome:
    """A vLLM that has all in its own cache, and one that has none, and the store."""
    async with bench.vllm(None, unbound=True) as server:
        computed = await bench.round("own-cache, nothing is cached", server)
        own = await bench.round("own-cache, in vLLM's own cache", server)
    async with bench.store() as store:
        transfer = connector(f"infinistore://{store.address}")
        async with bench.vllm(transfer, "--no-enable-prefix-caching", unbound=True) as server:
            stored = await bench.round("own-cache, nothing is stored", server)
            loaded = await bench.round("own-cache, in the store alone", server)
    rows = [Row("own-cache", "computed", computed, True)]
    for what, made in (("own cache", own), ("computed, stored", stored), ("store alone", loaded)):
        rows.append(Row("own-cache", what, made, made.answers == computed.answers))
    figures = {
        "computed / own cache": computed.ttft_mean_s / own.ttft_mean_s,
        "computed / store": stored.ttft_mean_s / loaded.ttft_mean_s,
        "store / own cache": loaded.ttft_mean_s / own.ttft_mean_s,
    }
    text = f"from the store, the first token takes {figures['store / own cache']:.2f} times as long as from vLLM's own"
    text += f" cache; computed, {figures['computed / own cache']:.1f} times"
    return Outcome(rows, figures, text, failed=not loaded.hit_tokens)


async def with_lmcache(bench: Bench) -> Outcome:
    async with bench.store() as store:
        url = f"infinistore://{store.address}/?device=mlx5_1"
        file = lmcache_file(bench, {"remote_url": url, "remote_serde": "naive"})
        return await reuse(bench, "lmcache", LMCACHE, lmcache=file)


async def with_lmcache_server(bench: Bench) -> Outcome:
    """LMCache's server, with what it has in its own memory, ends with each vLLM."""

    async def measured(what: str) -> tuple[Round, Alone]:
        async with bench.lmcache_server(url) as port:
            given = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port}
            transfer = {**LMCACHE_SERVER, "kv_connector_extra_config": given}
            async with bench.vllm(transfer) as server:
                return await all_and_a_few(bench, what, server)

    async with bench.store() as store:
        url = f"infinistore://{store.address}"
        cold = await measured("lmcache-mp, cold")
        return compared("lmcache-mp", cold, await measured("lmcache-mp, warm"))


async def with_local_disk(bench: Bench) -> Outcome:
    """LMCache does not find its files again after its end, so the same vLLM is asked
    twice. In between, Linux forgets what it has of the files."""
    room = math.ceil(bench.cache_bytes * 1.5 / 2**30)
    folder = bench.folder / "local-disk"
    file = lmcache_file(bench, {"local_disk": f"file://{folder}/", "max_local_disk_size": room})
    async with bench.vllm(LMCACHE, "--no-enable-prefix-caching", lmcache=file) as server:
        cold = await all_and_a_few(bench, "local-disk, cold", server)
        for written in folder.iterdir():
            with written.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        warm = await all_and_a_few(bench, "local-disk, warm", server)
    return compared("local-disk", cold, warm)


def lmcache_file(bench: Bench, storage: dict[str, Any]) -> Path:
    """Write a configuration of LMCache, which keeps nothing in its own memory."""
    room_gb = 2  # through which each block goes
    config = {"chunk_size": 256, "local_cpu": False, "max_local_cpu_size": room_gb, **storage}
    file = bench.folder / "lmcache.yaml"
    file.write_text(json.dumps(config))  # which is YAML, too
    return file


async def with_cluster(bench: Bench) -> Outcome:
    async with cluster(bench, 3) as url:
        return await reuse(bench, "cluster", connector(url))


async def with_disk(bench: Bench) -> Outcome:
    async with bench.store(disk=True) as store:
        url = f"infinistore://{store.address}"

        async def leave_on_disk() -> None:
            bench.tell("disk: what is in memory goes to disk")
            async with infinistore.open_store(url, deadline_s=300) as client:
                keys = await client.keys("vllm/", limit=1_000_000)  # the others end soon, and are on no disk
                if await client.flush(keys) < len(keys):
                    raise ProgramError("the disk has no room for all that was stored")
                await client.evict(0, 0)

        return await reuse(bench, "disk", connector(url), between=leave_on_disk)


async def with_windows(bench: Bench) -> Outcome:
    model = await bench.make_model(bench.layers, bench.hidden, windows=True)
    async with bench.store() as store:
        return await reuse(bench, "windows", connector(f"infinistore://{store.address}"), model=model)


async def with_pair(bench: Bench) -> Outcome:
    """Through the router first; then the prefill server alone, which reads nothing."""
    alone = "--no-enable-prefix-caching"
    async with bench.store() as store:
        url = f"infinistore://{store.address}"
        async with (
            bench.vllm(connector(url, "kv_producer"), alone) as prefill,
            bench.vllm(connector(url, "kv_consumer"), alone) as decode,
            bench.router("--prefill", prefill.url, "--decode", decode.url, "--split-above", "0") as router,
        ):
            routed = await bench.round("pair, routed", router, reader=decode, answer_tokens=PAIR_TOKENS)
            one = await bench.round("pair, one computes", prefill, answer_tokens=PAIR_TOKENS)
    rows = [Row("pair", "one alone", one, True), Row("pair", "routed", routed, routed.answers == one.answers)]
    return Outcome(rows, {}, failed=not routed.hit_tokens)


async def with_slow_link(bench: Bench) -> Outcome:
    """All is stored, and then the link to the store is slow: vLLM that always loads,
    that chooses, and without a store; and how long after that until it loads again.
    Prompts come one by one, so that an engine without a store has little to do.
    """
    prompts = [bench.prompt(f"slow link {number}") for number in range(bench.prompts)]
    alone_flag = "--no-enable-prefix-caching"
    async with bench.store() as store:
        url = f"infinistore://{store.address}?transport=inline"
        settings = connector(url)
        faster = {**settings, "kv_connector_extra_config": {"url": url, "load": "faster"}}
        async with bench.vllm(None, alone_flag, unbound=True) as server:
            pause_s = (await one_by_one(bench, "computed", server, prompts[:3])).ttft_s * (1 / SLOW_LOAD - 1)
            computed = await one_by_one(bench, "computed", server, prompts * SLOW_ROUNDS, pause_s)
        async with bench.vllm(settings, alone_flag, unbound=True) as server:
            await one_by_one(bench, "all is stored", server, prompts)
            always = await one_by_one(bench, "always, fast", server, prompts * SLOW_ROUNDS, pause_s)
            slow_down(store.port, SLOW_BYTES_PER_S)
            always_slow = await one_by_one(bench, "always, slow", server, prompts, pause_s)
        speed_up()
        async with bench.vllm(faster, alone_flag, unbound=True) as server:
            # With nothing to compute, it does not know how long that takes.
            await one_by_one(bench, "computed", server, [bench.prompt(f"new {number}") for number in range(3)])
            chosen = await one_by_one(bench, "chosen, fast", server, prompts * SLOW_ROUNDS, pause_s)
            slow_down(store.port, SLOW_BYTES_PER_S)
            await one_by_one(bench, "learning", server, prompts, pause_s)
            chosen_slow = await one_by_one(bench, "chosen, slow", server, prompts * SLOW_ROUNDS, pause_s)
            speed_up()
            back_s = await until_it_loads(bench, server, prompts, pause_s)
    figures = {
        "computed s": computed.ttft_s,
        "chosen / computed": chosen_slow.ttft_s / computed.ttft_s,
        "always / computed": always_slow.ttft_s / computed.ttft_s,
        "chosen / always, fast": chosen.ttft_s / always.ttft_s,
        "back after s": back_s,
    }
    text = f"over {SLOW_BYTES_PER_S / 1e6:g} MB/s, the first token takes {figures['chosen / computed']:.2f} times the"
    text += f" {computed.ttft_s:.3f} s that it takes to compute if vLLM chooses, {figures['always / computed']:.2f} if"
    text += f" it always loads; over loopback, {figures['chosen / always, fast']:.2f} of what loading takes; it loads"
    text += f" again {back_s:.0f} s after the limit is lifted"
    answers = [made.answers[: len(prompts)] for made in (computed, always, always_slow, chosen, chosen_slow)]
    return Outcome([], figures, text, failed=back_s > SLOW_LIMIT_S or any(one != answers[0] for one in answers))


async def until_it_loads(bench: Bench, server: Vllm, stored: list[list[int]], pause_s: float) -> float:
    """Ask for prompts that are stored, one by one; return after how many seconds one is
    loaded.
    """
    bench.tell("slow link, fast again")
    began, before = trio.current_time(), await bench.hit_tokens(server)
    for prompt in itertools.cycle(stored):
        await bench.streamed(server, prompt, 1, "alone")
        took_s = trio.current_time() - began
        if await bench.hit_tokens(server) > before or took_s > SLOW_LIMIT_S:
            return took_s
        await trio.sleep(pause_s)
    raise AssertionError


def conversation(bench: Bench, number: int) -> list[tuple[float, list[int]]]:
    """Return what is said in each turn, and how many pauses follow: a beginning of any
    length, most of them short as in published traces, and then a little.
    """
    generator = random.Random(number)
    room = bench.tokens - TURNS * TURN_TOKENS
    turns = []
    for turn in range(TURNS):
        most = room * 3 // 4 if not turn else max(2, room // (TURNS - turn))
        length = min(most, round(math.exp(generator.uniform(math.log(most / 32), math.log(most)))))
        room -= length
        turns.append((generator.expovariate(1), bench.prompt(f"turn {number} {turn}")[: max(1, length)]))
    return turns


async def converse(
    bench: Bench, server: Vllm, salt: str, token_s: float, turn_s: float
) -> tuple[list[float], list[str]]:
    """Hold conversations that begin one by one; return when first tokens came, and all
    answers. Others have nothing of these, for they have another salt. An engine needs
    `token_s` for a token of a prompt and `turn_s` for an answer: so conversations begin
    that two engines have this load of.
    """
    times: list[float] = []
    answers = [""] * CONVERSATIONS
    said = [conversation(bench, number) for number in range(CONVERSATIONS)]
    work_s = sum(turn_s + len(words) * token_s for turns in said for _, words in turns)
    generator = random.Random(SEED)

    async def hold(number: int) -> None:
        prompt: list[int] = []
        for pauses, words in said[number]:
            prompt += words
            took_s, answer = await bench.streamed(server, prompt, TURN_TOKENS, salt)
            times.append(took_s)
            answers[number] += answer + "\n"
            bench.advance(1 / CONVERSATIONS / TURNS)
            await trio.sleep(pauses * token_s * bench.tokens)

    async with trio.open_nursery() as nursery:
        for number in range(CONVERSATIONS):
            nursery.start_soon(hold, number)
            await trio.sleep(generator.expovariate(1) * work_s / CONVERSATIONS / (2 * ROUTED_LOAD))
    return times, answers


class Storm(NamedTuple):
    """What became of streams that began at once: they came to their end, broke off, or
    got not a single byte.
    """

    whole: int
    broken: int
    lost: int


async def storm(bench: Bench, server: Vllm, salt: str, *, kill: Vllm | None = None) -> Storm:
    """Ask many short prompts at once; when a third of them have begun, kill a vLLM.
    Nobody has anything of a prompt with another salt.
    """
    begun = whole = broken = lost = 0

    async def ask(number: int) -> None:
        nonlocal begun, whole, broken, lost
        has_begun = False
        try:
            prompt = bench.prompt(f"storm {number}")[:STORM_PROMPT_TOKENS]
            async with bench.stream(server, prompt, STORM_TOKENS, salt) as answer:
                has_begun, begun = True, begun + 1
                if kill is not None and begun == STREAMS // 3:
                    await kill.program.kill()
                said = await answer.rest(1 << 24)
            is_whole = said.endswith(b"data: [DONE]\n\n")
            whole += is_whole
            broken += not is_whole
        except (EngineFailed, ProgramError):
            broken += has_begun
            lost += not has_begun

    async with trio.open_nursery() as nursery:
        for number in range(STREAMS):
            nursery.start_soon(ask, number)
    bench.advance(1)
    return Storm(whole, broken, lost)


async def with_routed(bench: Bench) -> Outcome:
    """Conversations over the same two vLLMs, a core for each, by two policies. Then many
    streams at once, and once more while a vLLM is killed.

    A step computes few tokens beside those of a long prompt, as on a GPU. Else it takes
    seconds, and what comes or is loaded meanwhile waits for its end wherever it goes.
    """
    step = ("--max-num-batched-tokens", str(ROUTED_STEP_TOKENS))
    means: dict[str, list[float]] = {"soonest": [], "round-robin": []}
    told: list[list[str]] = []
    async with bench.store(share=4) as store:
        url = f"infinistore://{store.address}"
        async with (
            bench.vllm(connector(url), *step, core=0) as one,
            bench.vllm(connector(url), *step, core=1) as other,
        ):
            alone_s, _ = await bench.streamed(one, bench.prompt("alone"), 1, "alone")
            began = trio.current_time()
            await bench.streamed(one, bench.prompt("short")[:BLOCK_TOKENS], TURN_TOKENS, "alone")
            turn_s = trio.current_time() - began
            for number in range(ROUTED_ROUNDS):
                for policy in list(means) if number % 2 else reversed(means):
                    bench.tell(f"routed, {policy}, {number + 1} of {ROUTED_ROUNDS}")
                    flags = ["--store", url, "--engine", one.url, "--engine", other.url, "--policy", policy]
                    async with bench.router(*flags) as router:
                        times, answers = await converse(
                            bench, router, f"{policy} {number}", alone_s / bench.tokens, turn_s
                        )
                    means[policy].append(statistics.fmean(times))
                    told.append(answers)
            async with bench.router("--store", url, "--engine", one.url, "--engine", other.url) as router:
                bench.tell(f"routed, {STREAMS} streams")
                calm = await storm(bench, router, "calm")
                bench.tell(f"routed, {STREAMS} streams, and a vLLM is killed")
                killed = await storm(bench, router, "killed", kill=other)
    ratio = statistics.median(map(truediv, means["soonest"], means["round-robin"]))
    same = all(answers == told[0] for answers in told)
    each = "; ".join(f"{name}: {', '.join(f'{mean:.2f}' for mean in found)}" for name, found in means.items())
    text = f"{CONVERSATIONS} conversations of {TURNS} turns over two vLLMs: the mean time to the first token by"
    text += f" soonest is {ratio:.2f} of that by round robin (s {each}), {'the same' if same else 'OTHER'} answers"
    text += f"; of {STREAMS} streams at once, {calm.whole} came to their end, and {killed.whole} while a vLLM was"
    text += f" killed, {killed.broken} broke off with it, and {killed.lost} were lost"
    figures: dict[str, float] = {"soonest / round-robin": ratio, "same": same, **killed._asdict()}
    return Outcome([], figures, text, failed=not same or calm.whole < STREAMS or bool(killed.lost))


async def ask_all(
    bench: Bench, server: Vllm, after: Callable[[int], Awaitable[None]] | None = None
) -> tuple[list[str], int]:
    """Ask all prompts at once; return the answers, empty where a request failed, and
    how many failed. `after` is called with the number of those that have ended.
    """
    answers, failed, ended = [""] * bench.prompts, 0, 0

    async def ask(number: int) -> None:
        nonlocal failed, ended
        try:
            answers[number] = await bench.ask(server, bench.prompt(f"kill {number}"), PAIR_TOKENS)
        except ProgramError:
            failed += 1
        ended += 1
        bench.advance(1 / bench.prompts)
        if after is not None:
            await after(ended)

    async with trio.open_nursery() as nursery:
        for number in range(bench.prompts):
            nursery.start_soon(ask, number)
    return answers, failed


async def with_kill(bench: Bench) -> Outcome:
    async with trio.open_nursery() as nursery:
        port = free_port()
        first, second = trio.Event(), trio.Event()
        dead, done = trio.Event(), trio.Event()

        async def run_stores() -> None:
            async with bench.store(port=port) as store:
                first.set()
                await dead.wait()
                await store.program.kill()
            async with bench.store(port=port):
                second.set()
                await done.wait()

        nursery.start_soon(run_stores)
        await first.wait()
        transfer = connector(f"infinistore://127.0.0.1:{port}")

        async def kill_early(ended: int) -> None:
            if ended == -(-bench.prompts // 3):
                dead.set()
            if ended == -(-2 * bench.prompts // 3):
                await second.wait()

        async with bench.vllm(transfer, "--no-enable-prefix-caching") as server:
            bench.tell("kill: the store dies when a third of the requests have ended")
            answers, failed = await ask_all(bench, server, kill_early)
            hits, rounds, same = 0, 0, True
            while not hits and rounds < 5:
                rounds += 1
                bench.tell("kill: the store is back")
                before = await bench.hit_tokens(server)
                again, more = await ask_all(bench, server)
                failed, same = failed + more, same and again == answers
                hits = await bench.hit_tokens(server) - before
        done.set()
    figures: dict[str, float] = {"failed": failed, "rounds until found": rounds, "hit tokens": hits, "same": same}
    text = f"the store was killed: {failed} requests failed; back again, {hits} tokens came from it"
    text += f" in round {rounds} of the same prompts, {'the same answers' if same else 'OTHER ANSWERS'}"
    return Outcome([], figures, text, failed=bool(failed) or not hits or not same)


async def with_overhead(bench: Bench) -> Outcome:
    alone = "--no-enable-prefix-caching"
    rates: dict[str, list[float]] = {"with": [], "without": []}
    async with bench.store() as store:
        transfer = connector(f"infinistore://{store.address}")
        async with (
            bench.vllm(transfer, alone, unbound=True) as using,
            bench.vllm(None, alone, unbound=True) as without,
        ):
            began = trio.current_time()
            for number in range(OVERHEAD_ROUNDS):
                if number >= OVERHEAD_AT_LEAST and trio.current_time() - began > 60 * bench.overhead_minutes:
                    bench.advance(2 * (OVERHEAD_ROUNDS - number))
                    break
                pair = [("with", using), ("without", without)]
                for name, server in pair if number % 2 else reversed(pair):
                    what = f"overhead, {name} the connector, {number + 1} of {OVERHEAD_ROUNDS}"
                    made = await bench.round(what, server, seed=SEED + 1 + number)  # prompts that nobody has stored
                    rates[name].append(made.prompts_a_s)
    ratio = statistics.median(rates["with"]) / statistics.median(rates["without"])
    rounds = len(rates["with"])
    each = "; ".join(f"{name}: {', '.join(f'{rate:.2f}' for rate in rates[name])}" for name in rates)
    text = f"with nothing to reuse, the connector has {ratio:.3f} of the throughput without (prompts/s {each})"
    return Outcome([], {"ratio": ratio, "rounds": rounds}, text)


WAYS: dict[str, tuple[Callable[[Bench], Awaitable[Outcome]], float]] = {
    "connector": (with_connector, 4),
    "own-cache": (with_own_cache, 6),
    "lmcache": (with_lmcache, 4),
    "lmcache-mp": (with_lmcache_server, 4),
    "local-disk": (with_local_disk, 3),
    "cluster": (with_cluster, 4),
    "disk": (with_disk, 4),
    "windows": (with_windows, 4),
    "pair": (with_pair, 4),
    "routed": (with_routed, 4 + 2 * ROUTED_ROUNDS),
    "slow-link": (with_slow_link, 3),
    "kill": (with_kill, 3),
    "overhead": (with_overhead, 2 + 2 * OVERHEAD_ROUNDS),
}
"""Each way, and how many starts and rounds it has."""
