"""What `bench/shards.py` measures on which machine, and how a run that was cut off goes
on.
"""

import json
from pathlib import Path

import pytest

import shards
from machine import Machine, this_machine
from recorded import Record, RecordError


def machine(cores: int, nodes: int = 1) -> Machine:
    of_a_node = cores // nodes
    listed = {str(node): [*range(node * of_a_node, (node + 1) * of_a_node)] for node in range(nodes)}
    return Machine("AMD EPYC", cores, cores, listed, 8 * cores, "cpython 3.12.3", "6.8")


class TestRows:
    @pytest.mark.parametrize(
        ("cores", "of_shards", "of_clients", "left_out"),
        [
            (1, [1], [1, 4], ["2, 4, 8, 16 shards", "8 to 64 clients", "one NUMA node"]),
            (2, [1, 2], [1, 2, 8], ["4, 8, 16 shards", "16 to 64 clients", "one NUMA node"]),
            (6, [1, 2, 4], [1, 4, 16], ["8, 16 shards", "32 to 64 clients", "one NUMA node"]),
            (16, [1, 2, 4, 8, 16], [1, 4, 16, 64], ["one NUMA node"]),
            (64, [1, 2, 4, 8, 16], [1, 4, 16, 64], ["one NUMA node"]),
        ],
    )
    def test_rows_follow_from_the_cores_and_what_is_left_out_is_named(
        self, cores: int, of_shards: list[int], of_clients: list[int], left_out: list[str]
    ) -> None:
        rows, left = shards.choose_rows(machine(cores))
        assert {(row.work, row.shards, row.clients) for row in rows} == {
            (work, n, count) for work in ("requests", "bytes") for n in of_shards for count in of_clients
        }
        assert len(rows) == len({str(row) for row in rows})  # a file tells them apart
        assert len(left) == len(left_out)
        assert all(part in text for part, text in zip(left_out, left, strict=True))

    def test_with_several_nodes_near_and_far_memory_are_compared_on_the_two_largest(self) -> None:
        rows, left = shards.choose_rows(machine(64, nodes=2), work=["bytes"])
        assert [row for row in rows if row.nodes] == [
            shards.Row("bytes", 1, 16, (0, 1)), shards.Row("bytes", 16, 16, (0, 1))
        ]  # fmt: skip
        assert not left
        uneven = machine(16)._replace(nodes={"0": [0, 1], "1": [2, 3, 4, 5], "2": [*range(6, 16)]})
        rows, left = shards.choose_rows(uneven, work=["requests"])
        assert [(row.shards, row.clients, row.nodes) for row in rows if row.nodes] == [(1, 2, (2, 1)), (2, 2, (2, 1))]
        assert left == ["near and far memory of nodes 0: those of 2 and 1 do"]

    def test_counts_that_are_given_are_measured_even_if_the_cores_are_few(self) -> None:
        rows, left = shards.choose_rows(machine(2), [4, 16], [64], ["requests"])
        assert [(row.shards, row.clients) for row in rows] == [(4, 64), (16, 64)]
        assert left == ["near and far memory: this process has the cores of one NUMA node"]

    @pytest.mark.parametrize(
        ("words", "numbers"),
        [(["1..16"], [1, 2, 4, 8, 16]), (["8", "1", "1..3"], [1, 2, 3, 8]), (["5..5"], [5]), ([], [])],
    )
    def test_counts_are_listed_or_doubled(self, words: list[str], numbers: list[int]) -> None:
        assert shards.counts(words) == numbers

    @pytest.mark.parametrize("word", ["0", "4..2", "-1..4", "some", "1.."])
    def test_what_is_no_count_is_refused(self, word: str) -> None:
        with pytest.raises(ValueError, match=r"is no count|invalid literal"):
            shards.counts([word])
        with pytest.raises(SystemExit):
            shards.read_arguments([f"--shards={word}"])

    def test_ratios_are_those_of_the_first_by_each_of_the_others(self) -> None:
        turns = {
            "shards": [shards.Turn(rate, 0.0003) for rate in (10.0, 400.0, 20.0)],
            "one server": [shards.Turn(10.0, 0.0006)],
            "raw sockets": [shards.Turn(80.0, 0.0)],
        }
        found = shards.figures(shards.Row("bytes", 2, 8), turns)
        assert found["ratios"] == {"shards / one server": 2.0, "shards / raw sockets": 0.25}
        assert found["shards"] == {
            "requests_per_s": 40, "bytes_per_s": 20 * 2 * 16 * 256 * 1024, "server_us_per_request": 150.0
        }  # fmt: skip


class TestMachine:
    def test_what_is_seen_is_what_the_process_may_use(self, tmp_path: Path) -> None:
        files = {
            "proc/cpuinfo": "processor : 0\nmodel name\t: Xeon 8480\n",
            "proc/meminfo": "MemTotal:       134217728 kB\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
            "sys/devices/system/node/node0/cpulist": "0-3\n",
            "sys/devices/system/node/node1/cpulist": "4-7\n",
            "sys/devices/system/node/node2/cpulist": "\n",  # memory alone
            **{
                f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list": f"{core % 4},{core % 4 + 4}\n"
                for core in range(8)
            },
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        seen = this_machine(tmp_path, frozenset(range(1, 8)))
        assert (seen.processor, seen.cores, seen.physical_cores, seen.memory_gib) == ("Xeon 8480", 7, 4, 128)
        assert seen.nodes == {"0": [1, 2, 3], "1": [4, 5, 6, 7]}
        assert "7 cores (4 physical), Xeon 8480, 2 NUMA nodes (node 0: 3 cores, node 1: 4 cores), 128 GiB" in (
            seen.describe()
        )
        (tmp_path / "sys/fs/cgroup/cpu.max").write_text("250000 100000\n")
        assert this_machine(tmp_path, frozenset(range(8))).cores == 2

    def test_a_kernel_that_tells_nothing_has_the_cores_of_the_process(self, tmp_path: Path) -> None:
        seen = this_machine(tmp_path, frozenset({3}))
        assert (seen.cores, seen.physical_cores, seen.nodes, seen.memory_gib) == (1, 1, {}, 0)
        assert seen.describe().startswith("1 core, ")


class TestRecord:
    def test_each_row_is_in_the_file_as_it_ends_and_those_that_are_there_are_not_missing(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "rows.json"
        first = Record(path, {"rounds": (1, 2)}, machine(2), ["a", "b"], left_out=["c"])
        first.add("a", {"ratio": 0.5})
        told = json.loads(path.read_text())
        assert (told["rows"], told["missing"]) == ([{"row": "a", "machine": 0, "ratio": 0.5}], ["b"])
        again = Record(path, {"rounds": (1, 2)}, machine(2), ["a", "b"], resume=True)
        assert again.missing == ["b"]
        again.add("b", {"ratio": 2.0})
        assert [row["row"] for row in json.loads(path.read_text())["rows"]] == ["a", "b"]
        assert [entry.name for entry in path.parent.iterdir()] == ["rows.json"]

    def test_without_resume_it_begins_anew(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.json"
        Record(path, {}, machine(2), ["a"]).add("a", {})
        assert Record(path, {}, machine(2), ["a"]).missing == ["a"]

    def test_a_row_names_the_machine_that_it_is_from(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.json"
        Record(path, {}, machine(2), ["a", "b"]).add("a", {})
        Record(path, {}, machine(16), ["a", "b"], resume=True).add("b", {})
        told = json.loads(path.read_text())
        assert [told["machines"][row["machine"]]["cores"] for row in told["rows"]] == [2, 16]

    def test_other_settings_and_other_files_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.json"
        Record(path, {"seconds": 1.0, "rounds": 3}, machine(2), ["a"])
        with pytest.raises(RecordError, match=r"other settings \(seconds\); leave --resume out"):
            Record(path, {"seconds": 0.5, "rounds": 3}, machine(2), ["a"], resume=True)
        for text in ("", "[]", "{}", '{"rows": []}'):
            path.write_text(text)
            with pytest.raises(RecordError, match="is no record"):
                Record(path, {}, machine(2), ["a"], resume=True)

    def test_no_row_begins_that_would_end_after_the_limit(self) -> None:
        now = 0.0
        record = Record(None, {}, machine(2), ["a", "b"], limit_s=10, clock=lambda: now)
        now = 11.0
        assert record.may_begin()  # the first one always: else it would never get on
        now = 0.0
        assert record.may_begin()
        now = 4.0
        record.add("a", {})
        assert record.may_begin()
        now = 6.5
        assert not record.may_begin()
        assert Record(None, {}, machine(2), ["a"], clock=lambda: now).may_begin()
