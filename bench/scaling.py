"""On paper: what one core, 16 shards and 100 nodes give for the KV cache of a large
model, whose prompts are computed by some engines and answered by others.

    python bench/scaling.py [--set layers=61 link_gbit_s=200 nodes=16] [--json]

Every number is an assumption with a name, and says whether it was measured, and where,
or is assumed; `--set` puts yours in its place. How evenly keys lie on nodes, and what is
left of prompts without one of them, is simulated with the placement that clients use;
the simulation is the same in every run. `docs/reference/scaling.md` has the tables that
this prints, and says what follows from them.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_hexdigest

from infinistore.cluster.membership import Node, View
from infinistore.cluster.placement import Placement

__all__ = ["ASSUMPTIONS", "Assumption", "Shape", "balance", "markdown", "tables", "values_of"]

GB = 1e9
GROUPS = 100_000
PROMPTS = 500
MEASURED, ASSUMED, YOURS = "measured", "assumed", "yours"


class Assumption(NamedTuple):
    """A number that the tables follow from."""

    name: str
    value: float
    unit: str
    how: str
    """Measured, assumed, or yours."""
    where: str
    """Where it comes from."""


_HERE = "two busy cores of an AMD EPYC, Python 3.11"
ASSUMPTIONS = (
    Assumption("layers", 80, "", ASSUMED, "Llama 3.3 70B"),
    Assumption("kv_heads", 8, "", ASSUMED, "Llama 3.3 70B"),
    Assumption("head_size", 128, "", ASSUMED, "Llama 3.3 70B"),
    Assumption("element_bytes", 2, "bytes", ASSUMED, "bf16; 1 for fp8"),
    Assumption("parameters_billion", 70.6, "10^9", ASSUMED, "Llama 3.3 70B"),
    Assumption("prompt_tokens", 8192, "tokens", ASSUMED, "a long conversation, or a document"),
    Assumption("block_tokens", 16, "tokens", ASSUMED, "vLLM's blocks"),
    Assumption("group_tokens", 1024, "tokens", ASSUMED, "keys with one hash tag: vLLM's connector"),
    Assumption("gpus", 8, "", ASSUMED, "of an engine; each is a client with its part of every block"),
    Assumption("gpu_tflops", 989, "10^12/s", ASSUMED, "an H100 with dense bf16, by its data sheet"),
    Assumption("prefill_use", 0.4, "", ASSUMED, "the part of that which a prefill uses; attention not counted"),
    Assumption("link_gbit_s", 400, "Gbit/s", ASSUMED, "of an engine's host and of a server's, each way"),
    Assumption("link_use", 0.9, "", ASSUMED, "the part of that which is payload"),
    Assumption("tcp_put_s_per_gb", 0.31, "s", MEASURED, f"the server's processor time, bench/compare.py, {_HERE}"),
    Assumption("tcp_get_s_per_gb", 0.29, "s", MEASURED, "the same"),
    Assumption("request_us", 158, "us", MEASURED, f"the server's processor time, bench/shards.py, {_HERE}"),
    Assumption("shard_cost", 1.18, "", MEASURED, "the same of two shards by one server: 1.01 to 1.52 in five runs"),
    Assumption("rdma_block_us", 0.9, "us", MEASURED, "to post and complete a block, bench/rdma.py, without a card"),
    Assumption("shards", 16, "", ASSUMED, "with a core for each, and each as good as one of two"),
    Assumption("nodes", 100, "", ASSUMED, "servers, each with a link of its own"),
    Assumption("pool_gib", 1024, "GiB", ASSUMED, "of a server"),
)


def values_of(assumptions: Sequence[Assumption]) -> dict[str, float]:
    """Return the values by name."""
    return {one.name: one.value for one in assumptions}


def with_yours(words: Sequence[str]) -> tuple[Assumption, ...]:
    """Return the assumptions with those that are given, as `name=value`.

    Raises:
        ValueError: there is none of that name, or it is no positive number.
    """
    given = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in values_of(ASSUMPTIONS):
            raise ValueError(f"{name} is none of {', '.join(values_of(ASSUMPTIONS))}")
        if not float(text) > 0:
            raise ValueError(f"{name} must be more than 0")
        given[name] = float(text)
    return tuple(
        one._replace(value=given[one.name], how=YOURS, where="") if one.name in given else one for one in ASSUMPTIONS
    )


class Shape(NamedTuple):
    """What keys on some nodes come to."""

    nodes: int
    uneven: float
    """The bytes of the fullest node by those of the mean one."""
    asked: float
    """How many nodes have a part of a prompt."""
    busiest: float
    """The largest part of a prompt that is on one node."""
    usable: float
    """What is left of a prompt up to its first gap, without one of the nodes."""
    uneven_without: float
    """As `uneven`, of the nodes that are left, by the mean of all."""


def balance(nodes: int, groups_of_a_prompt: int, *, keys: int = GROUPS, prompts: int = PROMPTS) -> Shape:
    """Simulate where so many groups of keys lie, and those of so many prompts."""
    view = View(0, tuple(Node(f"node-{number:05}", f"infinistore://h{number}:22345") for number in range(nodes)))
    placement = Placement(view)
    tags = [f"{{{xxh3_64_hexdigest(str(number).encode())}}}" for number in range(keys)]
    owners = placement.owners(tags)
    uneven = max(Counter(owners).values()) * nodes / keys
    if nodes == 1:
        return Shape(1, uneven, 1, 1, 0, 0)
    dice = random.Random(1)
    asked = busiest = usable = 0.0
    for _ in range(prompts):
        on = [owners[dice.randrange(keys)] for _ in range(groups_of_a_prompt)]
        asked += len(set(on))
        busiest += max(Counter(on).values()) / len(on)
        # Each node is as likely to be lost; without one that has nothing, all is left.
        firsts = {owner: on.index(owner) / len(on) for owner in set(on)}
        usable += (sum(firsts.values()) + nodes - len(firsts)) / nodes
    rest = Placement(View(1, view.nodes[1:]))
    uneven_without = max(Counter(rest.owners(tags)).values()) * nodes / keys
    return Shape(nodes, uneven, asked / prompts, busiest / prompts, usable / prompts, uneven_without)


class Table(NamedTuple):
    """A table of the page."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class _Paper:
    """What follows from the assumptions."""

    def __init__(self, value: Mapping[str, float]) -> None:
        self.value = value
        self.token_bytes = 2 * value["layers"] * value["kv_heads"] * value["head_size"] * value["element_bytes"]
        self.prompt_bytes = self.token_bytes * value["prompt_tokens"]
        flops = value["gpus"] * value["gpu_tflops"] * 1e12 * value["prefill_use"]
        self.prefill_tokens_s = flops / (2 * value["parameters_billion"] * 1e9)
        self.prefill_bytes_s = self.prefill_tokens_s * self.token_bytes
        self.link_bytes_s = value["link_gbit_s"] / 8 * GB * value["link_use"]
        self.block_bytes = self.token_bytes * value["block_tokens"] / value["gpus"]
        self.shard_worth = value["shards"] / value["shard_cost"]
        # Each byte is put once and got once; so a core does both in turns.
        self.core_tcp_bytes_s = GB / (value["tcp_put_s_per_gb"] + value["tcp_get_s_per_gb"])
        # By RDMA it posts one piece of work for each block, and answers a request for those of a group.
        blocks = max(1.0, value["group_tokens"] / value["block_tokens"])
        batch_s = (blocks * value["rdma_block_us"] + value["request_us"]) * 1e-6
        self.core_rdma_bytes_s = blocks * self.block_bytes / (2 * batch_s)

    def servers(self) -> dict[str, tuple[float, float]]:
        """Return requests a second, and bytes a second each way that processors allow."""
        core = 1e6 / self.value["request_us"]
        cores = {"one core": 1.0, f"{self.value['shards']:.0f} shards": self.shard_worth}
        return {
            f"{name}, {path}": (core * worth, rate * worth)
            for path, rate in (("TCP", self.core_tcp_bytes_s), ("RDMA", self.core_rdma_bytes_s))
            for name, worth in cores.items()
        }


def tables(assumptions: Sequence[Assumption], *, keys: int = GROUPS) -> list[Table]:
    """Return the tables of the page, with so many groups of keys on the nodes."""
    value = values_of(assumptions)
    paper = _Paper(value)
    groups = max(1, round(value["prompt_tokens"] / value["group_tokens"]))
    counts = sorted({1, 8, round(value["nodes"])})
    shapes = [balance(nodes, groups, keys=keys) for nodes in counts]
    listed = [(one.name, f"{one.value:g} {one.unit}".strip(), one.how, one.where) for one in assumptions]
    return [
        Table("Assumptions", ("name", "value", "", "from"), listed),
        Table("What the model asks for", ("what", ""), _asked(paper)),
        Table(
            "What one server gives",
            ("server", "small requests a second", "processors allow, each way", "with its link", "prefill engines"),
            _given(paper),
        ),
        Table(
            "What a cluster gives",
            ("nodes", "fullest / mean", "each way", "prefill engines", "tokens kept", "nodes of a prompt", "read in"),
            [_cluster(paper, shape) for shape in shapes],
        ),
        Table(
            "A node is lost",
            ("nodes", "tokens lost", "left of a prompt", "computed again", "fullest of the others", "with 2 copies"),
            [_lost(paper, shape) for shape in shapes],
        ),
    ]


def _asked(paper: _Paper) -> list[tuple[str, str]]:
    value = paper.value
    again_s = value["prompt_tokens"] / paper.prefill_tokens_s
    read_s = paper.prompt_bytes / paper.link_bytes_s
    return [
        ("KV cache of a token", f"{paper.token_bytes / 1024:.0f} KiB"),
        ("of a prompt", f"{paper.prompt_bytes / 2**30:.2f} GiB"),
        ("of a block, in one GPU", f"{paper.block_bytes / 1024:.0f} KiB"),
        ("a prefill engine computes", f"{paper.prefill_tokens_s:,.0f} tokens/s"),
        ("and writes", f"{_gb(paper.prefill_bytes_s)}, {paper.prefill_bytes_s * 8 / GB:.0f} Gbit/s"),
        ("prompts that it hands to decode engines", f"{1 / again_s:.1f} a second"),
        ("a decode engine reads a prompt, by its link", f"in {read_s * 1000:.0f} ms"),
        ("computing the prompt takes", f"{again_s * 1000:.0f} ms, {again_s / read_s:.1f} times as long"),
        ("reading is quicker than computing from", f"{_gb(paper.prefill_bytes_s)} on"),
    ]


def _given(paper: _Paper) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, (requests, rate) in paper.servers().items():
        with_link = min(rate, paper.link_bytes_s)
        limit = "its link" if rate > paper.link_bytes_s else "its processors"
        engines = f"{with_link / paper.prefill_bytes_s:.1f}"
        rows.append((name, f"{requests:,.0f}", _gb(rate), f"{_gb(with_link)}, {limit}", engines))
    return rows


def _cluster(paper: _Paper, shape: Shape) -> tuple[str, ...]:
    """By RDMA, so that links are the limit: the fullest node's is the first."""
    each_way = shape.nodes * paper.link_bytes_s / shape.uneven
    kept = shape.nodes * paper.value["pool_gib"] * 2**30 / shape.uneven / paper.token_bytes
    # The engine's link, or that of the node that has the largest part.
    read_s = paper.prompt_bytes / paper.link_bytes_s * max(1.0, shape.busiest)
    return (
        f"{shape.nodes}",
        f"{shape.uneven:.2f}",
        _gb(each_way),
        f"{each_way / paper.prefill_bytes_s:,.0f}",
        f"{kept / 1e6:,.1f} million",
        f"{shape.asked:.1f}",
        f"{read_s * 1000:.0f} ms",
    )


def _lost(paper: _Paper, shape: Shape) -> tuple[str, ...]:
    tokens = paper.value["pool_gib"] * 2**30 / paper.token_bytes
    if shape.nodes == 1:
        whole_s = paper.value["prompt_tokens"] / paper.prefill_tokens_s
        return (
            "1",
            f"{tokens / 1e6:.1f} million, all",
            "0 %",
            f"{whole_s * 1000:.0f} ms a prompt",
            "",
            "it has no other",
        )
    again_s = (1 - shape.usable) * paper.value["prompt_tokens"] / paper.prefill_tokens_s
    put_twice_s = shape.nodes * paper.link_bytes_s / shape.uneven / 2
    return (
        f"{shape.nodes}",
        f"{tokens / 1e6:.1f} million, {1 / shape.nodes:.1%}",
        f"{shape.usable:.1%}",
        f"{again_s * 1000:.0f} ms a prompt",
        f"{shape.uneven_without:.2f} of the mean before",
        f"nothing; puts of {_gb(put_twice_s)}",
    )


def _gb(bytes_per_s: float) -> str:
    digits = 1 if bytes_per_s < 100 * GB else 0
    return f"{bytes_per_s / GB:,.{digits}f} GB/s"


def markdown(table: Table) -> str:
    """Return a table for a page."""
    lines = [f"| {' | '.join(table.columns)} |", "|" + "---|" * len(table.columns)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in table.rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="your own numbers")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    try:
        found = tables(with_yours(arguments.set))
    except ValueError as error:
        parser.error(str(error))
    if arguments.json:
        print(json.dumps([table._asdict() for table in found], indent=1))
    else:
        print("\n\n".join(f"{table.title}\n\n{markdown(table)}" for table in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
