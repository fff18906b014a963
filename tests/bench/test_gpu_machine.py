"""What is packed for a machine with a GPU, and the run there: it goes on where it was
cut off, and says what failed.
"""

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

import gpu_machine
import luggage
from gpu_report import PARTS, Report

PROJECT = Path(__file__).parents[2]
ON_A_BARE_MACHINE = {"torch", "transformers", "numpy", "cuda-bindings"}
LACKING_THERE = {"trio", "bitarray", "cattrs", "starlette", "rich", "rich-click", "pytest-trio", "pytest-timeout"}


def test_the_luggage_has_all_that_the_package_needs_and_a_bare_machine_lacks() -> None:
    packed = {luggage.name_of(one) for one in luggage.needed()}
    told = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extras = told["optional-dependencies"]
    wanted = [*told["dependencies"], *extras["disk"], *extras["torch"], *extras["cuda"], *extras["transformers"]]
    names = {re.split(r"[^A-Za-z0-9-]", one)[0] for one in wanted} - {told["name"]}
    assert names - ON_A_BARE_MACHINE <= packed
    assert packed >= LACKING_THERE
    assert not packed & ON_A_BARE_MACHINE


def test_what_is_packed_for_lmcache_is_not_heavy() -> None:
    packed = {luggage.name_of(one) for one in luggage.for_lmcache()}
    assert not packed & {*ON_A_BARE_MACHINE, "numba"}
    assert {"aiohttp", "msgspec"} <= packed


def test_a_folder_with_something_else_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(subprocess, "run", download)
    mine = tmp_path / "mine"
    mine.touch()
    with pytest.raises(SystemExit):
        luggage.main(["--into", str(tmp_path)])
    assert mine.exists()


@pytest.fixture
def empty(tmp_path: Path) -> list[str]:
    """Options for luggage with nothing in it, and a report in a folder of the test."""
    packed = tmp_path / "luggage"
    (packed / "wheels").mkdir(parents=True)
    (packed / "requirements.txt").touch()
    return ["--luggage", str(packed), "--folder", str(tmp_path / "gpu"), "--device", "cpu"]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Which programs were run for parts. None of them is."""
    asked: list[tuple[Any, ...]] = []
    left = ["16 shards"]

    def python(self: gpu_machine.Machine, *arguments: Any, sites: Any = ()) -> Any:
        asked.append(arguments)
        if arguments[1] == "pytest":
            (file,) = (one.partition("=")[2] for one in arguments if str(one).startswith("--junitxml="))
            Path(file).write_text(XML)
        elif arguments[0] == "bench/shards.py":
            found = {"rows": [{"row": "4 shards", "ratios": {"shards / one server": 2.0}}], "missing": left[:]}
            Path(arguments[2]).write_text(json.dumps(found))
            left.clear()
        else:
            report = Report(arguments[arguments.index("--report") + 1])
            report.keep(arguments[-1], {"machine": "M", "figures": {"cold / warm": 5.0}})
        return subprocess.CompletedProcess([], 0)

    monkeypatch.setattr(gpu_machine.Machine, "_python", python)
    monkeypatch.setattr(gpu_machine.Machine, "where", lambda self: "M")
    return asked


XML = """<testsuites><testsuite>
<testcase name="test_good"><properties><property name="registered" value="64 GiB in 9 s"/></properties></testcase>
<testcase name="test_bad"><failure message="assert 1 == 2">...</failure></testcase>
<testcase name="test_broken"><error message="no">...</error></testcase>
<testcase name="test_skipped"><skipped message="no bindings"/></testcase>
</testsuite></testsuites>"""


def test_all_parts_are_run_once_and_the_report_tells_what_came_out(
    empty: list[str], parts: list[tuple[Any, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_machine.main(empty) == 3  # some rows of the last part are left
    assert "left for the next run: shards" in capsys.readouterr().out
    assert len(parts) == len(gpu_machine.tests()) + len(PARTS)
    assert gpu_machine.main(empty) == 1
    assert len(parts) == len(gpu_machine.tests()) + len(PARTS) + 1
    kept = Report(tmp_path / "gpu" / "report.json").parts
    assert set(kept) == {*gpu_machine.tests(), *PARTS}
    found = kept["tests/gpu/test_order.py"]
    assert (found["passed"], found["failed"]) == (1, ["test_bad", "test_broken"])
    assert found["skipped"] == ["test_skipped: no bindings"]
    assert found["told"]["test_good, registered"] == "64 GiB in 9 s"
    assert found["told"]["test_bad"] == "assert 1 == 2"
    said = capsys.readouterr().out
    assert "not as it should be: tests/gpu/test_order.py: test_bad, test_broken" in said
    assert "not as it should be: ttft-8192: cold / warm" in said
    assert kept["shards"]["figures"] == {"4 shards: shards / one server": 2.0}
    assert "| cold / warm | 5 | >= 12.6: missed | |" in (tmp_path / "gpu" / "report.md").read_text()

    parts.clear()
    assert gpu_machine.main(empty) == 1
    assert parts == []
    assert gpu_machine.main([*empty, "--only", "register", "--again"]) == 1
    assert len(parts) == 1


def test_a_run_whose_time_is_over_says_what_is_left(
    empty: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_machine.main([*empty, "--only", "register", "decode", "--seconds", "0"]) == 3
    assert "left for the next run: register, decode" in capsys.readouterr().out
    assert Report(tmp_path / "gpu" / "report.json").parts == {}


def test_tests_that_end_without_a_report_broke(tmp_path: Path) -> None:
    assert gpu_machine.outcome(tmp_path / "none.xml", -9) == {
        "broke": "pytest ended with status -9, and wrote no report"
    }


def test_without_a_gpu_nothing_is_installed(
    empty: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_machine, "has_gpu", lambda: False)
    assert gpu_machine.main([*empty[:-2]]) == 2
    assert "there is no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "gpu").exists()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_rehearsal_runs_tests_and_benchmarks(empty: list[str], tmp_path: Path) -> None:
    assert gpu_machine.main([*empty, "--only", "tests/gpu/test_pools.py", "register"]) == 0
    kept = Report(tmp_path / "gpu" / "report.json").parts
    assert kept["tests/gpu/test_pools.py"]["failed"] == []
    assert kept["register"]["figures"]
