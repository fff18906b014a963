"""What the store does with a GPU, as ratios within one run. `docs/gpu.md` explains it.

    python bench/gpu.py [--parts copies-batch ttft-8192] [--report build/gpu/report.json]

Each part writes its result into the report as it ends. Another run skips the parts that
are there; `--again` runs those that `--parts` names anew. With `--device cpu` it does
the same on a small scale without a GPU, so that everything is called once: those
figures mean nothing, and are kept in no report unless one is named.
"""

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from unittest.mock import patch

from gpu_report import LENGTHS, PARTS, Report, missed, why_not
from infinistore.blocking import BlockingStore, open_store
from infinistore.host import available_memory
from infinistore.sizes import GIB, KIB, MIB, in_units
from machine import this_machine
from one_server import serving
from rounds import interleaved, interleaved_times

if TYPE_CHECKING:
    import torch

    from infinistore.tensors import Ticket

__all__ = ["RUN", "Bench", "Figures", "NotHere", "describe", "has_gpu", "main"]

Figures: TypeAlias = dict[str, float | str]

_TOP = Path(__file__).resolve().parents[1]
DEFAULT_REPORT = _TOP / "build" / "gpu" / "report.json"
LMCACHE_TOKENS = 8192
CHUNK_TOKENS = 256


class NotHere(Exception):
    """Something that a part needs is missing; the message names it."""


class Bench:
    """What all parts share: the device, the model, and the scale."""

    def __init__(self, device: str, size: str) -> None:
        import torch

        self.device = torch.device(device)
        self.is_dry = device == "cpu"
        self.size = "tiny" if self.is_dry else size
        self._prompts = count()

    @cached_property
    def model(self) -> Any:
        """The model, made when the first part asks for it."""
        from gpu_model import SIZES, make_llama

        return make_llama(SIZES[self.size], self.device)

    def rounds(self, many: int) -> int:
        """Return how often to measure."""
        return 2 if self.is_dry else many

    def tokens(self, many: int) -> int:
        """Return how long a prompt to take."""
        return many // 8 if self.is_dry else many

    def prompt(self, tokens: int) -> list[int]:
        """Return a prompt that begins like no other one."""
        generator = random.Random(next(self._prompts))
        return [generator.randrange(self.model.config.vocab_size) for _ in range(tokens)]

    def finish(self) -> None:
        """Wait until the device has done everything."""
        import torch

        if not self.is_dry:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        """Return how long work takes, until the device has done it."""
        self.finish()
        started = time.perf_counter()
        work()
        self.finish()
        return time.perf_counter() - started

    @contextmanager
    def served(self, pool_bytes: int) -> Iterator[str]:
        """Run a server; yield its URL for shared memory."""
        flags = ["--manage-port", "off", "--log-level", "error", "--prealloc-size", f"{pool_bytes // MIB}MiB"]
        with serving(*flags, "--minimal-allocate-size", "16") as address:
            yield f"shm://{address}"

    @contextmanager
    def stores(self, pool_bytes: int, **options: Any) -> Iterator[dict[str, BlockingStore]]:
        """An embedded store, and one by shared memory."""
        with ExitStack() as stack:
            made = {"embedded": open_store(pool_bytes=pool_bytes, minimal_allocate_bytes=16 * KIB, **options)}
            made["shared memory"] = open_store(stack.enter_context(self.served(pool_bytes)), inline_bytes=0, **options)
            yield {name: stack.enter_context(store) for name, store in made.items()}


# Copies


def copies(bench: Bench, *, batches: bool) -> Figures:
    """16, 64 and 256 MiB at a time, in blocks of 64 KiB and of 1 MiB: neighbours in the
    tensor, or every other block.
    """
    import torch

    from infinistore.tensors import devices
    from infinistore.tensors.cuda_runtime import TorchCuda, cuda_bindings

    if batches and not bench.is_dry and not TorchCuda(cuda_bindings()).batches:
        raise NotHere("cuda-bindings, or a driver, with cudaMemcpyBatchAsync")
    scale = 64 if bench.is_dry else 1
    figures: Figures = {}
    with ExitStack() as stack:
        if not batches:
            stack.enter_context(patch.object(devices, "cuda_bindings", lambda: None))
        opened = stack.enter_context(bench.stores(2 * GIB // scale, verify="never"))
        checked = stack.enter_context(open_store(pool_bytes=2 * GIB // scale, minimal_allocate_bytes=16 * KIB))
        opened["embedded, with checksums"] = checked
        for batch in (64,) if bench.is_dry else (16, 64, 256):
            whole = torch.randint(0, 256, (2 * batch * MIB // scale,), dtype=torch.uint8, device=bench.device)
            pinned = torch.empty(batch * MIB // scale, dtype=torch.uint8, pin_memory=not bench.is_dry)
            for block, block_bytes in (("64 KiB", 64 * KIB), ("1 MiB", MIB)):
                for where, step in (("neighbours", 1), ("every other", 2)):
                    for name, store in opened.items():
                        if name == "embedded, with checksums" and (batch, step) != (64, 1):
                            continue
                        size = min(block_bytes, MIB // scale)
                        ratios = _copies(bench, store, whole, pinned, block_bytes=size, step=step)
                        case = f"{batch} MiB of {block}, {where}, {name}"
                        figures |= {f"{kind} {case}": ratio for kind, ratio in ratios.items()}
                        store.purge()
    return figures


def _copies(
    bench: Bench, store: BlockingStore, whole: "torch.Tensor", pinned: "torch.Tensor", *, block_bytes: int, step: int
) -> dict[str, float]:
    from infinistore.tensors import read_blocks, write_blocks

    tensor, plain = whole[: step * len(pinned)], whole[: len(pinned)]
    offsets = range(0, len(tensor), step * block_bytes)
    turns = max(2, store.stats().store.capacity_bytes // 2 // len(pinned))
    number = count()

    def each(call: Callable[..., None]) -> None:
        prompt = next(number) % turns
        call(store, [(f"{prompt}/{offset}", offset) for offset in offsets], block_bytes, tensor)

    def copy(target: "torch.Tensor", source: "torch.Tensor") -> None:
        target.copy_(source, non_blocking=True)
        bench.finish()

    for _ in range(turns):  # every page of the pool is touched, and registered
        each(write_blocks)
    medians = interleaved(
        {
            "plain write": partial(copy, pinned, plain),
            "write": partial(each, write_blocks),
            "plain read": partial(copy, plain, pinned),
            "read": partial(each, read_blocks),
        },
        rounds=bench.rounds(11),
        calls=2,
    )
    return {kind: medians[f"plain {kind}"] / medians[kind] for kind in ("write", "read")}


def register(bench: Bench) -> Figures:
    """Pools of growing size: the first write registers one."""
    import torch

    from infinistore.tensors import write_blocks

    tensor = torch.zeros(MIB, dtype=torch.uint8, device=bench.device)
    figures: Figures = {}
    room = available_memory().available_bytes * 3 // 4
    for size in (64 * MIB,) if bench.is_dry else (GIB, 8 * GIB, 64 * GIB):
        if size > room:
            figures[f"{in_units(size)}"] = f"not measured: three quarters of the available memory are {in_units(room)}"
            continue
        with open_store(pool_bytes=size, minimal_allocate_bytes=64 * KIB) as store:
            first_s, second_s = (
                bench.seconds(partial(write_blocks, store, [(key, 0)], MIB, tensor)) for key in ("first", "second")
            )
        figures[f"{in_units(size)}, seconds"] = first_s - second_s
    return figures


# A model


def overhead(bench: Bench) -> Figures:
    """Steps of 4096 tokens, in turns; each layer's cache is copied into pages in any
    case, as an engine does. The time includes the last write.
    """
    from transformers import DynamicCache

    from gpu_model import Pages, step
    from infinistore.tensors import LayerWriter

    model, tokens, steps = bench.model, bench.tokens(4096), 4
    halves = [Pages(model, tokens) for _ in range(2)]  # which take turns, so that no step waits for the one before it
    prompt, numbers = bench.prompt(tokens), count()

    def run(writer: "LayerWriter | None") -> None:
        tickets: list[list[Ticket]] = [[], []]
        for turn in range(steps):
            pages, pending, number = halves[turn % 2], tickets[turn % 2], next(numbers) % 4
            while pending:
                pending.pop().wait()

            def write(layer: int, pages: Pages = pages, pending: Any = pending, number: int = number) -> None:
                if writer is not None:
                    blocks = pages.blocks(number, layer)
                    pending.append(writer.write(pages.layers[layer], blocks, pages.block_bytes))

            cache = DynamicCache(config=model.config)
            with pages.filled_by(model, cache, write):
                step(model, prompt, cache)
        if writer is not None:
            writer.flush()
        bench.finish()

    pool_bytes = 8 * halves[0].total_bytes + 64 * MIB
    with ExitStack() as stack:
        opened = stack.enter_context(bench.stores(pool_bytes, spin_us="off", copy_threads=1))
        writers = {name: stack.enter_context(LayerWriter(store)) for name, store in opened.items()}
        kinds = {"without": None, "without, again": None, **writers}
        times = interleaved_times(
            {name: partial(run, writer) for name, writer in kinds.items()}, rounds=bench.rounds(15), calls=1
        )
    without = [(a + b) / 2 for a, b in zip(times["without"], times["without, again"], strict=True)]

    def ratio(name: str, by: Sequence[float]) -> float:
        return statistics.median(a / b for a, b in zip(times[name], by, strict=True))

    return {
        **{f"stored in: {name}": ratio(name, without) for name in writers},
        "nothing stored, twice": ratio("without, again", times["without"]),
        "a step, ms": statistics.median(without) / steps * 1e3,
        "stored a step, MiB": halves[0].total_bytes / MIB,
    }


def decode(bench: Bench) -> Figures:
    """32 steps of one sequence, while a `LayerLoader` loads prompts of 4096 tokens."""
    from transformers import DynamicCache

    from gpu_model import Pages, step
    from infinistore.tensors import LayerLoader, write_blocks

    model, steps = bench.model, bench.rounds(32)
    pages = Pages(model, bench.tokens(4096))
    cache = DynamicCache(config=model.config)
    token = int(step(model, bench.prompt(bench.tokens(1024)), cache).argmax())

    def decoded() -> float:
        def work() -> None:
            nonlocal token
            for _ in range(steps):
                token = int(step(model, [token], cache).argmax())

        return bench.seconds(work)

    decoded()
    alone: list[float] = []
    beside: list[float] = []
    loaded_s: list[float] = []
    with bench.served(2 * pages.total_bytes + 64 * MIB) as url, open_store(url, inline_bytes=0) as store:
        for layer, tensor in enumerate(pages.layers):
            write_blocks(store, pages.blocks("p", layer), pages.block_bytes, tensor)
        with LayerLoader(store, max_pending_bytes=64 * GIB) as loader:
            for _ in range(bench.rounds(7)):
                alone.append(decoded())
                started = time.perf_counter()
                for layer, tensor in enumerate(pages.layers):
                    loader.load(layer, tensor, pages.blocks("p", layer), pages.block_bytes)
                beside.append(decoded())
                for layer in range(len(pages.layers)):
                    loader.wait(layer)
                loaded_s.append(time.perf_counter() - started)
    return {
        "beside loads / alone": statistics.median(a / b for a, b in zip(beside, alone, strict=True)),
        "a step alone, ms": statistics.median(alone) / steps * 1e3,
        "steps beside a load": float(steps),
        "loaded meanwhile, MiB": pages.total_bytes / MIB,
        "until both were done, ms": statistics.median(loaded_s) * 1e3,
    }


def ttft(bench: Bench, *, tokens: int) -> Figures:
    """Prompts that are computed (cold), stored, and loaded (warm), one after the other,
    by shared memory. The store has checksums, as by default.
    """
    from transformers import DynamicCache

    from gpu_model import NAME, step
    from infinistore.integrations.transformers import load_cache, save_cache

    model, tokens = bench.model, bench.tokens(tokens)
    kept: dict[str, Any] = {}

    def cold(prompt: list[int]) -> None:
        kept["cold"] = DynamicCache(config=model.config)
        kept["answer"] = int(step(model, prompt, kept["cold"]).argmax())

    def warm(prompt: list[int]) -> None:
        kept["warm"], matched = load_cache(store, model, prompt, name=NAME)
        if matched != (tokens - 1) // 64 * 64:
            raise RuntimeError(f"{matched} of {tokens} tokens were loaded")
        kept["same"] = int(step(model, prompt[matched:], kept["warm"]).argmax()) == kept["answer"]

    cold_s: list[float] = []
    warm_s: list[float] = []
    stored_s: list[float] = []
    same = 0
    cache_bytes = _cache_bytes(model, tokens)
    with bench.served(4 * cache_bytes + 64 * MIB) as url, open_store(url, inline_bytes=0) as store:
        for number in range(bench.rounds(5) + 1):
            prompt = bench.prompt(tokens)
            taken = bench.seconds(partial(cold, prompt))
            stored = bench.seconds(partial(save_cache, store, model, prompt, kept["cold"], name=NAME))
            loaded = bench.seconds(partial(warm, prompt))
            _compare(kept["cold"], load_cache(store, model, prompt, name=NAME)[0])
            if number:  # the first one warms up
                cold_s.append(taken)
                stored_s.append(stored)
                warm_s.append(loaded)
                same += kept["same"]
            store.purge()
    return {
        "cold / warm": statistics.median(cold_s) / statistics.median(warm_s),
        "cold, ms": statistics.median(cold_s) * 1e3,
        "warm, ms": statistics.median(warm_s) * 1e3,
        "stored in, ms": statistics.median(stored_s) * 1e3,
        "its cache, MiB": cache_bytes / MIB,
        "model": bench.size,
        "same first token": f"{same} of {len(cold_s)}",
    }


def _cache_bytes(model: Any, tokens: int) -> int:
    config = model.config
    head_size = config.hidden_size // config.num_attention_heads
    size: int = 2 * config.num_hidden_layers * config.num_key_value_heads * tokens * head_size * model.dtype.itemsize
    return size


def _compare(computed: Any, loaded: Any) -> None:
    """Raise unless a loaded cache is the one that was computed, bit for bit, as far as
    it goes.
    """
    import torch

    for one, other in zip(computed.layers, loaded.layers, strict=True):
        for mine, theirs in ((one.keys, other.keys), (one.values, other.values)):
            if not torch.equal(mine[:, :, : theirs.shape[2]], theirs):
                raise RuntimeError("a cache did not come back as it was")


def ttft_lmcache(bench: Bench) -> Figures:
    """LMCache's storage in this process's pinned memory, by chunks of 256 tokens.
    PyTorch copies a chunk, since LMCache's kernels know the caches of engines only.
    """
    from gpu_model import step

    try:
        from lmcache_local import LocalStorage
    except ImportError as error:
        raise NotHere(f"LMCache: {error}") from error
    from transformers import DynamicCache

    model, tokens = bench.model, bench.tokens(LMCACHE_TOKENS)
    storage = LocalStorage(model, CHUNK_TOKENS, 3 * _cache_bytes(model, tokens))
    kept: dict[str, Any] = {}

    def cold(prompt: list[int]) -> None:
        kept["cold"] = DynamicCache(config=model.config)
        kept["answer"] = int(step(model, prompt, kept["cold"]).argmax())

    def warm(prompt: list[int], number: int) -> None:
        kept["warm"], matched = storage.load(number, tokens)
        step(model, prompt[matched:], kept["warm"]).argmax().item()

    cold_s: list[float] = []
    warm_s: list[float] = []
    try:
        for number in range(bench.rounds(5) + 1):
            prompt = bench.prompt(tokens)
            taken = bench.seconds(partial(cold, prompt))
            storage.save(number, kept["cold"])
            loaded = bench.seconds(partial(warm, prompt, number))
            _compare(kept["cold"], storage.load(number, tokens)[0])
            storage.clear()
            if number:
                cold_s.append(taken)
                warm_s.append(loaded)
    finally:
        storage.close()
    cold_ms, warm_ms = statistics.median(cold_s) * 1e3, statistics.median(warm_s) * 1e3
    return {"cold / warm": cold_ms / warm_ms, "cold, ms": cold_ms, "warm, ms": warm_ms, "model": bench.size}


# Processes


def processes(bench: Bench) -> Figures:
    """Each process writes and reads 64 MiB in blocks of 64 KiB, by shared memory."""
    figures: Figures = {}
    one_s = 0.0
    for clients in (1, 2) if bench.is_dry else (1, 2, 4, 8):
        with ExitStack() as stack:
            url = stack.enter_context(bench.served((clients + 1) * 192 * MIB))
            command = [sys.executable, __file__, "--device", str(bench.device), "--peer", url]
            pipe = subprocess.PIPE
            peers = [
                stack.enter_context(subprocess.Popen([*command, str(n)], stdin=pipe, stdout=pipe, text=True))
                for n in range(clients)
            ]
            lines = [_line(peer) for peer in peers]
            for peer in peers:
                assert peer.stdin is not None
                peer.stdin.write("go\n")
                peer.stdin.flush()
            lines = [_line(peer) for peer in peers]
        taken_s = max(map(float, lines))
        one_s = one_s or taken_s
        figures[f"{clients} processes / one"] = clients * one_s / taken_s
    return figures


def _line(peer: "subprocess.Popen[str]") -> str:
    assert peer.stdout is not None
    line = peer.stdout.readline()
    if not line:
        raise RuntimeError(f"a process ended with status {peer.wait()}")
    return line


def be_peer(bench: Bench, url: str, name: str) -> None:
    """One of the processes: print when ready, and how many seconds it took."""
    import torch

    from infinistore.tensors import read_blocks, write_blocks

    size = (4 if bench.is_dry else 64) * MIB
    tensor = torch.randint(0, 256, (size,), dtype=torch.uint8, device=bench.device)
    blocks = [(f"{name}/{offset}", offset) for offset in range(0, size, 64 * KIB)]
    with open_store(url, inline_bytes=0) as store:

        def work(rounds: int) -> None:
            for _ in range(rounds):
                write_blocks(store, blocks, 64 * KIB, tensor)
                read_blocks(store, blocks, 64 * KIB, tensor)

        work(2)
        print("ready", flush=True)
        sys.stdin.readline()
        print(bench.seconds(partial(work, bench.rounds(20))), flush=True)


# All of them

RUN: dict[str, Callable[[Bench], Figures]] = {
    "copies-batch": partial(copies, batches=True),
    "copies-fallback": partial(copies, batches=False),
    "register": register,
    "overhead": overhead,
    "decode": decode,
    **{f"ttft-{tokens}": partial(ttft, tokens=tokens) for tokens in LENGTHS},
    "ttft-lmcache": ttft_lmcache,
    "processes": processes,
}


def has_gpu() -> bool:
    """Whether PyTorch finds a GPU."""
    import torch

    return torch.cuda.is_available()


def describe(device: str) -> str:
    """Return what figures are of: the GPU, its driver, the cores, and versions."""
    import torch

    what = "no GPU: a dry run"
    if device != "cpu":
        asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        what = (done.stdout.strip().splitlines() or [torch.cuda.get_device_name()])[0]
    versions = [f"torch {torch.__version__}"]
    for package in ("transformers", "cuda-bindings"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"no {package}")
    return f"{what}; {this_machine().describe()}; {', '.join(versions)}"


def run(bench: Bench, names: Sequence[str], report: Report, where: str) -> bool:
    """Run these parts; return whether none broke."""
    good = True
    for name in names:
        print(f"== {name}: {PARTS[name].title}", flush=True)
        started = time.perf_counter()
        result: dict[str, Any] = {"machine": where}
        try:
            result["figures"] = RUN[name](bench)
        except NotHere as error:
            result["missing"] = str(error)
        except Exception as error:  # noqa: BLE001 - the other parts are run all the same
            traceback.print_exc()
            result["broke"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            good = False
        result["seconds"] = round(time.perf_counter() - started, 1)
        report.keep(name, result)
        if found := why_not(result):
            print(found, flush=True)
        lost = missed(name, result.get("figures", {}))
        for figure, value in result.get("figures", {}).items():
            shown = value if isinstance(value, str) else f"{value:.3f}"
            print(f"{figure:64} {shown:>10}{'  missed' if figure in lost else ''}", flush=True)
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=RUN, default=list(RUN), metavar="PART", help=", ".join(RUN))
    parser.add_argument("--again", action="store_true", help="also those that the report has")
    parser.add_argument("--report", type=Path, help=f"file of JSON ({DEFAULT_REPORT.relative_to(_TOP)})")
    parser.add_argument("--device", default="cuda", help="cpu is a dry run (cuda)")
    parser.add_argument("--model", choices=["2GiB", "15GiB"], default="2GiB", help="size of the Llama in bf16 (2GiB)")
    parser.add_argument("--describe", action="store_true", help="only print which machine this is")
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.describe:
        print(describe(given.device))
        return 0
    if given.device != "cpu" and not has_gpu():
        print("there is no GPU here: nothing was measured; --device cpu is a dry run")
        return 0
    bench = Bench(given.device, given.model)
    if given.peer:
        be_peer(bench, *given.peer)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        nowhere = Path(folder) / "report.json"
        report = Report(given.report or (nowhere if bench.is_dry else DEFAULT_REPORT))
        names = [name for name in given.parts if given.again or not report.is_done(name)]
        good = run(bench, names, report, describe(given.device))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
