"""The MultiConnector that a connector is a part of, as far as a part can see it."""

from typing import TYPE_CHECKING

from vllm.config import get_current_vllm_config_or_none

from infinistore.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

__all__ = ["check_load_failures", "outer_connector"]


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
    """Return the configuration of the connector that this one is a part of, in a
    worker.
    """
    current = get_current_vllm_config_or_none()
    top = None if current is None else current.kv_transfer_config
    return None if top is None or top.kv_connector == transfer.kv_connector else top
