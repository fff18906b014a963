"""The two halves of the connector without vLLM: requests and a KV cache made for a
test.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from infinistore.blocking import BlockingStore
from infinistore.integrations.internal.record import Record
from infinistore.integrations.vllm.background import Background
from infinistore.integrations.vllm.blocks import BlockNames, LayerGroup, Step, block_names, layer_labels
from infinistore.integrations.vllm.scheduler import SchedulerSide
from infinistore.integrations.vllm.settings import ConnectorSettings
from infinistore.integrations.vllm.worker import WorkerSide

__all__ = [
    "BLOCK_TOKENS",
    "FULL",
    "LAYERS",
    "ByHand",
    "Engine",
    "MadeRequest",
    "loadable",
    "make_cache",
    "make_names",
    "make_scheduler",
    "make_worker",
    "save",
    "stage_group",
]

BLOCK_TOKENS = 4
HEADS = 4
LAYERS = [f"model.layers.{number}.attn" for number in range(3)]
FULL = LayerGroup(("0", "1", "2"), BLOCK_TOKENS)


@attrs.define(eq=False)
class MadeRequest:
    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    priority: int = 0
    kv_transfer_params: dict[str, object] | None = None

    @classmethod
    def of(cls, tokens: Sequence[int], name: str = "r") -> "MadeRequest":
        return cls(name, list(tokens), len(tokens))


class ByHand(Background):
    """Does what is to be done in the background when the test says so, in its time."""

    def __init__(self) -> None:
        super().__init__(make_record())
        self.now = 0.0
        self.pauses: list[float] = []
        """All that tasks have waited, in seconds."""
        self._tasks: list[tuple[float, Iterator[float]]] = []

    def start(self, task: Iterator[float], after_s: float = 0.0) -> None:
        self._tasks.append((self.now + after_s, task))

    def run(self, later_s: float = 0.0) -> None:
        """Do all that is to be done until so many seconds later."""
        end = self.now + later_s
        while due := [entry for entry in self._tasks if entry[0] <= end]:
            entry = min(due, key=lambda entry: entry[0])
            self._tasks.remove(entry)
            self.now, task = max(self.now, entry[0]), entry[1]
            if (pause_s := next(task, None)) is not None:
                self.pauses += [pause_s] if pause_s else []
                self.start(task, pause_s)
        self.now = end


def make_names(*, shards: int = 1, namespace: str = "", **facts: object) -> BlockNames:
    labels = tuple(layer_labels(LAYERS).values())
    return block_names(
        {"shards": shards, **facts}, model="/models/llama", namespace=namespace, layers=labels, shards=shards
    )


def make_scheduler(store: BlockingStore, names: BlockNames | None = None, **options: Any) -> SchedulerSide:
    given = {"groups": (FULL,), "reads": True, "writes": True, **options}
    return SchedulerSide(store, names or make_names(), make_record(), **given)


def make_record() -> Record:
    return Record(logging.getLogger("vllm.infinistore"), "of a test")


def make_worker(
    store: BlockingStore, caches: dict[str, torch.Tensor], names: BlockNames | None = None, **options: Any
) -> WorkerSide:
    of_settings = {name: options.pop(name) for name in ("deadline_s", "ttl_s") if name in options}
    settings = ConnectorSettings(url="infinistore://nowhere", **of_settings)
    given = {"groups": (FULL,), "layers": layer_labels(LAYERS), "background": Background(make_record()), **options}
    worker = WorkerSide(store, names or make_names(), settings, make_record(), **given)
    worker.register(caches, num_blocks=len(next(iter(caches.values()))))
    return worker


def make_cache(seed: int, *, blocks: int = 8, heads: int = 2) -> dict[str, torch.Tensor]:
    """A KV cache with random contents: [blocks, heads, tokens, content] for
    each layer.
    """
    torch.manual_seed(seed)
    return {name: torch.randn(blocks, heads, BLOCK_TOKENS, 6) for name in LAYERS}


def save(worker: WorkerSide, step: Step) -> None:
    """What vLLM does in a step that computes."""
    worker.begin(attrs.evolve(step, computes=True))
    for name in LAYERS:
        worker.save_layer(name)
    worker.start_loads()
    worker.end_saves()


def loadable(scheduler: SchedulerSide, request: MadeRequest, computed: int = 0) -> int:
    """How much of a request is to be loaded, which a lookup at once always knows."""
    tokens = scheduler.loadable_tokens(request, computed)
    assert tokens is not None
    return tokens


def stage_group(layers: Sequence[str]) -> LayerGroup:
    return LayerGroup(tuple(layer_labels(LAYERS)[name] for name in layers), BLOCK_TOKENS)


class Engine:
    """A scheduler that knows the first stage's layers, as vLLM's does, and a worker for
    each stage and rank: as many ranks as shards, unless there are fewer. Its prompts
    have five full blocks.
    """

    def __init__(
        self,
        store: BlockingStore,
        *,
        shards: int = 1,
        ranks: int = 0,
        stages: Sequence[Sequence[str]] = (LAYERS,),
        **options: Any,
    ) -> None:
        ranks = ranks or shards
        each = shards // ranks
        self.names = make_names(shards=shards)
        groups = (stage_group(stages[0]),)
        self.scheduler: SchedulerSide = make_scheduler(store, self.names, groups=groups, **options)
        self.scheduler.learn_layers([{0: stage_group(layers).layers} for layers in stages])
        self.caches = [make_cache(number, heads=HEADS // ranks) for number in range(len(stages) * ranks)]
        self.workers: list[WorkerSide] = [
            make_worker(
                store,
                {name: self.caches[stage * ranks + rank][name] for name in layers},
                self.names,
                groups=(stage_group(layers),),
                layers={name: layer_labels(LAYERS)[name] for name in layers},
                shards=range(rank * each, (rank + 1) * each),
            )
            for stage, layers in enumerate(stages)
            for rank in range(ranks)
        ]

    def write(self, tokens: Sequence[int]) -> None:
        """Compute a prompt, and store it."""
        request = MadeRequest.of(tokens)
        self.scheduler.loadable_tokens(request, 0)
        self.step(self.scheduler.plan({"r": len(tokens)}, (), lambda _: (range(5),)))
        for worker in self.workers:
            worker.begin(Step())
            while "r" not in worker.poll(["r"])[0]:
                pass
        self.scheduler.finished(request)

    def read(self, tokens: Sequence[int]) -> tuple[int, list[set[int]]]:
        """Return how many tokens are found, and which blocks each worker cannot
        read.
        """
        request = MadeRequest.of(tokens)
        found = loadable(self.scheduler, request)
        self.scheduler.allocated(request, (range(5),), found)
        step = self.scheduler.plan({}, (), lambda _: ())
        self.step(step)
        failed = []
        for worker in self.workers if step.loads else ():
            while "r" not in worker.poll(())[1]:
                pass
            failed.append(worker.take_failed_blocks())
        self.scheduler.finished(request)
        return found, failed

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def step(self, step: Step) -> None:
        for worker in self.workers:
            worker.begin(step)
            worker.start_loads()
            worker.end_saves()
