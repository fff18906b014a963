"""The benchmark for a GPU, as far as it runs without one: every part is called once, a
report is gone on with, and its tables say what was not run.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu
from gpu_report import LENGTHS, PARTS, Report, markdown, missed, why_not

CHEAP = ("copies-batch", "register")
MACHINE = "a GPU"


def dry_run(report: Path, *parts: str) -> int:
    return gpu.main(["--device", "cpu", "--report", str(report), "--parts", *parts])


def test_a_second_run_skips_what_the_first_has_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "report.json"
    assert dry_run(report, *CHEAP) == 0
    first = report.read_text()
    assert [bool(part["figures"]) for part in json.loads(first).values()] == [True, True]

    def run(*_: object) -> None:
        raise AssertionError

    for part in CHEAP:
        monkeypatch.setitem(gpu.RUN, part, run)
    assert dry_run(report, *CHEAP) == 0
    assert report.read_text() == first


def test_a_part_that_breaks_is_told_and_run_again_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def part(name: str, error: Exception | None = None) -> Callable[[gpu.Bench], gpu.Figures]:
        def run(bench: gpu.Bench) -> gpu.Figures:
            calls.append(name)
            if error is not None:
                raise error
            return {"a figure": 1.0}

        return run

    monkeypatch.setitem(gpu.RUN, "decode", part("decode", ValueError("CUDA is sad")))
    monkeypatch.setitem(gpu.RUN, "overhead", part("overhead", gpu.NotHere("a thing")))
    monkeypatch.setitem(gpu.RUN, "register", part("register"))
    parts = ["decode", "overhead", "register"]
    assert dry_run(tmp_path / "report.json", *parts) == 1
    assert dry_run(tmp_path / "report.json", *parts) == 1
    assert calls == [*parts, "decode", "overhead"]
    kept = Report(tmp_path / "report.json").parts
    assert [why_not(kept[name]) for name in parts] == ["broke: ValueError: CUDA is sad", "there is no a thing", ""]


def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert gpu.main(["--report", str(tmp_path / "report.json")]) == 0
    assert "no GPU" in capsys.readouterr().out
    assert not (tmp_path / "report.json").exists()


def test_every_part_has_a_title_and_runs() -> None:
    assert [*gpu.RUN, "shards"] == list(PARTS)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_all_parts_run_without_a_gpu(tmp_path: Path) -> None:
    """Of the prompts, those of one length."""
    parts = [name for name in gpu.RUN if name not in {f"ttft-{tokens}" for tokens in LENGTHS[1:]}]
    assert dry_run(tmp_path / "report.json", *parts) == 0
    kept = Report(tmp_path / "report.json").parts
    assert [name for name in parts if why_not(kept[name])] in ([], ["ttft-lmcache"])


def test_tables_say_what_was_not_run_and_on_which_machine_the_rest_was() -> None:
    parts: dict[str, dict[str, Any]] = {
        "tests/gpu/test_a.py": {"machine": MACHINE, "passed": 7, "failed": ["test_x"], "skipped": ["test_y: no"]},
        "copies-batch": {"machine": MACHINE, "figures": {"write 16 MiB": 0.96, "read 16 MiB": 0.5}},
        "register": {"machine": "another GPU", "figures": {"64 GiB": "not measured"}},
        "decode": {"machine": MACHINE, "broke": "ValueError: no"},
    }
    lines = markdown(parts, ["tests/gpu/test_a.py", "tests/gpu/test_b.py"]).splitlines()
    assert "| `tests/gpu/test_a.py` | 7 | `test_x` | 1 | A |" in lines
    assert "| write 16 MiB | 0.96 | >= 0.95: reached | |" in lines
    assert "| read 16 MiB | 0.5 | >= 0.95: missed | |" in lines
    assert "| 64 GiB | not measured | | |" in lines
    assert any(line.endswith("| broke: ValueError: no | | |") for line in lines)
    left = " ".join(lines).partition("Not run yet: ")[2].partition(".  ")[0]
    assert left.split(", ") == [f"`{name}`" for name in ["tests/gpu/test_b.py", *PARTS] if name not in parts]
    assert lines[-2:] == ["A: a GPU", "B: another GPU"]


def test_figures_are_compared_with_those_that_are_wanted() -> None:
    assert missed("copies-batch", {"write a": 0.949, "write b": 0.95, "another": 0.1}) == ["write a"]
    assert missed("overhead", {"stored in: embedded": 1.011, "nothing stored, twice": 1.2}) == ["stored in: embedded"]
    assert missed("ttft-8192", {"cold / warm": 12.5}) == ["cold / warm"]
    assert missed("ttft-1024", {"cold / warm": 1.5}) == []
    assert missed("ttft-8192", {"cold / warm": float("nan")}) == ["cold / warm"]
