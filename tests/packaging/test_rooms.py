"""No file is a fragment: a short one that only one neighbour uses belongs to it.

A file is as long as its subject, and a reader who looks for a thing should not have to
open five. A file below `SHORT` lines whose only importer stands in the same folder says
here why it is a file of its own.
"""

from .imports import import_graph, product_files

SHORT = 120

REASONS: dict[str, str] = {
    "infinistore.allocators.registry": "an extension point: allocators of other packages are found here",
    "infinistore.client.connection.circuit_breaker": "a subject of its own, with a model of its own",
    "infinistore.client.connection.tls": "imported late: few clients need ssl",
    "infinistore.core.hot_groups": "a subject of its own: it counts reads, and knows no block",
    "infinistore.eviction.registry": "an extension point: strategies of other packages are found here",
    "infinistore.routing.lookups": "a subject of its own: what is asked about a prompt, by no HTTP of its own",
    "infinistore.tensors.blocks": "stands on transfers and on what is generated from it",
    "infinistore.tensors.transfers": "blocking_transfers.py is generated from it",
}


def fragments() -> set[str]:
    files = product_files()
    importers: dict[str, set[str]] = {name: set() for name in files}
    for name, imported in import_graph().items():
        for other in imported:
            importers[other].add(name)
    return {
        name
        for name, file in files.items()
        if file.name not in ("__init__.py", "__main__.py")
        and len(file.read_text().splitlines()) < SHORT
        and len(importers[name]) == 1
        and files[next(iter(importers[name]))].parent == file.parent
    }


def test_a_short_file_with_one_importer_beside_it_has_a_reason() -> None:
    assert sorted(fragments() - REASONS.keys()) == []


def test_a_reason_that_nothing_needs_any_more_is_taken_off_the_list() -> None:
    assert sorted(REASONS.keys() - fragments()) == []
