"""The screen of a cluster: its rows, its keys, and nodes that come and go."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.cluster.membership import Node, NodeState
from infinistore.monitor.cluster import still
from infinistore.monitor.cluster_view import (
    ClusterControls,
    ClusterSnapshot,
    NodeOrder,
    NodeRow,
    document,
    screen,
    shown_rows,
    total,
)
from infinistore.monitor.controls import BACKSPACE, DOWN, END, ENTER, ESCAPE, HOME, PAGE_UP, UP, Controls
from infinistore.monitor.lines import ASCII, UNICODE
from infinistore.sizes import GIB
from tests.cli.in_process import ServerHere
from tests.ports import own_ports

from .conftest import INFINISTORE, Start, running_server
from .made import NOON, loaded_stats, make_stats, on_disks, plain, watched, worried_stats

URL = "infinistore+etcd://h1:2379/prod"


def node(number: int, **changes: Any) -> Node:
    return Node(id=f"n{number:03}", address=f"infinistore://10.0.0.{number}:22345", **changes)


def answering(number: int, stats: Callable[[int], Any] = loaded_stats, **changes: Any) -> NodeRow:
    return NodeRow(node(number, **changes), watched(stats(0), stats(1)).snapshot(), age_s=0.4)


def silent(number: int, silent_s: float = 42.7) -> NodeRow:
    model = watched(loaded_stats(0), loaded_stats(1))
    model.lose("Connection refused", now_s=2.0, at=NOON)
    return NodeRow(node(number), model.snapshot(), age_s=silent_s, silent_s=silent_s)


def cluster(*rows: NodeRow, **changes: Any) -> ClusterSnapshot:
    values: dict[str, Any] = {"kind": "etcd", "epoch": 7, "copies": 1, "view_age_s": 0.4, "problem": ""} | changes
    return ClusterSnapshot(URL, NOON, rows=rows, **values)


def text(snapshot: ClusterSnapshot, width: int = 160, height: int = 50, controls: ClusterControls | None = None) -> str:
    return "\n".join(plain(screen(snapshot, controls or ClusterControls(), width, height), width, height))


def line_of(name: str, shown: str) -> str:
    return next(one for one in shown.splitlines() if one[2:].startswith(name) and one[0] != "!")


CLUSTERS = {
    "empty": cluster(),
    "one": cluster(answering(1)),
    "mixed": cluster(
        answering(1, on_disks),
        answering(2, worried_stats, state=NodeState.DRAINING),
        silent(3),
        NodeRow(node(4, state=NodeState.JOINING, weight=20), watched().snapshot()),
        problem="no member of etcd answers",
    ),
    "many": cluster(*map(answering, range(100))),
}


@given(
    st.integers(1, 250),
    st.integers(1, 60),
    st.sampled_from(sorted(CLUSTERS)),
    st.sampled_from([UNICODE, ASCII]),
    st.lists(st.sampled_from(["?", "/", "x", "s", "r", "p", ENTER, END, UP]), max_size=5),
)
def test_any_size_is_filled_exactly(width: int, height: int, name: str, glyphs: Any, pressed: Sequence[str]) -> None:
    controls = ClusterControls()
    for key in pressed:
        controls = controls.press(key, [one.node.id for one in shown_rows(CLUSTERS[name], controls)])
    plain(screen(CLUSTERS[name], controls, width, height, glyphs), width, height)


def test_a_row_says_what_its_node_is_and_does() -> None:
    shown = text(CLUSTERS["mixed"])
    assert f"infinistore {URL}" in shown
    assert "nodes     4, 1 silent  view of etcd, confirmed 0.4 s ago; 1 copy of each block" in shown
    first = line_of("n001", shown).split()
    assert first[:5] == [">", "n001", "10.0.0.1:22345", "serving", "100"]
    assert " ".join(first[5:9]) == "75.0 % 4.00 GiB"
    for figure in ("90.0 %", "1,500", "900 MiB", "320 MiB", "25.8 %", "0.4 s"):
        assert figure in " ".join(first[9:])
    assert "draining" in line_of("n002", shown)
    assert "silent for 42 s: Connection refused" in line_of("n003", shown)
    assert line_of("n004", shown).split()[1:] == ["10.0.0.4:22345", "joining", "20", "connecting"]
    warnings = shown.splitlines()[2:5]
    assert warnings[0] == "! n003 is silent for 42 s: Connection refused"
    assert warnings[1] == "! the view stays as it is: no member of etcd answers"
    assert warnings[2].startswith("! n002: ") and warnings[2].endswith("more")


def test_a_small_screen_keeps_what_matters() -> None:
    shown = text(CLUSTERS["mixed"], 80, 24)
    for part in ("n001", "serving", "weight", "used", "hits", "req/s", "in/s", "out/s", "answer", "silent for 42 s"):
        assert part in shown
    assert "10.0.0.1" not in shown


def test_the_total_is_that_of_the_nodes_that_answer() -> None:
    snapshot = cluster(answering(1), answering(2, on_disks), silent(3), answering(4, lambda second: make_stats()))
    sums = total(snapshot.rows)
    assert (sums.nodes, sums.answering, sums.weight) == (4, 3, 400)
    assert (sums.used_bytes, sums.capacity_bytes, sums.keys) == (6 * GIB, 12 * GIB, 2 * 12_345)
    assert sums.requests == 3000 and sums.hit_rate == pytest.approx(0.9)
    assert sums.disk_used_bytes == 33 * GIB
    assert "total, 3 of 4" in text(snapshot)
    nobody = total([silent(1)])
    assert (nobody.capacity_bytes, nobody.requests, nobody.hit_rate) == (None, None, None)
    assert "none answers" in text(cluster(silent(1)))


def test_many_nodes_scroll_with_the_selected_one_in_sight() -> None:
    snapshot = CLUSTERS["many"]
    ids = [one.node.id for one in snapshot.rows]
    controls = ClusterControls()
    shown = text(snapshot, 80, 24, controls)
    assert "1-15 of 100" in shown
    for expected in (*range(1, 100), 99):
        controls = controls.press(DOWN, ids)
        shown = text(snapshot, 80, 24, controls)
        assert f"> n{expected:03}" in shown
        assert "total" in shown
    assert "86-100 of 100" in shown
    assert "n000" in text(snapshot, 80, 24, controls.press(HOME, ids))
    assert controls.press(PAGE_UP, ids).selected == "n089"


def test_nodes_are_sorted_and_filtered() -> None:
    busy = answering(2, lambda second: loaded_stats(2 * second, server={"uptime_s": 100.0 + second}))
    full = answering(3, lambda second: loaded_stats(second, store={"used_bytes": 4 * GIB}))
    snapshot = cluster(answering(1), busy, full, silent(4))

    def shown(controls: ClusterControls) -> list[str]:
        return [one.node.id for one in shown_rows(snapshot, controls)]

    assert shown(ClusterControls()) == ["n001", "n002", "n003", "n004"]
    assert shown(ClusterControls(order=NodeOrder.REQUESTS))[0] == "n002"
    assert shown(ClusterControls(order=NodeOrder.MEMORY)) == ["n003", "n001", "n002", "n004"]
    assert shown(ClusterControls(Controls(reversed=True)))[0] == "n004"
    assert shown(ClusterControls(Controls(filter="10.0.0.3:"))) == ["n003"]
    assert shown(ClusterControls(Controls(typing="N002"))) == ["n002"]


def test_enter_opens_the_screen_of_a_node_and_escape_leads_back() -> None:
    snapshot = CLUSTERS["mixed"]
    ids = [one.node.id for one in snapshot.rows]
    opened = ClusterControls().press(DOWN, ids).press(ENTER, ids)
    assert opened.opened == "n002"
    shown = text(snapshot, 80, 24, opened)
    assert "n002 infinistore://10.0.0.2:22345" in shown
    assert "Esc back" in shown and "client, by traffic" in shown
    filtered = opened.press("/", ids).press("x", ids).press(BACKSPACE, ids).press("y", ids).press(ENTER, ids)
    assert (filtered.opened, filtered.screen.filter) == ("n002", "y")
    assert filtered.press(ESCAPE, ids) == opened  # the filter first
    for key in (ESCAPE, BACKSPACE):
        back = opened.press(key, ids)
        assert (back.opened, back.selected) == (None, "n002")
        assert "Enter open" in text(snapshot, 80, 24, back)
    assert opened.press("q", ids).screen.quit
    assert ClusterControls().press(ENTER, []) == ClusterControls()


def test_the_selection_stays_with_its_node_and_near_one_that_left() -> None:
    controls = ClusterControls(selected="n002")
    assert controls.place(["n001", "n002", "n003"]) == 1
    assert controls.place(["n000", "n001", "n002"]) == 2
    assert controls.place(["n001", "n003"]) == 1
    assert controls.place(["n000", "n001"]) == 1
    assert controls.place([]) == 0


def test_what_is_printed_has_every_node_and_no_keys() -> None:
    printed = [one.plain for one in still(CLUSTERS["many"], 1.0, 120, UNICODE)]
    assert sum(" n0" in one for one in printed) == 100
    assert not any("quit" in one or one.startswith(">") for one in printed)
    assert printed[-1].split()[0] == "total"


def test_the_document_says_the_same() -> None:
    made = json.loads(json.dumps(document(CLUSTERS["mixed"])))
    assert (made["url"], made["kind"], made["epoch"], made["copies"]) == (URL, "etcd", 7, 1)
    assert made["total"]["answering"] == 2
    assert made["warnings"][0]["kind"] == "silent"
    assert [one["answers"] for one in made["nodes"]] == [True, True, False, False]
    assert made["nodes"][2]["silent_s"] == 42.7
    assert made["nodes"][0]["server"]["per_s"]["requests"] == 1500


def test_no_node_to_write_to_is_told() -> None:
    assert "the cluster has no nodes" in text(cluster())
    leaving = attrs.evolve(answering(1), node=node(1, state=NodeState.DRAINING))
    assert "no node takes writes" in text(cluster(leaving))
    assert "no node takes writes" in text(cluster(answering(1, weight=0)))


def write_nodes(file: Path, ports: dict[str, int]) -> None:
    nodes = [{"id": node_id, "address": f"127.0.0.1:{port}"} for node_id, port in ports.items()]
    file.with_suffix(".new").write_text(json.dumps({"nodes": nodes}))
    os.replace(file.with_suffix(".new"), file)


def port_of(server: ServerHere) -> int:
    return int(server.url.rpartition(":")[2])


@pytest.mark.process
def test_nodes_that_die_come_back_and_join_are_seen_without_a_restart(
    start: Start, environment: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "nodes.json"
    with running_server(environment) as one:
        first = port_of(one)
        with running_server(environment, own_ports(1)[0]) as other:
            second = port_of(other)
            write_nodes(file, {"a": first, "b": second})
            session = start(*INFINISTORE, "monitor", f"infinistore+file://{file}", "--interval", "0.2")
            session.wait_for("nodes     2 ")
            session.wait_until(lambda screen: screen.text.count("0 %") == 3)
            session.press("\x1b[B\r")
            session.wait_for("client, by traffic")
            session.wait_for("Esc back")
            session.press("\x7f")
            session.wait_for("> b")
        session.wait_for("silent for")
        session.wait_for("total, 1 of 2")
        with running_server(environment, second):
            session.wait_until(lambda screen: "silent" not in screen.text and "nodes     2 " in screen.text)
            write_nodes(file, {"a": first, "b": second, "c": 1})
            session.wait_for("nodes     3 ")
            write_nodes(file, {"a": first})
            session.wait_for("nodes     1 ")
            session.press("q")
            assert session.end() == 0
            assert session.is_restored()


def test_without_a_terminal_it_prints_a_row_for_each_node(
    run: Callable[..., Any], environment: dict[str, str], url: str
) -> None:
    address = url.partition("://")[2]
    with running_server(environment) as other:
        nodes = f"infinistore+static://{address},127.0.0.1:{port_of(other)}"
        shown = run("monitor", "--cluster", nodes, "--interval", "0.1")
        assert shown.returncode == 0
        assert shown.stderr.startswith("infinistore: standard output is no terminal")
        for part in (nodes, "nodes     2 ", "a static view", address, f"127.0.0.1:{port_of(other)}", "total"):
            assert part in shown.stdout
        made = json.loads(run("monitor", nodes, "--json", "--once", "--interval", "0.1").stdout)
        assert made["total"]["answering"] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--cluster", "tcp://127.0.0.1:1"], 2, "names no cluster"),
        (["--cluster", "infinistore+static://a", "infinistore+static://b"], 2, "give one"),
        (["infinistore+file:///nowhere/nodes.json", "--deadline", "0.1"], 3, "no view of the cluster within 0.1 s"),
        (["infinistore+static://127.0.0.1:1", "--once", "--interval", "0.1"], 3, "cannot connect"),
    ],
    ids=["no cluster", "two", "no view", "nobody"],
)
def test_what_cannot_be_watched_is_one_line(
    run: Callable[..., Any], arguments: list[str], code: int, said: str
) -> None:
    ended = run("monitor", *arguments)
    assert said in ended.stderr
    assert ended.returncode == code
