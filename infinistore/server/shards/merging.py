"""The answers of all shards as one: metrics, statistics, numbers, lists.

Each function takes the answers by the number of their shard. A shard that did not
answer is not among them.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from infinistore.protocol.codec import statistics_from_tree, statistics_to_tree
from infinistore.protocol.fields import Tree
from infinistore.statistics import Stats, summed

__all__ = ["merge_clients", "merge_metrics", "merge_numbers", "merge_selftests", "merge_statistics", "merge_tenants"]

_MOST_CLIENTS: Final = 256
_SAMPLE: Final = re.compile(rb"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{)?")


def merge_metrics(texts: Mapping[int, bytes]) -> bytes:
    """Put scrapes in Prometheus's text format together, with the label `shard` before
    the others of each sample. Each metric is described once.
    """
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}  # by name: what describes it, its samples
    for shard, text in texts.items():
        described, samples = list[bytes](), list[bytes]()
        for line in text.splitlines():
            if line.startswith(b"# HELP "):
                described, samples = families.setdefault(line.split(b" ", 3)[2], ([], []))
            if not line.startswith(b"#"):
                samples.append(_labelled(line, b'shard="%d"' % shard))
            elif line not in described:
                described.append(line)
    return b"".join(line + b"\n" for found in families.values() for lines in found for line in lines)


def _labelled(line: bytes, label: bytes) -> bytes:
    match = _SAMPLE.match(line)
    assert match is not None, "a line of a scrape is a sample"
    end = match.end()
    if match[2] is None:
        return line[:end] + b"{" + label + b"}" + line[end:]
    return line[:end] + label + b"," + line[end:]


def merge_statistics(trees: Mapping[int, Tree]) -> Tree:
    """Add the statistics of the shards up, and append those of each, without its
    details. None of them: an empty map.
    """
    found = {shard: statistics_from_tree(tree) for shard, tree in trees.items()}
    if not found:
        return Tree({"shards": []})
    both = summed([Stats("", "", one.store, one.server, one.details, one.disk) for one in found.values()])
    assert both.server is not None
    tree = statistics_to_tree(both.server, both.store, both.details, both.disk)
    return Tree(
        {
            **tree,
            "shards": [
                {"shard": shard, **statistics_to_tree(one.server, one.store, None, one.disk)}
                for shard, one in found.items()
            ],
        }
    )


def merge_numbers(answers: Mapping[int, Mapping[str, Any]], name: str) -> int:
    """Add up one number of each answer."""
    return sum(answer[name] for answer in answers.values())


def merge_clients(answers: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the connections to all shards; of many, those that moved the most
    bytes.
    """
    clients = [client for answer in answers.values() for client in answer["clients"]]
    clients.sort(key=lambda client: client["received_bytes"] + client["sent_bytes"], reverse=True)
    return clients[:_MOST_CLIENTS]


def merge_tenants(answers: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tenants of all shards, their figures and limits added up."""
    found: dict[str, dict[str, Any]] = {}
    for answer in answers.values():
        for tenant in answer["tenants"]:
            before = found.get(tenant["tenant"], {})
            added = {name: one + tenant[name] for name, one in before.items() if isinstance(one, int)}
            found[tenant["tenant"]] = tenant | added
    return list(found.values())


def merge_selftests(answers: Mapping[int, Mapping[str, Any]], count: int) -> dict[str, Any]:
    """Return the checks of the transports of all `count` shards, and of all disks as
    one. A shard that did not answer has failed.
    """
    missing = [shard for shard in range(count) if shard not in answers]
    checks = [check for answer in answers.values() for check in answer["transports"]]
    checks += [
        {"transport": "shard", "address": str(shard), "ok": False, "error": "it does not answer", "elapsed_s": 0.0}
        for shard in missing
    ]
    merged: dict[str, Any] = {"status": "ok" if all(check["ok"] for check in checks) else "failed"}
    merged["transports"] = checks
    disks = {shard: answer["disks"] for shard, answer in answers.items() if "disks" in answer}
    if disks:
        merged["disks"] = {
            "ok": all(disk["ok"] for disk in disks.values()),
            "error": "; ".join(f"shard {shard}: {disk['error']}" for shard, disk in disks.items() if disk["error"]),
            "elapsed_s": max(disk["elapsed_s"] for disk in disks.values()),
        }
        if not merged["disks"]["ok"]:
            merged["status"] = "failed"
    return merged
