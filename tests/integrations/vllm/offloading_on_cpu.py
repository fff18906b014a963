"""vLLM's own offloading to the host's memory, without a GPU: everything of it but the
copies, which vLLM makes with CUDA alone, and refuses to make anywhere else.

vLLM loads the class by its name, from `kv_connector_extra_config`.
"""

from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

__all__ = ["OffloadingOnCpu"]


class OffloadingOnCpu(CPUOffloadingSpec):  # type: ignore[misc, unused-ignore]
    """Offloading with room for as many blocks as its setting `blocks` says."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.num_chunks = config.extra_config["blocks"]
        assert self.blocks_per_chunk == 1

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return _Copies(kv_caches, self.num_chunks)


class _Copies(OffloadingWorker):  # type: ignore[misc, unused-ignore]
    """Copies blocks at once. A job is a model's only group of layers."""

    def __init__(self, caches: CanonicalKVCaches, blocks: int) -> None:
        assert len(caches.group_data_refs) == 1
        self._near = [cache.tensor for cache in caches.tensors]
        self._far = [tensor.new_zeros((blocks, *tensor.shape[1:])) for tensor in self._near]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec) -> bool:
        for near, far in zip(self._near, self._far, strict=True):
            far[dst_spec.block_ids] = near[src_spec.block_ids]
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def submit_load(self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec) -> bool:
        for near, far in zip(self._near, self._far, strict=True):
            near[dst_spec.block_ids] = far[src_spec.block_ids]
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""
