"""Images, videos and sounds that vLLM gives a number instead of a hash.

It does so if neither its prefix cache nor its cache of processed inputs is on, for
which it would need the hash. Each process counts from the same number on, so that the
same name is another image in another engine, and after a restart.
"""

import logging
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["UnhashedInputs"]

LOG = logging.getLogger("vllm.infinistore")

_NUMBERED: Final = re.compile(r"(^|:)renderer\d+-mm-\d+-")
"""A name with a number. One that vLLM has for an adapter begins with that and a
colon."""


class UnhashedInputs:
    """Knows which requests have such inputs, and warns of the first."""

    def __init__(self, vllm_config: "VllmConfig") -> None:
        inputs = vllm_config.model_config.multimodal_config
        without = inputs is not None and inputs.mm_processor_cache_gb == 0
        self._all = without and not vllm_config.cache_config.enable_prefix_caching
        self._told = False

    def are_in(self, request: Any) -> bool:
        """Return whether a request has inputs that have no hash: keys of its blocks
        would not tell them apart.
        """
        inputs = request.mm_features
        # A name may also come from a process whose settings are not known here.
        if not inputs or not (self._all or any(_NUMBERED.search(one.identifier) for one in inputs)):
            return False
        if not self._told:
            self._told = True
            LOG.warning(
                "InfiniStore: requests with images, videos or sounds are computed, and nothing of them is stored: vLLM"
                " does not hash them; start it with --enable-prefix-caching, or with --mm-processor-cache-gb above 0"
            )
        return True
