"""LoRA adapters by the content of their files: a name and a path say where an adapter
is, and what is there may be trained again.

vLLM knows an adapter by a number. It reads the files when a request with that number
comes, or a while before, and again if it had no room to keep them. So if files change
later, nobody knows which ones vLLM computes with, and requests with that adapter are
computed as without a store.
"""

import logging
from typing import TYPE_CHECKING, Any

import attrs

from infinistore.integrations.internal.weights import WeightFiles, weight_files

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

__all__ = ["Adapters"]

LOG = logging.getLogger("vllm.infinistore")


@attrs.frozen
class _Adapter:
    path: str
    files: WeightFiles


class Adapters:
    """The adapters of an engine, and of its requests."""

    def __init__(self, vllm_config: "VllmConfig") -> None:
        settings = vllm_config.lora_config
        self._dtype = "" if settings is None else str(settings.lora_dtype)
        self._seen: dict[int, _Adapter | None] = {}  # by vLLM's numbers; None: it is not known what vLLM has
        self._identities: dict[str, str] = {}  # by request

    def are_unknown(self, request: Any) -> bool:
        """Return whether a request has an adapter of which nobody knows what it is. The
        answer is the same until the request is forgotten.
        """
        if request.lora_request is None:
            return False
        if request.request_id not in self._identities:
            self._identities[request.request_id] = self._identify(request.lora_request)
        return not self._identities[request.request_id]

    def identity(self, request: Any) -> str:
        """Return what stands for the adapter of a request; nothing without one."""
        return self._identities.get(request.request_id, "")

    def forget(self, request: Any) -> None:
        """Forget a request. Its adapter is remembered."""
        self._identities.pop(request.request_id, None)

    def _identify(self, lora: "LoRARequest") -> str:
        files = weight_files(lora.lora_path)
        now = None if files is None or lora.load_inplace else _Adapter(lora.lora_path, files)
        number = lora.lora_int_id
        is_first = number not in self._seen
        known = self._seen.setdefault(number, now)
        if now is not None and known == now and (identity := now.files.identity()):
            return f"{identity} {self._dtype} {lora.is_3d_lora_weight}"
        self._seen[number] = None
        if is_first or known is not None:
            LOG.warning(
                "InfiniStore: requests with the adapter %s are computed, and nothing of them is stored: %s",
                lora.lora_name,
                "it is replaced in place; load another version from a path of its own, under a name of its own"
                if lora.load_inplace
                else "it has no files that can be read"
                if files is None
                else "it was replaced since vLLM loaded it; load another version under a name of its own",
            )
        return ""
