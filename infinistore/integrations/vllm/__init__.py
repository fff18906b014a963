"""vLLM's KV cache in a store: a `KVConnectorBase_V1`, loaded by its module path.

    vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "InfiniStoreConnector",
        "kv_connector_module_path": "infinistore.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": "infinistore://HOST:22345"}}'

Full blocks of prompts are written to the store layer by layer, while the model computes
the next layer. A request whose prompt has a stored prefix gets its blocks from the
store, while other requests run. Blocks that cannot be read are computed: a store that
is lost, slow or full costs time, never correctness.

Modules: `settings` (`kv_connector_extra_config`), `blocks` (keys, and messages from the
scheduler to the workers), `scheduler` and `worker` (the two halves of the connector,
independent of vLLM), `background` (the thread for calls that nobody waits for),
`resets` (deletions when the cache is reset), `block_events` (events and dumps for
routers), `announcements` (warnings of engines that share nothing, and what engines tell
routers of themselves), and `connector`, vLLM's class. Only `connector`, `layout` and
`kv_events` need vLLM; the first is imported on first use.
"""

from typing import TYPE_CHECKING, Final

from infinistore.integrations.internal.tested_release import tested_with

if TYPE_CHECKING:
    from infinistore.integrations.vllm.connector import InfiniStoreConnector

__all__ = ["InfiniStoreConnector"]
TESTED_VLLM: Final = "0.32"
"""The release of vLLM that the connector was tested with. Others may lack what it
imports; that is an error with a remedy.
"""


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name != "InfiniStoreConnector":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with tested_with("vLLM", "vllm", f"{TESTED_VLLM}.*"):
            from infinistore.integrations.vllm.connector import InfiniStoreConnector
        return InfiniStoreConnector
