"""vLLM's class: forwards vLLM's calls to the two halves of the connector. Also the
checks of a MultiConnector around it, and the connector's statistics in vLLM's log and
among vLLM's Prometheus metrics.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.utils import create_metric_per_engine

from infinistore import blocking
from infinistore.errors import (
    ConfigError,
    DeadlineExceeded,
    InfiniStoreException,
    PermissionDenied,
    StoreUnavailable,
)
from infinistore.integrations.internal.record import Record
from infinistore.integrations.vllm.announcements import Announcement
from infinistore.integrations.vllm.background import Background
from infinistore.integrations.vllm.blocks import Step
from infinistore.integrations.vllm.kv_events import Stages, Teller, WorkerMetadata, offer_dumps, teller_of
from infinistore.integrations.vllm.layout import (
    Adapters,
    Layout,
    UnhashedInputs,
    announced_blocks,
    announced_engine,
)
from infinistore.integrations.vllm.loading import LoadChoice
from infinistore.integrations.vllm.observations import COUNTERS, TIMES, Observations, merged
from infinistore.integrations.vllm.resets import Deletion
from infinistore.integrations.vllm.scheduler import Pins, SchedulerSide, read_prompts
from infinistore.integrations.vllm.settings import ConnectorSettings
from infinistore.integrations.vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig

_LOOK_UP_THREADS: Final = 4


def check_load_failures(transfer: "KVTransferConfig") -> None:
    """Refuse a MultiConnector in which a failed read would fail its request.

    vLLM's scheduler reads the MultiConnector's own configuration. A connector gets a
    copy of its part and cannot change the rest. It can see the rest only in a worker,
    and vLLM creates the workers before the scheduler.
    """
    top = outer_connector(transfer)
    if top is None or not transfer.is_kv_consumer:
        return
    if top.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"within {top.kv_connector}, a read that fails would fail the request, not be computed: add"
            ' "kv_load_failure_policy": "recompute" to --kv-transfer-config,'
            f' beside "kv_connector": "{top.kv_connector}"'
        )


def outer_connector(transfer: "KVTransferConfig") -> "KVTransferConfig | None":
    """Return the configuration of the connector that this is part of."""
    current = get_current_vllm_config_or_none()
    top = None if current is None else current.kv_transfer_config
    return None if top is None or top.kv_connector == transfer.kv_connector else top


_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class ConnectorStats(KVConnectorStats):
    """The results of `Observations.take`, added up over workers and time."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another's."""
        self.data = merged(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counters, and the mean of each time in milliseconds."""
        if self.is_empty():
            return {}
        means = {f"mean {name} (ms)": round(1e3 * fmean(times), 3) for name, times in self.data["times"].items()}
        return {**self.data["counters"], **means}

    def is_empty(self) -> bool:
        """Whether nothing was observed."""
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):
    """Counters `vllm:infinistore_NAME` and histograms `vllm:infinistore_NAME_seconds`,
    for each engine.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        make_counter: Any = self._counter_cls
        make_histogram: Any = self._histogram_cls
        self._counters = {
            name: self._each(make_counter(f"vllm:infinistore_{name}", meaning, labelnames=self._labelnames))
            for name, meaning in COUNTERS.items()
        }
        self._histograms = {
            name: self._each(
                make_histogram(
                    f"vllm:infinistore_{name}_seconds", meaning, labelnames=self._labelnames, buckets=_BUCKETS_S
                )
            )
            for name, meaning in TIMES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what an engine observed."""
        for name, amount in transfer_stats_data.get("counters", {}).items():
            self._counters[name][engine_idx].inc(amount)
        for name, times in transfer_stats_data.get("times", {}).items():
            for seconds in times:
                self._histograms[name][engine_idx].observe(seconds)

    def _each(self, metric: Any) -> dict[int, Any]:
        engines: dict[int, Any] = create_metric_per_engine(metric, self.per_engine_labelvalues)
        return engines


LOG = logging.getLogger("vllm.infinistore")
"""A child of vLLM's logger, which determines level, format and destination."""


class _Metadata(KVConnectorMetadata):
    def __init__(self, step: Step) -> None:
        self.step = step


class _Layers(KVConnectorHandshakeMetadata):
    """The labels of a worker's layers, by the index of their group."""

    def __init__(self, labels: dict[int, tuple[str, ...]]) -> None:
        self.labels = labels


class InfiniStoreConnector(KVConnectorBase_V1, SupportsHMA):
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
        check_load_failures(transfer)
        self._is_part = outer_connector(transfer) is not None
        self._stack = ExitStack()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._teller: Teller | None = None
        self._untold: Stages = {}
        self._unhashed = UnhashedInputs(vllm_config)
        self._adapters = Adapters(vllm_config)
        record = Record(LOG, self._settings.url.partition("?")[0])
        self._observed = Observations()
        self._background = Background(record)
        scheduling = role is KVConnectorRole.SCHEDULER
        if scheduling and self._settings.events_dump_endpoint:
            blocks = self._settings.events_dump_blocks
            offer_dumps(vllm_config.kv_events_config, self._settings.events_dump_endpoint, blocks)
        self._store = store = self._open(
            self._settings.lookup_deadline_s if scheduling else self._settings.deadline_s, role
        )
        self._layout = layout = Layout.of(vllm_config, kv_cache_config, self._settings, clustered=store.is_cluster)
        weights = layout.names.facts["weights"] or "unknown"
        LOG.info("InfiniStore: keys begin with %s/; the weights are %s", layout.names.prefix, weights)
        if scheduling:
            if transfer.kv_load_failure_policy != "recompute":
                LOG.warning("InfiniStore: kv_load_failure_policy is now 'recompute': what cannot be read is computed")
                transfer.kv_load_failure_policy = "recompute"
            if layout.obstacle:
                LOG.warning("InfiniStore: the model is computed, and nothing of it is stored: %s", layout.obstacle)
            self._teller = teller_of(vllm_config, kv_cache_config, layout.groups)
            look_ups = ThreadPoolExecutor(_LOOK_UP_THREADS, thread_name_prefix="infinistore-look-up")
            self._stack.callback(look_ups.shutdown, cancel_futures=True)
            self._scheduler = SchedulerSide(
                store,
                layout.names,
                record,
                groups=layout.groups,
                reads=transfer.is_kv_consumer,
                writes=transfer.is_kv_producer,
                save_generated=self._settings.save_generated,
                boundary_tokens=self._settings.boundary_tokens,
                observations=self._observed,
                extra=lambda request, first, end: extra_keys(request, first, end, self._adapters.identity(request)),
                events=None if self._teller is None else self._teller.changes,
                pins=self._pins(record),
                background=self._background,
                choice=self._choice(),
                workers=vllm_config.parallel_config.world_size,
                in_thread=look_ups.submit,
            )
            # For calls that look at all keys of the store, which takes it a while.
            self._patient = self._open_lazily(self._settings.deadline_s, role)
            prefix = f"{layout.names.prefix}/"
            self._deletion = Deletion(
                self._patient, prefix, lambda: self.scheduler_side.is_past_reset, self._background
            )
            writes = transfer.is_kv_producer and bool(layout.groups)
            url = self._settings.announce_url.rstrip("/")
            announcement = Announcement(
                self._patient,
                layout.names,
                record,
                writes=writes,
                blocks=announced_blocks(layout, vllm_config, kv_cache_config),
                engine=announced_engine(url, layout.names, kv_cache_config) if url else None,
            )
            self._background.start(announcement.renewing())
        else:
            rank, replica = divmod(get_tensor_model_parallel_rank(), kv_cache_config.kv_tp_replicas)
            self._worker = WorkerSide(
                store,
                layout.names,
                self._settings,
                record,
                groups=layout.groups,
                layers=layout.labels,
                shards=layout.shards_of(rank),
                writes=replica == 0,
                delivers=not transfer.is_kv_consumer,
                observations=self._observed,
                background=self._background,
            )
            if self._is_part and vllm_config.parallel_config.pipeline_parallel_size > 1:
                self._untold = {get_pp_group().rank_in_group: self._own_layers()}

    def _choice(self) -> LoadChoice | None:
        """Return what chooses between loading and computing; None if nothing has to."""
        transfer = self._kv_transfer_config
        # A pure consumer loads what another engine has computed for it.
        if self._settings.load == "always" or not (transfer.is_kv_producer and transfer.is_kv_consumer):
            return None
        ranks = self._vllm_config.parallel_config.world_size
        return LoadChoice(time.monotonic, ranks=ranks, observations=self._observed)

    def _pins(self, record: Record) -> Pins | None:
        """Return the pins; none if nothing is stored."""
        settings = self._settings
        if not self._layout.groups:
            return None
        prompts = read_prompts(settings.pin_prompts_file, self._tokenize) if settings.pin_prompts_file else ()
        return Pins(
            self._store,
            self._layout.names,
            self._layout.groups,
            record,
            prompts=prompts,
            priority=settings.pin_priority,
            pin_s=settings.pin_s,
            background=self._background,
            clock=time.monotonic,
        )

    def _tokenize(self, text: str) -> Sequence[int]:
        tokenizer = cached_tokenizer_from_config(self._vllm_config.model_config)
        if tokenizer is None:
            raise ConfigError("pin_prompts_file has texts, and vLLM runs without a tokenizer; write lists of tokens")
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)  # a chat template has them
        return tokens

    # What a lost save costs is a computation later, so no request need be held back for
    # it.
    requires_kv_delivery = False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are saved by calls between them, which a whole graph leaves out."""
        return True

    def _open(self, deadline_s: float, role: KVConnectorRole) -> blocking.BlockingStore:
        """Open the store, which need not be there yet."""
        store = self._open_lazily(deadline_s, role)
        try:
            stats = store.stats()
        except (StoreUnavailable, DeadlineExceeded) as error:
            LOG.warning("InfiniStore: the store is not there, and vLLM goes on without it until it is: %s", str(error))
        except PermissionDenied:  # a tenant without the role monitor may do all that is needed
            LOG.info("InfiniStore: %s", self._settings.url.partition("?")[0])
        except BaseException:
            self._stack.close()
            raise
        else:
            url = self._settings.url.partition("?")[0]
            LOG.info("InfiniStore: %s, by %s (%s)", url, stats.transport, stats.transport_reason)
        return store

    def _open_lazily(self, deadline_s: float, role: KVConnectorRole) -> blocking.BlockingStore:
        options: Any = {"deadline_s": deadline_s, "verify": self._settings.verify}
        store = blocking.open_store(self._settings.url, lazy=True, name=f"vllm-{role.name.lower()}", **options)
        return self._stack.enter_context(store)

    # ---- the worker's side ----

    def register_kv_caches(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        """Register the KV cache; warn if the store is too small for one prompt."""
        bytes_of = self.worker_side.register(kv_caches, self._kv_cache_config.num_blocks)
        config = self._vllm_config
        tokens = config.model_config.max_model_len
        prompt_bytes = sum(
            size * len(group.needed(tokens // group.block_tokens * group.block_tokens))
            for group, size in zip(self._layout.groups, bytes_of, strict=True)
        )
        self._check_capacity(prompt_bytes * config.parallel_config.world_size)

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
        self.worker_side.begin(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        """Start the loads in the background."""
        self.worker_side.start_loads(_after_what_was_queued())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: requests whose blocks are being loaded are not in the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: object, attn_metadata: object, **kwargs: Any) -> None:
        """Start the saves of a layer, unless vLLM computes a step in micro-batches and
        calls this after each: then `wait_for_save` starts them.
        """
        if not self._vllm_config.parallel_config.use_ubatching:
            self.worker_side.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """End the saves of a step."""
        self.worker_side.end_saves()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests that are saved, and those that are loaded."""
        return self.worker_side.poll(finished_req_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the saved requests, the loaded ones, and those not readable."""
        sent, loaded = self.worker_side.poll(finished_req_ids)
        return KVConnectorTransferResults(sent, loaded, self.worker_side.take_failed_requests())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be read."""
        return self.worker_side.take_failed_blocks()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return this worker's layers, if it is one stage of a pipeline."""
        # A MultiConnector gives it to all its connectors, and most refuse it.
        if self._vllm_config.parallel_config.pipeline_parallel_size == 1 or self._is_part:
            return None
        return _Layers(self._own_layers())

    def _own_layers(self) -> dict[int, tuple[str, ...]]:
        return {group.index: group.layers for group in self._layout.groups}

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return which saves have ended, if the scheduler wants to know, and whether
        this worker is past a reset; with the first step also its layers, where the
        handshake has no room for them.
        """
        saved = self.worker_side.take_saved()
        stages, self._untold = self._untold, {}
        reset = self.worker_side.late_writes.take_past()
        step, report = self.worker_side.take_link_report()
        if not (saved or stages or reset or step):
            return None
        links = {} if report is None else {self._vllm_config.parallel_config.rank: report}
        return WorkerMetadata(saved, stages, Counter([reset] if reset else ()), step, links)

    # ---- the scheduler's side ----

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return which blocks were stored, and which were lost, since the last call."""
        return () if self._teller is None else self._teller.take()

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Learn the layers of all stages: a block is stored if all of them are."""
        told = [metadata[rank] for rank in sorted(metadata)]
        if layers := [one.labels for one in told if isinstance(one, _Layers)]:
            self.scheduler_side.learn_layers(layers)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how much of a request is stored, which is loaded in the background;
        None while that is looked up, and vLLM asks again in the next step."""
        if self._unhashed.are_in(request) or self._adapters.are_unknown(request):
            return 0, False
        tokens = self.scheduler_side.loadable_tokens(request, num_computed_tokens)
        if any(group.offered for group in self._layout.groups):
            # vLLM ends a chunk there, so that a later request finds a state.
            departs = self.scheduler_side.departs_after(request)
            request.shared_prefix_boundary = max(request.shared_prefix_boundary, departs)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record the blocks to load into."""
        if not self._unhashed.are_in(request) and not self._adapters.are_unknown(request):
            self.scheduler_side.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the workers' loads and saves of a step."""
        state = scheduler_output.kv_connector_block_state
        step = self.scheduler_side.plan(
            scheduler_output.num_scheduled_tokens,
            scheduler_output.preempted_req_ids or (),
            state.resolve_block_ids,
            state.boundary_state_offloads,
        )
        return _Metadata(step)

    def update_connector_output(self, connector_output: Any) -> None:
        """Record which loads and saves have ended, and which blocks failed."""
        written = connector_output.kv_connector_worker_meta
        if isinstance(written, WorkerMetadata):
            self.scheduler_side.step_ended(written.step, written.links)
            self.scheduler_side.workers_past(written.past)
            if self._teller is not None:
                self._teller.changes.saved(written.saved)
            if written.stages:
                self.scheduler_side.learn_layers(written.stages[rank] for rank in sorted(written.stages))
        self.scheduler_side.loads_ended(
            connector_output.finished_recving or (), connector_output.invalid_block_ids, connector_output.failed_recving
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a finished request until they are written."""
        self._adapters.forget(request)
        return self.scheduler_side.finished(request), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a finished request until they are written."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool:
        """Delete all blocks of this model from the store, as for new weights. The
        scheduler waits for it. False if some may be left. With `reset` set to "keep",
        they are kept.
        """
        if self._settings.reset == "keep":
            return True
        try:
            return self._deletion.delete()
        finally:
            self.scheduler_side.forget()

    # ---- both ----

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what was observed since the last call."""
        if self._worker is not None:
            self._worker.observe_writes()
        observed = self._observed.take()
        return ConnectorStats(observed) if observed else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Return statistics that have come from another process."""
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Return the metrics that vLLM exposes."""
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Finish the writes and close the store."""
        self._background.close()
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._deletion.close()
        self._stack.close()

    @property
    def worker_side(self) -> WorkerSide:
        """The worker's half, in a worker's connector."""
        assert self._worker is not None, "vLLM asked its scheduler's connector for what workers do"
        return self._worker

    @property
    def scheduler_side(self) -> SchedulerSide:
        """The scheduler's half, in a scheduler's connector."""
        assert self._scheduler is not None, "vLLM asked a worker's connector for what the scheduler does"
        return self._scheduler


def extra_keys(request: Any, first: int, end: int, adapter: str = "") -> bytes:
    """Return a block's further inputs: cache salt, LoRA adapter, images, embeddings."""
    keys, _ = generate_block_hash_extra_keys(request, first, end, 0)
    if keys and request.lora_request is not None:  # vLLM gives its name and path
        keys = (("lora", adapter), *keys[1:])
    return repr(keys).encode() if keys else b""


def _after_what_was_queued() -> Callable[[], object]:
    """Return a function that waits, in any thread, for this thread's GPU work."""
    import torch

    if not torch.cuda.is_available():
        return lambda: None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    wait: Callable[[], object] = event.synchronize
    return wait


def _register() -> None:
    """Let vLLM's MultiConnector find the class by its name, for its statistics."""
    try:
        KVConnectorFactory.register_connector(InfiniStoreConnector.__name__, __name__, InfiniStoreConnector.__name__)
    except ValueError:  # this module was imported before, or somebody else has registered it
        return


_register()
