"""What `serve_bench` runs and asks: stores, `vllm serve`, `vllm bench serve`, and what
vLLM's metrics say.
"""

import argparse
import json
import math
import os
import random
import re
import shlex
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import trio

from infinistore.routing import Address, HttpLimits
from infinistore.routing.http import Answer, Asked, asking
from programs import Program, ProgramError, free_port, running
from small_llama import VOCABULARY

__all__ = ["Bench", "Round", "Store", "Vllm"]

BLOCK_TOKENS = 32
MODEL = "small-llama"
SEED = 42
FEW = 10
"""More prompts than come one by one, or first."""
_HERE = Path(__file__).parent
_START_S = 300.0  # vLLM takes half a minute, and several where others use the machine, too
_L2_ADAPTER = _HERE.parent / "examples" / "lmcache" / "l2-adapter.args"
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",  # LMCache's keys depend on it
    "PYTHONPATH": str(_HERE),
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_NO_USAGE_STATS": "1",
}
_ALL_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(os.cpu_count())}


class Round(NamedTuple):
    """What `vllm bench serve` reports of all prompts at once. Times are in seconds.

    `hit_tokens` of all `prompt_tokens` came from a store.
    """

    ttft_mean_s: float
    ttft_median_s: float
    ttft_p99_s: float
    prompts_a_s: float
    prompt_tokens: int
    hit_tokens: int
    answers: tuple[str, ...]

    @property
    def hits(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)


class Store(NamedTuple):
    """A server that runs."""

    program: Program
    port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


class Vllm(NamedTuple):
    """A `vllm serve` that runs, or a router before several."""

    program: Program
    url: str


class Bench:
    """What all ways share: the model, the sizes, where logs go, and how progress is
    told: `tell` gets what is being done, `advance` a share of 1.
    """

    def __init__(
        self,
        given: argparse.Namespace,
        folder: Path,
        nursery: trio.Nursery,
        tell: Callable[[str], None],
        advance: Callable[[float], None],
    ) -> None:
        self.prompts: int = given.prompts
        self.tokens: int = given.tokens
        self.overhead_minutes: float = given.overhead_minutes
        self._flags = shlex.split(given.vllm)
        self.folder = folder
        self.model = folder / "model"
        self.tell = tell
        self.advance = advance
        self._nursery = nursery
        self._made = 0
        self.layers: int = given.layers
        self.hidden: int = given.hidden
        token_bytes = given.layers * 2 * max(1, given.hidden // 64 // 3) * 64 * 4
        self.cache_bytes = (given.prompts + FEW) * given.tokens * token_bytes

    def _running(self, name: str, command: Sequence[str], **more: Any) -> Any:
        self._made += 1
        log = self.folder / f"{self._made:02d}-{re.sub('[^a-z0-9]+', '-', name.lower())}.log"
        return running(self._nursery, name, [sys.executable, *command], log=log, **more)

    async def make_model(self, layers: int, hidden: int, *, windows: bool = False) -> Path:
        """Write a model, with or without sliding windows, and return its folder."""
        self.tell("making the model")
        folder = self.folder / "model-with-windows" if windows else self.model
        sizes = ["--layers", str(layers), "--hidden", str(hidden), *(["--windows"] if windows else [])]
        async with self._running("small_llama.py", [str(_HERE / "small_llama.py"), str(folder), *sizes]) as made:
            await made.wait_until_it_ends(limit_s=_START_S)
        return folder

    @asynccontextmanager
    async def store(self, *more: str, port: int = 0, disk: bool = False, share: float = 1.0) -> AsyncIterator[Store]:
        """Run a server with room for `share` of all prompts, and half as much again.
        `more` are flags.
        """
        port = port or free_port()
        pool = f"{int(self.cache_bytes * share * 1.5 / 2**20) + 64}MiB"
        flags = ["--host", "127.0.0.1", "--service-port", str(port), "--manage-port", "0", "--prealloc-size", pool]
        flags += ["--unix-socket", str(self.folder / f"store-{port}"), "--log-level", "error", *more]
        if disk:
            flags += ["--disk", f"{self.folder / 'disk'}:{pool}", "--disk-admission", "eager"]
        async with self._running("infinistore", ["-P", "-m", "infinistore", *flags]) as program:
            await program.wait_until_it_says("tcp://", limit_s=60)
            yield Store(program, port)

    @asynccontextmanager
    async def vllm(
        self,
        transfer: dict[str, Any] | None,
        *flags: str,
        lmcache: Path | None = None,
        model: Path | None = None,
        unbound: bool = False,
        core: int | None = None,
    ) -> AsyncIterator[Vllm]:
        """Run `vllm serve`, of the common model or another, which has answered one
        prompt that no other one begins like.

        vLLM binds its threads to cores, and to one core fewer where it has a connector:
        `unbound` has both compute with all of them, and `core` binds one to a core.
        """
        port = free_port()
        most = self.tokens + self.tokens // 8 + 256  # random words do not always come back as as many tokens
        sizes = ["--block-size", str(BLOCK_TOKENS), "--max-model-len", str(most), "--dtype", "float32"]
        serve = [
            "serve",
            str(model or self.model),
            "--served-model-name",
            MODEL,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        given = [] if transfer is None else ["--kv-transfer-config", json.dumps(transfer)]
        environment = {
            **_ENVIRONMENT,
            "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(self.cache_bytes * 1.1 / 2**30)),
            **({} if lmcache is None else {"LMCACHE_CONFIG_FILE": str(lmcache)}),
            **(_ALL_CORES if unbound else {}),
            **({} if core is None else {"VLLM_CPU_OMP_THREADS_BIND": str(core), "OMP_NUM_THREADS": "1"}),
        }
        command = [str(_HERE / "vllm_command.py"), *serve, *sizes, "--enforce-eager", *given, *flags, *self._flags]
        self.tell("vLLM starts")
        async with self._running("vLLM", command, environment=environment) as program:
            await program.wait_until_it_says("Application startup complete", limit_s=_START_S)
            await _until_it_listens(port)
            made = Vllm(program, f"http://127.0.0.1:{port}")
            await self.ask(made, self.prompt(f"warm-up {port}"))
            self.advance(1)
            yield made

    @asynccontextmanager
    async def lmcache_server(self, url: str) -> AsyncIterator[int]:
        """Run LMCache's server, which has a store as its second level; yield its
        port."""
        port, http_port = free_port(), free_port()
        flag, text = shlex.split(_L2_ADAPTER.read_text())
        adapter = {**json.loads(text), "adapter_params": {"url": url}}
        # Without a GPU, vLLM's workers copy: LMCache's server does not, unless it is told to let them.
        flags = ["--port", str(port), "--http-port", str(http_port), "--supported-transfer-mode", "auto"]
        flags += ["--l1-size-gb", str(math.ceil(self.cache_bytes * 1.1 / 2**30)), "--eviction-policy", "LRU"]
        flags += ["--disable-observability", flag, json.dumps(adapter)]
        command = [str(Path(sys.executable).with_name("lmcache")), "server", *flags]
        self.tell("LMCache's server starts")
        async with self._running("LMCache", command, environment=_ENVIRONMENT) as program:
            await program.wait_until_it_says("Application startup complete", limit_s=_START_S)
            yield port

    @asynccontextmanager
    async def router(self, *flags: str) -> AsyncIterator[Vllm]:
        """Run the router before vLLMs, which have to be up."""
        port = free_port()
        command = ["-P", "-m", "infinistore", "route", "--port", str(port), "--tokenize-timeout", "1", *flags]
        async with self._running("router", command) as program:
            await program.wait_until_it_says("^routing on", limit_s=60)
            yield Vllm(program, f"http://127.0.0.1:{port}")

    def prompt(self, name: str) -> list[int]:
        """Return a prompt that begins like no other one."""
        generator = random.Random(name)
        return [generator.randrange(VOCABULARY) for _ in range(self.tokens)]

    @asynccontextmanager
    async def stream(self, server: Vllm, prompt: list[int], tokens: int, salt: str) -> AsyncIterator[Answer]:
        """Ask one prompt. It has begun when the first byte has come.

        Raises:
            EngineFailed: no byte came, or not all.
            ProgramError: it was refused.
        """
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps({**asked, "stream": True, "cache_salt": salt}).encode()
        request = Asked(b"POST", b"/v1/completions", [(b"content-type", b"application/json")], body)
        async with asking(Address.of(server.url), request, HttpLimits()) as answer:
            if answer.status != 200:
                text = (await answer.rest(1 << 24)).decode()
                raise ProgramError(f"a stream failed: {text[:300]}; the log of the server is {server.program.log}")
            yield answer

    async def streamed(self, server: Vllm, prompt: list[int], tokens: int, salt: str) -> tuple[float, str]:
        """Ask one prompt; return when the first token came, in seconds, and the answer.
        Errors are those of `stream`.
        """
        began = trio.current_time()
        async with self.stream(server, prompt, tokens, salt) as answer:
            took_s = trio.current_time() - began
            text = (await answer.rest(1 << 24)).decode()
        parts = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return took_s, "".join(part["choices"][0]["text"] for part in parts if part["choices"])

    async def ask(self, server: Vllm, prompt: list[int], tokens: int = 1) -> str:
        """Ask one prompt; return the answer. ProgramError if the request fails."""
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = json.loads(await _http(server, "/v1/completions", json.dumps(asked).encode()))
        text: str = answer["choices"][0]["text"]
        return text

    async def hit_tokens(self, server: Vllm) -> int:
        """Return how many tokens a store has had since the server started."""
        metrics = (await _http(server, "/metrics")).decode()
        found = re.findall(r"^vllm:external_prefix_cache_hits_total\{.*\} (\S+)$", metrics, re.MULTILINE)
        return sum(int(float(number)) for number in found)

    async def round(
        self,
        what: str,
        server: Vllm,
        *,
        reader: Vllm | None = None,
        answer_tokens: int = 1,
        seed: int = SEED,
        prompts_a_s: float = math.inf,
    ) -> Round:
        """Ask all prompts by `vllm bench serve`, at once or at a rate; hits are those
        of `reader`.
        """
        self.tell(what)
        reader = reader or server
        before, shown = await self.hit_tokens(reader), 0.0

        def see(line: str) -> None:
            nonlocal shown
            if found := re.search(rf"(\d+)/{self.prompts} \[", line):
                share = int(found[1]) / self.prompts
                self.advance(max(0.0, share - shown))
                shown = max(shown, share)

        self._made += 1
        result = self.folder / f"{self._made:02d}-result.json"
        lengths = ["--random-input-len", str(self.tokens), "--random-output-len", str(answer_tokens)]
        asked = ["--dataset-name", "random", "--num-prompts", str(self.prompts), "--seed", str(seed), *lengths]
        model = ["--model", MODEL, "--tokenizer", str(self.model), "--backend", "openai", "--base-url", server.url]
        rate = [] if math.isinf(prompts_a_s) else ["--request-rate", f"{prompts_a_s:.3f}"]
        more = [*rate, "--ignore-eos", "--temperature", "0", "--ready-check-timeout-sec", "0"]
        saved = ["--save-result", "--save-detailed", "--result-dir", str(self.folder), "--result-filename", result.name]
        command = [str(_HERE / "vllm_command.py"), "bench", "serve", *model, *asked, *more, *saved]
        async with self._running("vllm bench serve", command, environment=_ENVIRONMENT, see=see) as asking:
            await asking.wait_until_it_ends(limit_s=math.inf)  # vLLM has each request end, and the whole has a limit
        self.advance(1 - shown)
        made = json.loads(result.read_text())
        if made["completed"] != self.prompts:
            errors = sorted({error.strip().splitlines()[-1] for error in made["errors"] if error})
            raise ProgramError(f"{what}: {self.prompts - made['completed']} of {self.prompts} failed: {errors[:3]}")
        hits = await self.hit_tokens(reader) - before
        ttft_s = [made[f"{name}_ttft_ms"] / 1000 for name in ("mean", "median", "p99")]
        rate, total = made["request_throughput"], made["total_input_tokens"]
        return Round(ttft_s[0], ttft_s[1], ttft_s[2], rate, total, hits, tuple(made["generated_texts"]))


@asynccontextmanager
async def cluster(bench: Bench, nodes: int) -> AsyncIterator[str]:
    """Run several servers; yield the URL of them all."""
    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(bench.store(share=2 / nodes)) for _ in range(nodes)]
        yield "infinistore+static://" + ",".join(store.address for store in stores)


async def _until_it_listens(port: int) -> None:
    """Wait for a port: vLLM says that it is ready shortly before it listens."""
    with trio.move_on_after(60):
        while True:
            try:
                stream = await trio.open_tcp_stream("127.0.0.1", port)
            except OSError:
                await trio.sleep(0.1)
            else:
                await stream.aclose()
                return
    raise ProgramError(f"vLLM does not listen at port {port}")


async def _http(server: Vllm, path: str, body: bytes | None = None) -> bytes:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, body, headers)

    def ask() -> bytes:
        with urllib.request.urlopen(request, timeout=600) as answer:
            read: bytes = answer.read()
            return read

    try:
        return await trio.to_thread.run_sync(partial(ask), abandon_on_cancel=True, limiter=_LIMITER)
    except OSError as error:
        raise ProgramError(f"{path}: {error}; the log of the server is {server.program.log}") from None


_LIMITER = trio.CapacityLimiter(1000)
