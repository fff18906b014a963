"""Who may import whom: docs/architecture.md has the pictures.

Every folder and every file directly under `infinistore/` has a rule. So has every
folder in `client/`, `server/` and `transports/`, for imports within these three. An
import inside a function or under `TYPE_CHECKING` counts, too.
"""

import ast
import re
from collections.abc import Mapping

import pytest

from .imports import PACKAGE, import_graph, product_files

GROUND: dict[str, set[str]] = {
    "addresses": {"errors", "settings"},
    # cluster: its URL, before anything is begun.
    "config": {"addresses", "cluster", "disk_settings", "errors", "host", "settings", "sizes"},
    "disk_settings": {"errors", "settings", "sizes"},
    "errors": {"namesake"},
    "host": {"errors"},
    "kept_errors": set(),
    "keys": set(),
    "named_classes": {"errors"},
    "namesake": set(),
    "secret_files": {"errors"},
    "service_manager": {"errors"},
    "settings": {"errors", "sizes"},
    "sizes": set(),
    "statistics": set(),
    "tenant_limits": set(),
    "traces": {"errors"},
    "version": set(),
}
"""The modules beside the folders that know nothing of the store, and what each may
import of the others.
"""

PUBLIC = {"aio", "blocking", "client", "server"}
"""What the command line and the demonstration see of the store: they name public things
of these, nothing deeper.
"""

ENGINE = {"allocators", "core", "eviction", "protocol", "transports"}

MAY_IMPORT: dict[str, set[str]] = {
    **GROUND,
    "allocators": {"errors", "named_classes", "sizes", "statistics"},
    "eviction": {"errors", "named_classes", "allocators"},
    "core": {"errors", "keys", "sizes", "statistics", "host", "tenant_limits", "allocators", "eviction"},
    # Jobs and decisions; what runs them lies above. numpy and zstandard are all that it
    # needs besides.
    "disk": {"errors", "keys", "sizes", "statistics", "allocators", "core"},
    "disk_io": {"disk_settings", "errors", "host", "sizes", "statistics", "core", "disk"},
    # Decisions; what reads files and asks sockets lies above.
    "access": {"errors", "settings", "sizes", "tenant_limits"},
    "protocol": {"errors", "keys", "statistics"},
    "transports": {"errors", "host", "kept_errors", "settings", "sizes", "statistics", "protocol"},
    # Decisions; a router or a connector measures and acts.
    "scheduling": {"errors", "named_classes", "traces"},
    # Decisions; what asks etcd and reads files lies above.
    "cluster": {"addresses", "errors", "keys", "settings", "sizes"},
    # protocol, transports: a node is asked who it is.
    "cluster_io": {"addresses", "errors", "host", "secret_files", "cluster", "protocol", "transports"},
    # client, cluster_io, disk, disk_io: imported late, for a cluster or a disk. A node
    # that drains is a client of the others.
    "server": {*GROUND, *ENGINE, "access", "answers", "client", "cluster", "cluster_io", "disk", "disk_io"},
    "client": {*GROUND, *ENGINE, "answers", "cluster", "cluster_io", "disk", "disk_io"},
    # The answers of any store, by a server or embedded.
    "answers": {"core", "disk", "protocol"},
    "aio": {"client", "protocol"},
    "blocking": {"client", "errors", "kept_errors", "protocol"},
    "dropin": {*GROUND, *PUBLIC},
    "tensors": {*GROUND, "blocking", "client"},
    # "infinistore" stands for names taken from the package itself: what is public.
    "demo": {*GROUND, *PUBLIC, "infinistore"},
    # cluster_io: who is in a cluster, while it is watched.
    "monitor": {*GROUND, *PUBLIC, "cluster", "cluster_io"},
    "integrations": {*GROUND, *PUBLIC, "scheduling", "tensors"},
    # integrations: how engines call their blocks.
    "routing": {*GROUND, *PUBLIC, "integrations", "scheduling", "transports"},
    # allocators: `prepare_process` must be the first thing that a server's process
    # does.
    "cli": {
        *GROUND,
        *PUBLIC,
        *(
            "infinistore",
            "demo",
            "monitor",
            "routing",
            "scheduling",
            "doctor",
            "allocators",
            "eviction",
            "disk",
            "disk_io",
            "cluster",
            "cluster_io",
        ),
        "access",
    },
    # What it says of a machine is what the store itself would find there.
    "doctor": {*GROUND, "core", "transports"},
    # A test suite: it looks at a server from the inside.
    "mover_contract": {*GROUND, *PUBLIC, *ENGINE},
    "infinistore": {"errors", "version", "dropin", *PUBLIC},
    "__main__": {"cli"},
}

WITHIN: dict[str, dict[str, set[str]]] = {
    "client": {
        "environment": {"movers"},
        "cluster": {"connection", "environment", "memory", "movers", "options", "requests"},
        "store_options": set(),
        "options": {"store_options"},
        "memory": set(),
        "worker_threads": set(),
        "requests": {"memory"},
        "movers": {"requests", "memory", "options", "worker_threads"},
        "operations": {"movers", "requests", "memory", "options"},
        "connection": {"operations", "movers", "requests", "memory", "options"},
        "api": {"movers", "requests", "memory", "options"},
        "drivers": {
            *("api", "cluster", "connection", "environment", "operations", "movers", "requests", "memory", "options"),
            *("store_options", "worker_threads"),
        },
        "extension": {"drivers", "environment", "memory", "options", "requests", "worker_threads"},
        "__init__": {"api", "drivers", "memory", "requests", "store_options"},
    },
    "server": {
        "budgets": set(),
        "certificates": set(),
        "disk": {"environment"},
        "listeners": set(),
        "maintenance": {"disk"},
        "recorder": set(),
        "environment": {"budgets", "listeners"},
        "security": {"certificates"},
        "connection": {"disk", "maintenance"},
        "take_over": {"connection", "listeners"},
        "movers": {"connection", "environment"},
        "session": {*("budgets", "connection", "disk", "maintenance", "movers", "recorder", "security", "take_over")},
        "telemetry": {"connection", "recorder", "session"},
        "tenancy": {"budgets", "disk", "environment", "movers", "session", "take_over"},
        "tenant_disks": {"disk", "environment", "maintenance", "tenancy"},
        "server": {
            *("certificates", "disk", "environment", "listeners", "maintenance", "security", "session", "take_over"),
            *("telemetry", "tenancy"),
        },
        "management": {"budgets", "certificates", "disk", "listeners", "maintenance", "security", "server"},
        "cluster": {"environment", "server"},
        "composition": {
            *("budgets", "certificates", "cluster", "connection", "disk", "environment", "listeners"),
            *("maintenance", "management", "movers", "recorder", "security", "server", "session"),
            *("take_over", "telemetry", "tenancy", "tenant_disks"),
        },
        "shards": {
            *("certificates", "composition", "environment", "listeners", "management", "security", "server"),
            *("take_over", "tenancy"),
        },
        "__init__": {"composition", "listeners", "security", "server", "shards"},
        "__main__": set(),
    },
    "transports": {
        "base": set(),
        "registry": {"base"},
        "sockets": {"base"},
        "tls": {"base", "sockets"},
        "rdma": {"base"},
        "cuda": {"base", "rdma"},  # it registers the memory of a GPU with an RDMA device
        "__init__": {"base", "registry"},
    },
}
"""Who may import whom within a folder, from the lowest to the highest: the drivers of
the client stand on its API, and on connections, these on operations, and these on
movers, which move bytes to and from memory. In the server, sessions stand on movers,
these on what one connection has, and `composition` on all that it composes."""

KNOWN: dict[str, set[tuple[str, str]]] = {"client": set(), "server": set(), "transports": set()}
"""What is still imported against that order. The list may only become shorter."""


def rooms(names: list[str]) -> set[str]:
    """What these dotted names have first: of `server.session.doorway`, `server`."""
    return {name.partition(".")[0] for name in names}


def graph_under(folder: str) -> dict[str, set[str]]:
    """The imports of the files under a folder that name files under it; names are
    relative to it.
    """
    prefix = f"infinistore.{folder}." if folder else "infinistore."
    package = prefix.removesuffix(".")

    def relative(name: str) -> str:
        return ("__init__" if folder else "infinistore") if name == package else name.removeprefix(prefix)

    def within(name: str) -> bool:
        return name == package or name.startswith(prefix)

    return {
        relative(name): {relative(other) for other in imported if within(other)}
        for name, imported in import_graph().items()
        if within(name)
    }


def against(graph: Mapping[str, set[str]], rules: Mapping[str, set[str]]) -> dict[tuple[str, str], list[str]]:
    """The imports from one room to another that no rule allows, by these two rooms."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, imported in graph.items():
        room = name.partition(".")[0]
        for other in sorted(imported):
            other_room = other.partition(".")[0]
            if other_room != room and other_room not in rules.get(room, set()):
                found.setdefault((room, other_room), []).append(f"{name} imports {other}")
    return found


def test_every_folder_and_every_file_has_a_rule() -> None:
    assert rooms(list(graph_under(""))) == set(MAY_IMPORT)
    for folder, rules in WITHIN.items():
        assert rooms(list(graph_under(folder))) == set(rules), folder


@pytest.mark.parametrize("rules", [MAY_IMPORT, *WITHIN.values()])
def test_no_rules_let_two_import_each_other(rules: Mapping[str, set[str]]) -> None:
    assert [(low, high) for low in rules for high in rules[low] if low in rules.get(high, set())] == []


@pytest.mark.parametrize("layer", sorted(MAY_IMPORT))
def test_a_layer_imports_only_what_lies_below_it(layer: str) -> None:
    graph = {
        name: imported
        for name, imported in graph_under("").items()
        # A __main__.py is a command, wherever it stands.
        if name.partition(".")[0] == layer and not name.endswith(".__main__")
    }
    assert graph
    assert against(graph, MAY_IMPORT) == {}


@pytest.mark.parametrize("folder", sorted(WITHIN))
def test_within_a_folder_imports_point_downwards(folder: str) -> None:
    found = against(graph_under(folder), WITHIN[folder])
    assert {pair: imports for pair, imports in found.items() if pair not in KNOWN[folder]} == {}
    assert KNOWN[folder] - found.keys() == set()  # what is on the list is still needed


@pytest.mark.parametrize("layer", ["cli", "demo", "dropin", "integrations", "monitor", "tensors"])
def test_commands_and_adapters_see_of_the_store_only_what_is_public(layer: str) -> None:
    allowed = {"client.extension"} if layer in ("dropin", "tensors") else set()
    wrong = [
        f"{name} imports {other}"
        for name, imported in graph_under("").items()
        for other in sorted(imported - allowed)
        if name.partition(".")[0] == layer and "." in other and other.partition(".")[0] in PUBLIC
    ]
    assert wrong == []


@pytest.mark.parametrize("layer", ["cli", "demo", "integrations", "monitor", "tensors"])
def test_commands_and_adapters_use_no_private_name_of_the_store(layer: str) -> None:
    wrong = [
        f"{file.relative_to(PACKAGE)}:{node.lineno} has {ast.unparse(node)}"
        for name, file in product_files().items()
        if name.startswith(f"infinistore.{layer}.")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and "store" in ast.unparse(node.value)
    ]
    assert wrong == []


def test_an_import_against_the_rules_is_found() -> None:
    assert against(
        {"low.file": {"high.file", "low.other"}, "high.file": {"low.file"}}, {"low": set(), "high": {"low"}}
    ) == {("low", "high"): ["low.file imports high.file"]}
    assert "client.api.store" in graph_under("")  # that is, files are found at all
    assert set(product_files().values()) >= set(PACKAGE.glob("*.py"))


def test_only_suites_for_other_packages_need_what_tests_need() -> None:
    """Such a suite is imported by whoever runs it, and by another one at most."""
    suites = {"infinistore.allocators.contract", "infinistore.eviction.contract", "infinistore.mover_contract"}
    needing = {
        name
        for name, file in product_files().items()
        if re.search(r"^ *(import|from) (hypothesis|pytest)\b", file.read_text(), re.MULTILINE)
    }
    assert needing == suites
    assert {name for name, imported in import_graph().items() if imported & suites} <= suites


def test_every_file_says_what_it_is_for() -> None:
    silent = [name for name, file in product_files().items() if not ast.get_docstring(ast.parse(file.read_text()))]
    assert silent == []
