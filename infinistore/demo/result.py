"""What a run of the demonstration found: the figures of the table and of `--json`, and
how they are worked out.

Rates are in GB/s of payload (10**9 bytes a second), over the time spent in calls to the
store. The compute is simulated: the time "saved" is the time that the model would have
taken at the speed that was set, less the time that loading took, and is worth as much
as that speed is true.
"""

from typing import Any

from attrs import frozen

from infinistore.demo.layout import KVLayout
from infinistore.demo.messages import Finished
from infinistore.demo.text import Prompt


def gigabytes_per_s(payload_bytes: int, seconds: float) -> float | None:
    """Return the rate, or None where nothing was moved."""
    return payload_bytes / seconds / 1e9 if payload_bytes and seconds > 0 else None


@frozen
class PromptResult:
    """What became of one prompt. Every byte that was loaded was compared and was right,
    or there would be no result.
    """

    prompt: Prompt
    prefill: Finished
    decode: Finished

    def computing_instead_s(self, work: Finished, prefill_tokens_per_s: float) -> float:
        """Return what computing the tokens that `work` loaded would have taken, at the
        speed of the simulated model.
        """
        return work.hit_tokens / prefill_tokens_per_s

    def saved_s(self, work: Finished, prefill_tokens_per_s: float) -> float:
        """Return what loading saved compared with computing; negative if the store was
        the slower way.
        """
        return self.computing_instead_s(work, prefill_tokens_per_s) - work.load_s


@frozen
class RestartResult:
    """What was found after the server was restarted on its disk."""

    prompt: Prompt
    durable_blocks: int
    """Blocks of all prompts that were on disk before."""
    filled_bytes: int
    """Blocks of other prompts that were stored afterwards."""
    capacity_bytes: int
    """The pool."""
    recovery_s: float
    """Until the index of the disk was back."""
    decode: Finished

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain data; keys end in their units."""
        return {
            "prompt": self.prompt.name,
            "durable_blocks": self.durable_blocks,
            "filled_bytes": self.filled_bytes,
            "pool_bytes": self.capacity_bytes,
            "recovery_s": self.recovery_s,
            "hit_tokens": self.decode.hit_tokens,
            "disk_blocks": self.decode.disk_blocks,
            "loaded_bytes": self.decode.loaded_bytes,
            "load_s": self.decode.load_s,
            "load_gb_per_s": gigabytes_per_s(self.decode.loaded_bytes, self.decode.load_s),
        }


@frozen
class LossResult:
    """What was found after a node was killed."""

    node: str
    blocks: int
    """Of the prompt, before."""
    missing_blocks: int
    """All of them were the node's."""
    dropped_after_s: float
    """Until the node was no longer in the view."""
    decode: Finished
    """While the node was lost."""
    prefill: Finished
    """When the others had taken its part over."""
    decode_again: Finished

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "node": self.node,
            "blocks": self.blocks,
            "missing_blocks": self.missing_blocks,
            "hit_tokens": self.decode.hit_tokens,
            "dropped_after_s": self.dropped_after_s,
            "computed_tokens": self.prefill.computed_tokens,
            "unstored_blocks": self.prefill.unstored_blocks,
            "hit_tokens_again": self.decode_again.hit_tokens,
        }


@frozen
class JoinResult:
    """What was found after a node had joined."""

    node: str
    blocks: int
    """Of both prompts."""
    moved_blocks: int
    """How many of them the node has now, copied when decode read them."""
    reads: list[Finished]
    """Of the prompt, while the node warmed up."""
    decode: Finished
    """Afterwards."""

    @property
    def least_hit_tokens(self) -> int | None:
        """The least that a read found while the node warmed up; None without reads."""
        return min((one.hit_tokens for one in self.reads), default=None)

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "node": self.node,
            "blocks": self.blocks,
            "moved_blocks": self.moved_blocks,
            "reads": len(self.reads),
            "least_hit_tokens": self.least_hit_tokens,
            "hit_tokens": self.decode.hit_tokens,
        }


@frozen
class NodesResult:
    """What was found in a cluster of so many nodes."""

    nodes: int
    membership: str
    """"etcd" or "file"."""
    loss: LossResult
    join: JoinResult

    @property
    def loads(self) -> list[Finished]:
        """All work that loaded something."""
        return [self.loss.decode, self.loss.prefill, self.loss.decode_again, *self.join.reads, self.join.decode]

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "nodes": self.nodes,
            "membership": self.membership,
            "loss": self.loss.as_json(),
            "join": self.join.as_json(),
        }


@frozen
class DemoResult:
    """What a whole run found."""

    url: str
    transport: str
    source: str
    """The name of the text."""
    layout: KVLayout
    prefill_tokens_per_s: float
    prompts: list[PromptResult]
    restart: RestartResult | None = None
    """With a disk only."""
    cluster: NodesResult | None = None
    """With several nodes only."""

    @property
    def checked_bytes(self) -> int:
        """Bytes that were loaded, by both workers, and compared one by one."""
        again_bytes = 0 if self.restart is None else self.restart.decode.loaded_bytes
        again_bytes += 0 if self.cluster is None else sum(one.loaded_bytes for one in self.cluster.loads)
        return again_bytes + sum(one.loaded_bytes for result in self.prompts for one in (result.prefill, result.decode))

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain data; keys end in their units. `ok` is always true
        here.
        """
        return {
            "ok": True,
            "url": self.url,
            "transport": self.transport,
            "input": self.source,
            "layout": {
                "model": self.layout.model,
                "layers": self.layout.layers,
                "kv_heads": self.layout.kv_heads,
                "head_dim": self.layout.head_dim,
                "element_bytes": self.layout.element_bytes,
                "chunk_tokens": self.layout.chunk_tokens,
                "block_bytes": self.layout.block_bytes,
            },
            "simulated_prefill_tokens_per_s": self.prefill_tokens_per_s,
            "checked_bytes": self.checked_bytes,
            "wrong_bytes": 0,
            "prompts": [self._prompt_as_json(result) for result in self.prompts],
            "restart": None if self.restart is None else self.restart.as_json(),
            "cluster": None if self.cluster is None else self.cluster.as_json(),
        }

    def _prompt_as_json(self, result: PromptResult) -> dict[str, Any]:
        prefill, decode, speed = result.prefill, result.decode, self.prefill_tokens_per_s
        return {
            "name": result.prompt.name,
            "about": result.prompt.about,
            "tokens": prefill.tokens,
            "prefill": {
                "hit_tokens": prefill.hit_tokens,
                "loaded_bytes": prefill.loaded_bytes,
                "load_s": prefill.load_s,
                "load_gb_per_s": gigabytes_per_s(prefill.loaded_bytes, prefill.load_s),
                "saved_s": result.saved_s(prefill, speed),
                "computed_tokens": prefill.computed_tokens,
                "simulated_compute_s": prefill.compute_s,
                "written_bytes": prefill.written_bytes,
                "write_s": prefill.write_s,
                "write_gb_per_s": gigabytes_per_s(prefill.written_bytes, prefill.write_s),
                "compute_and_write_s": prefill.compute_and_write_s,
                "storing_added_s": prefill.storing_added_s,
            },
            "decode": {
                "hit_tokens": decode.hit_tokens,
                "loaded_bytes": decode.loaded_bytes,
                "load_s": decode.load_s,
                "load_gb_per_s": gigabytes_per_s(decode.loaded_bytes, decode.load_s),
                "saved_s": result.saved_s(decode, speed),
            },
        }
