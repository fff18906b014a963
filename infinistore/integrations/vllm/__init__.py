"""vLLM's KV cache in a store: a connector of vLLM's own kind, `KVConnectorBase_V1`, loaded by its module path.

    vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "InfiniStoreConnector",
        "kv_connector_module_path": "infinistore.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": "infinistore://HOST:22345"}}'

Full blocks of prompts are written to the store layer by layer, while the model computes the next layer. A request whose
prompt begins like one that is stored gets its blocks from there, while other requests go on. What cannot be read is
computed: a store that is lost, slow or full costs time, never an answer.

The parts: `settings` (what `kv_connector_extra_config` may say), `names` (keys), `step` (what the scheduler tells the
workers), `scheduler` and `worker` (the two halves of the connector, which know of vLLM only what they are given), and
`connector`, which is vLLM's class. Only the last needs vLLM; it is imported when it is asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infinistore.integrations.vllm.connector import InfiniStoreConnector

__all__ = ["InfiniStoreConnector"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name != "InfiniStoreConnector":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from infinistore.integrations.vllm.connector import InfiniStoreConnector

        return InfiniStoreConnector
