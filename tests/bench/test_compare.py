"""What `bench/compare.py` makes of what it measured, and of stores that fail."""

import io
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

pytest.importorskip("numpy")
import compare
from machine import Machine
from peers import original
from peers.report import Run, markdown
from peers.systems import SYSTEMS, Server, servers
from peers.wanted import Wanted, reached, wanted
from peers.work import KIB, MIB, SHAPES, Result, Shape, read_results
from recorded import Record

SMALL, MEDIUM, BATCH = Shape(1, 4 * KIB), Shape(1, 64 * KIB), Shape(64, 64 * KIB)
BY_NAME = {system.name: system for system in SYSTEMS}
RUN = Run("2 cores, AMD EPYC", {"redis": "8.1.0"}, "--quick", 12)
TWO_CORES = Machine("AMD EPYC", 2, 2, {"0": [0, 1]}, 24, "cpython 3.11.2", "6.1")
MANY_CORES = TWO_CORES._replace(cores=16, physical_cores=16, memory_gib=128, nodes={"0": [*range(16)]})


def result(
    operation: str, shape: Shape, clients: int, system: str, calls_per_s: float, *, p50_us: float = 50.0
) -> Result:
    figures = {"calls_per_s": calls_per_s, "p50_us": p50_us, "p99_us": 2 * p50_us}
    figures |= {"client_cpu_s_per_gb": 0.25, "server_cpu_s_per_gb": 0.5}
    of = BY_NAME[system]
    return Result(operation, shape, clients, system, of.ours, of.limit, figures)


def part(text: str, title: str) -> list[list[str]]:
    """Return the cells of the table under this title, without its head."""
    lines = text.partition(f"## {title}\n\n")[2].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def row(rows: list[Wanted], *words: str) -> Wanted:
    (found,) = [one for one in rows if all(word in one.wanted for word in words)]
    return found


class TestReport:
    def test_a_table_for_each_operation_and_number_of_clients_has_the_best_in_bold(self) -> None:
        results = [
            result("put", SMALL, 1, "TCP", 10_000, p50_us=100.0),
            result("put", SMALL, 1, "shared memory", 20_000, p50_us=50.0),
            result("put", SMALL, 1, "Redis", 11_000, p50_us=90.0),
            result("put", SMALL, 1, "raw sockets", 50_000, p50_us=20.0),
            result("put", BATCH, 1, "TCP", 500),
            result("get", SMALL, 4, "TCP", 9_000),
        ]
        text = markdown(RUN, results, {}, {})
        assert text.startswith("`bench/compare.py --quick`, 12 s. 2 cores, AMD EPYC. redis 8.1.0.")
        assert part(text, "put, 1 client") == [
            ["TCP", "100 / 200", "**2.10**"],  # 500 calls of 4 MiB
            ["shared memory", "**50 / 100**", ""],
            ["Redis", "**90 / 180**", ""],
            ["raw sockets", "20 / 40", ""],  # a limit is no store
        ]
        assert part(text, "get, 4 clients") == [["TCP", "**50 / 100**"]]

    def test_what_several_clients_get_is_shown_by_what_one_gets_and_less_is_bold(self) -> None:
        rates = {1: 1000.0, 2: 1500.0, 4: 900.0}
        text = markdown(RUN, [result("get", SMALL, n, "TCP", rate) for n, rate in rates.items()], {}, {})
        assert part(text, "Calls a second of all clients together, by those of one alone") == [
            ["get 4 KiB", "TCP", "1.50", "**0.90**"]
        ]

    def test_batches_by_shared_memory_are_shown_by_as_many_copying_processes(self) -> None:
        results = [
            result("get", BATCH, count, system, rate)
            for system, rates in (("shared memory", (500, 600)), ("memcpy", (1000, 800)))
            for count, rate in zip((1, 4), rates, strict=True)
        ]
        text = markdown(RUN, results, {}, {})
        assert part(text, "Shared memory by as many processes that only copy") == [
            ["get 64 x 64 KiB", "shared memory", "0.50", "0.75"]
        ]

    def test_rows_that_another_store_wins_are_listed_and_leases_do_not_help(self) -> None:
        results = [
            result("get", SMALL, 1, "TCP", 5_000, p50_us=200.0),
            result("get", SMALL, 1, "lease", 90_000, p50_us=11.0),
            result("get", SMALL, 1, "memcached, pylibmc", 20_000, p50_us=50.0),
            result("put", SMALL, 1, "TCP", 5_000, p50_us=200.0),
            result("put", SMALL, 1, "Redis", 4_000, p50_us=250.0),
        ]
        assert part(markdown(RUN, results, {}, {}), "Rows that are lost") == [
            ["get 4 KiB, 1 client", "TCP 200 / 400 us p50 / p99", "memcached, pylibmc 50 / 100 us p50 / p99", "0.25"]
        ]

    def test_memory_and_processor_time_are_shown_and_what_failed_is_named(self) -> None:
        text = markdown(
            RUN,
            [result("put", BATCH, 1, "TCP", 500)],
            {"TCP": 30 * MIB},
            {"Redis": "redis-server is not installed"},
        )
        assert part(text, "Memory of the server beside 256 MiB in blocks of 64 KiB") == [["TCP", "30 MiB"]]
        assert part(text, "CPU seconds a GB, client + server, 1 client") == [["TCP", "0.25 + 0.50"]]
        assert text.endswith("## Not measured\n\n- Redis: redis-server is not installed\n")
        assert "None." in text.partition("## Rows that are lost")[2]


class TestWanted:
    def test_single_calls_are_compared_with_the_median_of_pymemcache(self) -> None:
        results = [
            result(operation, shape, 1, system, 1, p50_us=median)
            for operation in ("put", "get")
            for shape, medians in ((SMALL, (130.0, 60.0, 100.0)), (MEDIUM, (132.0, 61.0, 100.0)))
            for system, median in zip(("TCP", "shared memory", "memcached, pymemcache"), medians, strict=True)
        ]
        rows = wanted(results)
        tcp = row(rows, "put of 4 KiB and 64 KiB over TCP: at most 1.3 times")
        assert tcp.row.endswith("| 4 KiB 1.30, 64 KiB 1.32 | lost: 64 KiB |")
        assert row(rows, "put of 4 KiB and 64 KiB by shared memory: at most 1.0 times").verdict == "reached"
        assert row(rows, "get of 4 KiB and 64 KiB by shared memory: at most 0.6 times").lost == ["64 KiB"]

    def test_batches_are_compared_with_the_best_other_store_and_with_the_machines_limits(self) -> None:
        rates = {"TCP": 900.0, "shared memory": 1600.0, "TCP, objects": 700.0, "shared memory, objects": 1500.0}
        rates |= {"Redis": 500.0, "memcached, pylibmc": 700.0, "raw sockets": 1000.0, "memcpy": 2000.0}
        results = [
            result(operation, BATCH, 1, name, rate) for operation in ("put", "get") for name, rate in rates.items()
        ]
        rows = wanted(results)
        assert row(rows, "best other store").row.endswith("| put 1.29, get 1.29 | lost |")
        assert row(rows, "raw sockets").verdict == "reached"
        assert row(rows, "put", "0.75 of memcpy").verdict == "reached"
        assert row(rows, "get", "0.8 of memcpy").verdict == "reached"
        assert row(rows, "returns objects").row.endswith("| TCP 0.78, shared memory 0.94 | lost: TCP |")

    def test_clients_together_are_compared_with_one_alone_and_with_copying_processes(self) -> None:
        rates = {"TCP": (100.0, 101.0, 99.0), "shared memory": (100.0, 160.0, 170.0), "memcpy": (150.0, 200.0, 300.0)}
        results = [
            result("get", BATCH, count, name, rate)
            for name, some in rates.items()
            for count, rate in zip((1, 2, 8), some, strict=True)
        ]
        rows = wanted(results)
        assert row(rows, "get of 64 x 64 KiB over TCP, 2, 8 clients together").lost == ["8 clients"]
        shared = row(rows, "get of 64 x 64 KiB by shared memory, 2, 8 clients together")
        assert shared.row.endswith("| 2 clients 0.80, 8 clients 0.57 | lost: 8 clients |")

    def test_what_was_not_measured_is_neither_reached_nor_lost(self) -> None:
        rows = wanted([result("put", SMALL, 1, "TCP", 1), result("put", SMALL, 1, "raw sockets", 2)])
        assert {one.verdict for one in rows} == {"not measured"}
        assert not any(one.lost for one in rows)
        assert not reached(rows)

    @pytest.mark.parametrize(("rate", "fine"), [(0.9, True), (0.89, False)])
    def test_all_is_well_if_nothing_that_was_measured_is_lost(self, rate: float, fine: bool) -> None:
        rows = wanted([result("put", BATCH, 1, "TCP", rate), result("put", BATCH, 1, "raw sockets", 1.0)])
        assert reached(rows) is fine

    def test_the_report_has_it_as_a_table(self) -> None:
        text = markdown(RUN, [result("put", BATCH, 1, name, 1) for name in ("TCP", "raw sockets")], {}, {})
        assert ["64 x 64 KiB over TCP: at least 0.9 of raw sockets", "put 1.00", "reached"] in part(
            text, "Wanted and measured"
        )


class TestPlan:
    def test_each_shape_has_its_cells_and_lookups_are_asked_once(self) -> None:
        arguments = compare.read_arguments(["--quick", "--operations", "put", "exists"], TWO_CORES)
        plan = dict(compare.cells(arguments))
        assert list(plan) == [SMALL, MEDIUM, BATCH]
        assert plan[SMALL] == [compare.Cell(one, SMALL, count) for one in ("put", "exists") for count in (1, 4)]
        assert {cell.operation for cell in plan[BATCH]} == {"put"}

    def test_what_is_not_said_is_everything(self) -> None:
        arguments = compare.read_arguments([], TWO_CORES)
        assert arguments.shapes == list(SHAPES)
        assert arguments.clients == [1, 2, 4, 8]
        for words in (["--shapes", "5 KiB"], ["--clients", "0"], ["--clients", "many"], ["--shards", "3"]):
            with pytest.raises(SystemExit):
                compare.read_arguments(words, TWO_CORES)

    @pytest.mark.parametrize(
        ("machine", "quick", "clients", "shards", "left_out"),
        [
            (TWO_CORES, False, [1, 2, 4, 8], [], ["16, 32, 64 clients", "shards"]),
            (TWO_CORES, True, [1, 4], [], ["16, 64 clients", "shards"]),
            (TWO_CORES._replace(cores=1, memory_gib=1), True, [1], [], ["4, 16, 64 clients", "shards"]),
            (MANY_CORES, False, [1, 2, 4, 8, 16, 32, 64], [8], []),
            (MANY_CORES, True, [1, 4, 16, 64], [8], []),
            (MANY_CORES._replace(memory_gib=32), True, [1, 4, 16], [8], ["64 clients"]),
            (MANY_CORES._replace(cores=64, nodes={"0": [0], "1": [1]}), True, [1, 4, 16, 64], [16], ["NUMA"]),
        ],
    )
    def test_clients_and_shards_follow_from_the_machine_and_the_rest_is_named(
        self, machine: Machine, quick: bool, clients: list[int], shards: list[int], left_out: list[str]
    ) -> None:
        arguments = compare.read_arguments(["--quick"] if quick else [], machine)
        assert (arguments.clients, arguments.shards) == (clients, shards)
        assert len(arguments.left_out) == len(left_out)
        assert all(part in text for part, text in zip(left_out, arguments.left_out, strict=True))

    def test_shards_are_stores_beside_the_others_and_those_that_are_named(self) -> None:
        names = [one.name for one in compare.chosen_systems(compare.read_arguments([], MANY_CORES))]
        assert "TCP, 8 shards" in names and "TCP" in names and "TCP, 2 shards" not in names
        asked = compare.read_arguments(["--systems", "TCP", "--shards", "1..4"], TWO_CORES)
        assert [one.name for one in compare.chosen_systems(asked)] == ["TCP", "TCP, 2 shards", "TCP, 4 shards"]

    @pytest.mark.parametrize(
        ("cell", "system", "concerns"),
        [
            (compare.Cell("put", SMALL, 8), "TCP", True),
            (compare.Cell("put", SMALL, 2), "embedded", False),  # nobody shares it
            (compare.Cell("put", SMALL, 1), "Redis, pipeline", False),  # which is for batches
            (compare.Cell("put", BATCH, 1), "Redis, pipeline", True),
            (compare.Cell("exists", SMALL, 1), "memcached, pymemcache", False),  # it has no such question
            (compare.Cell("put", Shape(1, 16 * MIB), 64), "TCP", False),  # it would have to evict
            (compare.Cell("get", Shape(1, 16 * MIB), 64), "TCP", True),
            (compare.Cell("get", Shape(1, 16 * MIB), 1), "TCP, 16 shards", False),  # four fit into each
            (compare.Cell("get", Shape(1, MIB), 1), "TCP, 16 shards", True),
        ],
    )
    def test_a_store_is_asked_for_what_it_has(self, cell: compare.Cell, system: str, concerns: bool) -> None:
        assert cell.concerns(BY_NAME[system]) is concerns

    def test_shapes_are_named_as_people_say_them_and_have_enough_blocks_for_a_batch(self) -> None:
        assert [str(shape) for shape in SHAPES][:4] == ["4 KiB", "64 x 4 KiB", "64 KiB", "64 x 64 KiB"]
        assert BATCH.batch_bytes == 4 * MIB
        assert all(shape.stored >= shape.blocks for shape in SHAPES)


class Clients(compare.Clients):
    """Clients that answer at once, except to one request, which fails."""

    def __init__(self, name: str, fails: Mapping[str, Any] | None = None) -> None:
        super().__init__(BY_NAME[name], Server(name), Path(), ExitStack())
        self.asked: list[dict[str, Any]] = []
        self._fails = fails

    def ask(self, count: int, **request: Any) -> list[dict[str, Any]]:
        self.asked.append(request)
        if self._fails is not None and self._fails.items() <= request.items():
            raise compare.Failed("OutOfMemory: full")
        return [{"calls": 10, "seconds": 0.5, "cpu": 0.1, "times": [1000, *[2000] * 8, 9000]}] * count

    def share(self, count: int, **request: Any) -> None:
        self.ask(count, **request)


WORDS = ["--shapes", "4 KiB", "64 KiB", "--operations", "put", "get", "--clients", "1", "2", "--rounds", "2"]


def run(
    clients: dict[str, Clients], path: Path | None = None, **settings: Any
) -> tuple[list[Result], dict[str, str], Record]:
    arguments = compare.read_arguments([*WORDS, "--seconds", "0.1"], TWO_CORES)
    failures: dict[str, str] = {}
    planned = [str(cell) for _, some in compare.cells(arguments) for cell in some]
    record = Record(path, {}, TWO_CORES, planned, **settings)
    compare.run(arguments, clients, record, Console(file=io.StringIO()), failures)
    return read_results(record.rows), failures, record


class TestRun:
    def test_the_figures_of_a_cell_are_those_of_all_clients_together(self) -> None:
        results, failures, _ = run({"TCP": Clients("TCP")})
        assert not failures
        assert len(results) == 8
        of_two = next(one for one in results if one.cell == ("get", SMALL, 2))
        assert of_two.figures["calls_per_s"] == 40.0
        assert (of_two.figures["p50_us"], of_two.figures["p99_us"]) == (2.0, 9.0)
        assert of_two.figures["client_cpu_s_per_gb"] == pytest.approx(0.2 / (20 * 4096) * 1e9)

    def test_a_store_that_fails_is_named_and_left_out_for_that_shape_and_others_go_on(self) -> None:
        failing = Clients("Redis", {"do": "prepare", "op": "get", "clients": 2, "shape": list(SMALL)})
        results, failures, _ = run({"TCP": Clients("TCP"), "Redis": failing})
        assert failures == {"Redis: 4 KiB": "get, 2 clients: OutOfMemory: full"}
        assert sum(one.system == "TCP" for one in results) == 8
        measured = {one.cell for one in results if one.system == "Redis"}
        assert ("get", SMALL, 2) not in measured
        assert {("put", SMALL, 2), ("get", SMALL, 1), ("get", MEDIUM, 2)} <= measured

    def test_a_store_whose_blocks_cannot_be_read_is_not_measured(self) -> None:
        results, failures, _ = run({"TCP": Clients("TCP"), "Mooncake": Clients("Mooncake", {"do": "check"})})
        assert failures == {
            "Mooncake: 4 KiB": "blocks to read: OutOfMemory: full",
            "Mooncake: 64 KiB": "blocks to read: OutOfMemory: full",
        }
        assert {one.system for one in results} == {"TCP"}

    def test_a_run_that_was_cut_off_goes_on_with_the_rows_that_are_missing(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.json"
        ticks = iter(range(1000))
        results, _, record = run({"TCP": Clients("TCP")}, path, limit_s=4, clock=lambda: float(next(ticks)))
        assert record.missing and len(results) == 8 - len(record.missing)
        clients = Clients("TCP")
        everything, _, record = run({"TCP": clients}, path, resume=True)
        assert not record.missing and len(everything) == 8
        assert everything[: len(results)] == results
        measured = sum(one["do"] == "run" for one in clients.asked)
        assert measured == 2 * (8 - len(results))  # two rounds of each, and nothing twice

    def test_written_blocks_are_removed_after_each_run_that_wrote(self) -> None:
        clients = Clients("TCP")
        run({"TCP": clients})
        assert sum(one["do"] == "forget" for one in clients.asked) == 8  # two shapes, two counts, two rounds


class TestOriginal:
    @pytest.mark.nightly
    def test_its_client_moves_blocks_as_this_stores_drop_in_shows(self, tmp_path: Path) -> None:
        source, target = memoryview(bytes(range(256)) * 64), memoryview(bytearray(16 * KIB))
        with servers({"tcp"}, tmp_path) as (running, _):
            client = original.Original(running["tcp"].address.removeprefix("tcp://"), source, target)
            client.put(["a", "b"], [slice(100, 100 + 4 * KIB), slice(8200, 8200 + 4 * KIB)])()
            client.get(["b", "a"], 4 * KIB)()
            read = client.blocks(None, Shape(2, 4 * KIB))
            exists = client.exists("a")
            assert exists is not None and exists()
            client.remove(["a"])
            assert not exists()
            client.close()
        assert read == [bytes(source[8200 : 8200 + 4 * KIB]), bytes(source[100 : 100 + 4 * KIB])]

    def test_it_is_missing_with_what_its_server_said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        python = tmp_path / "bin" / "python"
        (tmp_path / "lib/python3.11/site-packages/infinistore-0.2.35.dist-info").mkdir(parents=True)
        python.parent.mkdir()
        python.write_text(
            "#!/bin/sh\necho '[infini] [error] [infinistore.cpp:707] No devices'\necho Exception: failed >&2\n"
        )
        python.chmod(0o755)
        monkeypatch.setattr(original, "PYTHON", python)
        with servers({"original"}, tmp_path) as (running, missing):
            assert not running
            assert missing == {
                "original": "the server of infinistore 0.2.35 does not start: No devices; Exception: failed"
            }

    def test_where_it_is_not_installed_the_remedy_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(original, "PYTHON", tmp_path / "bin" / "python")
        with servers({"original"}, tmp_path) as (_, missing):
            assert "make compare" in missing["original"]


def test_plots_are_drawn_for_light_and_for_dark_pages(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from peers.plots import draw

    results = [
        result(operation, shape, count, name, 100.0 * count)
        for operation in ("put", "get")
        for shape in (SMALL, BATCH)
        for count in (1, 4)
        for name in ("TCP", "Redis", "raw sockets")
    ]
    written = draw(results, tmp_path / "new")
    assert sorted(path.name for path in written) == [
        f"performance-{what}-{theme}.svg" for what in ("batches", "clients") for theme in ("dark", "light")
    ]
    drawn = {path.name: ElementTree.parse(path).getroot() for path in written}
    assert {root.tag for root in drawn.values()} == {"{http://www.w3.org/2000/svg}svg"}
    for what in ("batches", "clients"):
        light, dark = (drawn[f"performance-{what}-{theme}.svg"] for theme in ("light", "dark"))
        assert [one.tag for one in light.iter()] == [one.tag for one in dark.iter()]
        assert b"#1f2933" in ElementTree.tostring(light) and b"#e4e7eb" in ElementTree.tostring(dark)
