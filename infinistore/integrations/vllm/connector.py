"""vLLM's class: forwards vLLM's calls to the two halves of the connector."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, UniformTypeKVCacheSpecs

from infinistore import blocking
from infinistore.errors import ConfigError, DeadlineExceeded, InfiniStoreException, StoreUnavailable
from infinistore.integrations.internal.prefix_keys import fingerprint_of_config
from infinistore.integrations.internal.record import Record
from infinistore.integrations.vllm.names import BlockNames, block_names, layer_labels
from infinistore.integrations.vllm.scheduler import SchedulerSide
from infinistore.integrations.vllm.settings import ConnectorSettings
from infinistore.integrations.vllm.step import Step
from infinistore.integrations.vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

__all__ = ["InfiniStoreConnector"]

LOG = logging.getLogger("vllm.infinistore")
"""A child of vLLM's logger, which determines level, format and destination."""


class _Metadata(KVConnectorMetadata):
    def __init__(self, step: Step) -> None:
        self.step = step


class InfiniStoreConnector(KVConnectorBase_V1):
    """Keeps vLLM's KV cache in an InfiniStore server.

    vLLM creates one in its scheduler and one in each worker. `ConnectorSettings` lists
    the settings in `kv_connector_extra_config`.

    Raises:
        ConfigError: a setting is invalid; or, within a MultiConnector, a failed read
            would fail its request; or the model's KV cache is not supported.
        AuthenticationFailed, VersionMismatch, ProtocolError: the peer at the store's
            address cannot be used.
    """

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._settings = ConnectorSettings.from_extra_config(transfer.kv_connector_extra_config)
        _check_load_failures(transfer)
        self._stack = ExitStack()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        group = _only_group(vllm_config, kv_cache_config)
        record = Record(LOG, self._settings.url.partition("?")[0])
        scheduling = role is KVConnectorRole.SCHEDULER
        self._store = store = self._open(
            self._settings.lookup_deadline_s if scheduling else self._settings.deadline_s, role
        )
        names = _names(vllm_config, kv_cache_config, self._settings, grouped=store.is_cluster)
        if scheduling:
            if transfer.kv_load_failure_policy != "recompute":
                LOG.warning("InfiniStore: kv_load_failure_policy is now 'recompute': what cannot be read is computed")
                transfer.kv_load_failure_policy = "recompute"
            self._scheduler = SchedulerSide(
                store,
                names,
                record,
                block_tokens=_block_tokens(group),
                reads=transfer.is_kv_consumer,
                writes=transfer.is_kv_producer,
                hold_s=self._settings.hold_s,
                save_generated=self._settings.save_generated,
                extra=_extra_keys,
            )
        else:
            shard, replica = divmod(get_tensor_model_parallel_rank(), kv_cache_config.kv_tp_replicas)
            self._worker = WorkerSide(
                store,
                names,
                self._settings,
                record,
                labels=layer_labels(group.layer_names),
                shard=shard,
                writes=replica == 0,
                delivers=not transfer.is_kv_consumer,
            )

    # What a lost save costs is a computation later, so no request need be held back for
    # it.
    requires_kv_delivery = False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are saved by calls between them, which a graph of the whole model
        would leave out.
        """
        return True

    def _open(self, deadline_s: float, role: KVConnectorRole) -> blocking.BlockingStore:
        """Open the store, which need not be there yet."""
        url = self._settings.url
        name = f"vllm-{role.name.lower()}"
        store = self._stack.enter_context(
            blocking.open_store(url, lazy=True, deadline_s=deadline_s, verify=self._settings.verify, name=name)
        )
        try:
            stats = store.stats()
        except (StoreUnavailable, DeadlineExceeded) as error:
            LOG.warning("InfiniStore: the store is not there, and vLLM goes on without it until it is: %s", str(error))
        except BaseException:
            self._stack.close()
            raise
        else:
            LOG.info("InfiniStore: %s, by %s (%s)", url.partition("?")[0], stats.transport, stats.transport_reason)
        return store

    # ---- the worker's side ----

    def register_kv_caches(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        """Register the KV cache; warn if the store is too small for one prompt."""
        block_bytes = self._at_work.register(kv_caches, self._kv_cache_config.num_blocks)
        config = self._vllm_config
        blocks = config.model_config.max_model_len // _block_tokens(_only_group(config, self._kv_cache_config))
        self._check_capacity(blocks * block_bytes * config.parallel_config.world_size)

    def _check_capacity(self, prompt_bytes: int) -> None:
        try:
            statistics = self._store.stats().store
        except InfiniStoreException:
            return  # it was warned of when the store was opened
        capacity_bytes = statistics.capacity_bytes + statistics.growable_bytes
        if capacity_bytes < prompt_bytes:
            LOG.warning(
                "InfiniStore: the pool of the store (%.3g GiB) is smaller than the KV cache of a longest prompt (%.3g),"
                " which then evicts its own beginning: start the server with a larger --prealloc-size",
                capacity_bytes / 2**30,
                prompt_bytes / 2**30,
            )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Wait for the writes of preempted requests' blocks."""
        assert isinstance(kv_connector_metadata, _Metadata)
        self._at_work.begin(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        """Start the loads in the background."""
        self._at_work.start_loads(_after_what_was_queued())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: requests whose blocks are being loaded are not part of
        the step.
        """

    def save_kv_layer(self, layer_name: str, kv_layer: object, attn_metadata: object, **kwargs: Any) -> None:
        """Start the saves of a layer."""
        self._at_work.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """End the saves of a step."""
        self._at_work.end_saves()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests that are saved, and those that are loaded."""
        return self._at_work.poll(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be read."""
        return self._at_work.take_failed_blocks()

    # ---- the scheduler's side ----

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Look up how much of a request is stored; it is loaded in the background."""
        tokens = self._at_schedule.loadable_tokens(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record the blocks to load into."""
        self._at_schedule.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the workers' loads and saves of a step."""
        state = scheduler_output.kv_connector_block_state
        step = self._at_schedule.plan(
            scheduler_output.num_scheduled_tokens,
            scheduler_output.preempted_req_ids or (),
            lambda request_id: state.resolve_block_ids(request_id)[0],
        )
        return _Metadata(step)

    def update_connector_output(self, connector_output: Any) -> None:
        """Record which loads have ended, and which blocks failed."""
        self._at_schedule.loads_ended(connector_output.finished_recving or (), connector_output.invalid_block_ids)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a finished request until they are written."""
        return self._at_schedule.finished(request), None

    # ---- both ----

    def shutdown(self) -> None:
        """Finish the writes and close the store."""
        if self._worker is not None:
            self._worker.close()
        self._stack.close()

    @property
    def _at_work(self) -> WorkerSide:
        assert self._worker is not None, "vLLM asked its scheduler's connector for what workers do"
        return self._worker

    @property
    def _at_schedule(self) -> SchedulerSide:
        assert self._scheduler is not None, "vLLM asked a worker's connector for what the scheduler does"
        return self._scheduler


def _check_load_failures(transfer: "KVTransferConfig") -> None:
    """Refuse a MultiConnector in which a failed read would fail its request.

    vLLM's scheduler reads the MultiConnector's own configuration. A connector gets a
    copy of its part and cannot change the rest. It can see the rest only in a worker,
    and vLLM creates the workers before the scheduler.
    """
    current = get_current_vllm_config_or_none()
    top = None if current is None else current.kv_transfer_config
    if top is None or top.kv_connector == transfer.kv_connector or not transfer.is_kv_consumer:
        return
    if top.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"within {top.kv_connector}, a read that fails would fail the request, not be computed: add"
            ' "kv_load_failure_policy": "recompute" to --kv-transfer-config,'
            f' beside "kv_connector": "{top.kv_connector}"'
        )


def _only_group(vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig) -> "KVCacheGroupSpec":
    """Return the layers; each must keep keys and values of every token."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigError("InfiniStoreConnector cannot store blocks that context parallelism spreads over workers")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not all(isinstance(spec, FullAttentionSpec) for spec in _specs(groups[0])):
        raise ConfigError(
            "InfiniStoreConnector stores models that attend to all tokens in every layer; this one has"
            f" {', '.join(sorted({type(spec).__name__ for group in groups for spec in _specs(group)}))}"
        )
    return groups[0]


def _specs(group: "KVCacheGroupSpec") -> list[Any]:
    spec = group.kv_cache_spec
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def _block_tokens(group: "KVCacheGroupSpec") -> int:
    tokens: int = _specs(group)[0].block_size
    return tokens


def _names(
    vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig, settings: ConnectorSettings, *, grouped: bool
) -> BlockNames:
    """Return the names of blocks: equal if and only if blocks are interchangeable.

    With `grouped`, as many blocks as have `group_tokens` are on one node of a cluster.
    """
    group = _only_group(vllm_config, kv_cache_config)
    model = vllm_config.model_config
    shards = vllm_config.parallel_config.tensor_parallel_size // kv_cache_config.kv_tp_replicas
    facts = {
        "model": settings.model or model.model,
        "revision": model.revision,
        "config": fingerprint_of_config(model.hf_config.to_dict()),
        "quantization": model.quantization,
        "dtype": model.dtype,
        "cache dtype": vllm_config.cache_config.cache_dtype,
        "layout": kv_cache_config.kv_cache_layout,
        "kernels": _kernels(),
        "block tokens": _block_tokens(group),
        "shards": shards,
    }
    return block_names(
        facts,
        model=settings.model or model.model,
        namespace=settings.namespace,
        layers=group.layer_names,
        shards=shards,
        group_blocks=max(1, settings.group_tokens // _block_tokens(group)) if grouped else 0,
    )


def _kernels() -> object:
    """Return what else determines a block's layout: a CPU's instruction set."""
    if not current_platform.is_cpu():
        return current_platform.device_type
    import torch

    capabilities = torch.cpu.get_capabilities()
    return [capabilities.get("architecture"), torch.backends.cpu.get_cpu_capability(), capabilities.get("amx_tile")]


def _extra_keys(request: Any, first: int, end: int) -> bytes:
    """Return a block's further inputs: cache salt, LoRA adapter, images, embeddings."""
    keys, _ = generate_block_hash_extra_keys(request, first, end, 0)
    return repr(keys).encode() if keys else b""


def _after_what_was_queued() -> Callable[[], object]:
    """Return a function that waits, in any thread, for this thread's GPU work
    so far.
    """
    import torch

    if not torch.cuda.is_available():
        return lambda: None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    wait: Callable[[], object] = event.synchronize
    return wait
