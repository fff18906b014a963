"""vLLM's own scheduler with both halves of the connector, and a rule in the model's
place.

What the cache holds of a token is a number made of all tokens up to it, another one in
each layer, and an answer's next token is made of the last number. Before a step, the
engine looks whether all that it counts as computed is what the rule says: a block that
is not read, not yet or wrongly read, or given to somebody else too early, fails there.
"""

import itertools
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from infinistore.integrations.vllm import connector
from infinistore.integrations.vllm.connector import InfiniStoreConnector
from infinistore.integrations.vllm.worker import WorkerSide

__all__ = ["BLOCK", "MadeEngine", "answer_to", "open_engine"]

BLOCK = 16
_LAYERS = ("layers.0.attn", "layers.1.attn")
_NUMBERS = itertools.count(1)


def numbers(tokens: Sequence[int]) -> list[int]:
    """Return what the cache holds of each token."""
    sums = itertools.accumulate(tokens, lambda known, token: zlib.crc32(token.to_bytes(4), known), initial=0)
    return [one % 65521 for one in sums][1:]


def answer_to(prompt: Sequence[int], count: int = 4) -> list[int]:
    """Return the tokens of an answer."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(numbers(tokens)[-1])
    return tokens[len(prompt) :]


class MadeEngine:
    """One engine: `submit` requests, and `step` or `finish`.

    While `loads_may_go` is not set, blocks are not read. Without `caching`, vLLM has no
    cache of its own.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        loads_may_go: threading.Event,
        *,
        role: str = "kv_both",
        blocks: int = 200,
        policy: str = "recompute",
        caching: bool = True,
        **extra: Any,
    ) -> None:
        (folder / "config.json").write_text('{"architectures": ["OPTForCausalLM"], "model_type": "opt"}')
        if not (weights := folder / "pytorch_model.bin").exists():
            weights.write_text("weights")
        model = ModelConfig(model=str(folder), dtype="float32", seed=0, skip_tokenizer_init=True)
        batch = SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=256, max_model_len=2048, is_encoder_decoder=False, watermark=0.0
        )
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=caching)
        cache.kv_cache_layout = "LBNHC"
        cache.num_gpu_blocks = blocks
        transfer = KVTransferConfig(
            kv_connector="InfiniStoreConnector",
            kv_connector_module_path="infinistore.integrations.vllm",
            kv_role=role,
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"url": url, "model": "made", "lookup_deadline_s": 60.0, **extra},
        )
        config = VllmConfig(
            scheduler_config=batch,
            model_config=model,
            cache_config=cache,
            kv_transfer_config=transfer,
            device_config=DeviceConfig("cpu"),
        )
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        layout = KVCacheConfig(blocks, [], [KVCacheGroupSpec(list(_LAYERS), spec)])
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256) if caching else None
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=layout,
            block_size=BLOCK,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
        )
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.worker = InfiniStoreConnector(config, KVConnectorRole.WORKER, layout)
        self.caches = {name: torch.zeros(blocks, 2, BLOCK, 1) for name in _LAYERS}
        self.worker.register_kv_caches(self.caches)
        self.loads_may_go = loads_may_go
        self.requests: dict[str, Request] = {}
        self.stats: list[Any] = []
        """What vLLM's scheduler told of each step."""
        self.preempted: set[str] = set()

    def submit(
        self, prompt: Sequence[int], *, count: int = 4, adapter: LoRARequest | None = None, **settings: object
    ) -> Request:
        """Submit a request for a few tokens."""
        given = {"kv_transfer_params": {"infinistore": settings}} if settings else None
        params = SamplingParams(max_tokens=count, ignore_eos=True, extra_args=given)
        request = Request(
            request_id=f"r{next(_NUMBERS)}",
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
            lora_request=adapter,
        )
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, request: Request) -> None:
        """Give a request up."""
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """Do what vLLM does in one step."""
        planned = self.scheduler.schedule()
        self.preempted |= planned.preempted_req_ids or set()
        assert planned.kv_connector_metadata is not None
        self.worker.handle_preemptions(planned.kv_connector_metadata)
        self.worker.bind_connector_metadata(planned.kv_connector_metadata)
        sampled = {name: self.compute(name, count) for name, count in planned.num_scheduled_tokens.items()}
        for name in _LAYERS:
            self.worker.save_kv_layer(name, self.caches[name], None)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        moved = self._moved(planned)
        self.worker.clear_connector_metadata()
        made = ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: index for index, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=moved,
        )
        for output in self.scheduler.update_from_output(planned, made).values():
            if output.scheduler_stats is not None:
                self.stats.append(output.scheduler_stats)

    def finish(self, *requests: Request) -> list[list[int]]:
        """Step until these requests are finished; return their answers."""
        while not all(request.is_finished() for request in requests):
            self.step()
        return [list(request.output_token_ids) for request in requests]

    def ask(self, *prompts: Sequence[int]) -> list[list[int]]:
        """Submit requests together; return their answers."""
        return self.finish(*(self.submit(prompt) for prompt in prompts))

    def settle(self) -> None:
        """Step until nothing is read or written any more, and nothing is in use."""
        while self.free_blocks != self.all_blocks or self.scheduler.requests:
            self.step()
        assert all(block.ref_cnt == 0 for block in self.pool.blocks if not block.is_null)
        assert not self.scheduler.failed_recving_kv_req_ids
        assert not self.scheduler.finished_recving_kv_req_ids

    @property
    def free_blocks(self) -> int:
        return int(self.pool.get_num_free_blocks())

    @property
    def all_blocks(self) -> int:
        return int(self.pool.num_gpu_blocks) - 1  # one is the block of nothing

    def block_ids(self, request: Request) -> list[int]:
        """Return a request's blocks."""
        (ids,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return list(ids)

    def is_cached(self, block_id: int) -> bool:
        """Whether vLLM would give this block to others with the same prompt."""
        return self.pool.blocks[block_id].block_hash is not None

    def counted(self, name: str) -> int:
        """Return what the connector counted, as vLLM's metrics have it."""
        found = [stats.kv_connector_stats for stats in self.stats if stats.kv_connector_stats]
        return sum(told["counters"].get(name, 0) for told in found)

    def external(self) -> tuple[int, int]:
        """Return how many tokens vLLM asked the connector for, and how many it got."""
        told = [stats.connector_prefix_cache_stats for stats in self.stats]
        return sum(each.queries for each in told if each), sum(each.hits for each in told if each)

    def close(self) -> None:
        """Shut both halves down."""
        self.loads_may_go.set()
        self.worker.shutdown()
        self.scheduler.shutdown()

    def compute(self, name: str, count: int) -> list[int]:
        request = self.requests[name]
        end = request.num_computed_tokens
        tokens = list(request.all_token_ids)
        expected = torch.tensor(numbers(tokens[:end]), dtype=torch.float32)
        ids = torch.tensor(self.block_ids(request))[torch.arange(end) // BLOCK]
        offsets = torch.arange(end) % BLOCK
        for number, cache in enumerate(self.caches.values()):
            known = cache[ids[: end - count], :, offsets[: end - count], 0]
            wanted = (expected[: end - count] + number).unsqueeze(1).expand_as(known)
            assert torch.equal(known, wanted), f"{name}: what counts as computed is not in the cache"
            cache[ids[end - count :], :, offsets[end - count :], 0] = (expected[end - count :] + number).unsqueeze(1)
        return [int(expected[-1])] if end == len(tokens) else []

    def _moved(self, planned: SchedulerOutput) -> KVConnectorOutput:
        results = self.worker.get_transfer_results(planned.finished_req_ids)
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
            kv_connector_stats=self.worker.get_kv_connector_stats(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )


@contextmanager
def open_engine(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[MadeEngine]:
    """An engine until the block is left."""
    monkeypatch.setattr(connector, "get_tensor_model_parallel_rank", lambda: 0)
    loads_may_go = threading.Event()
    loads_may_go.set()

    class HeldUp(WorkerSide):
        def start_loads(self, after: Callable[[], object] = loads_may_go.wait) -> None:
            super().start_loads(loads_may_go.wait)

    monkeypatch.setattr(connector, "WorkerSide", HeldUp)
    engine = MadeEngine(url, folder, loads_may_go, **options)
    try:
        yield engine
    finally:
        engine.close()
