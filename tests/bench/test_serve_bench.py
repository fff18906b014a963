"""What `bench/serve_bench.py` makes of what it measured, without vLLM."""

import json
import signal
import sys
from pathlib import Path

import pytest

import serve_bench
from recorded import RecordError
from serve_bench import as_json, as_markdown, keep, kept_in, parse, record_of
from serve_wanted import WANTED, misses
from serve_ways import WAYS, Outcome, Row
from served import Round
from tests.tables import for_each


def made_round(ttft_s: float, hit_tokens: int) -> Round:
    return Round(ttft_s, ttft_s, 2 * ttft_s, 1 / ttft_s, 1000, hit_tokens, ("a",))


def outcome(way: str, *, cold_s: float = 4.0, warm_s: float = 0.5, same: bool = True) -> Outcome:
    rows = [Row(way, "cold", made_round(cold_s, 0), True), Row(way, "warm", made_round(warm_s, 990), same)]
    return Outcome(rows, {"cold / warm": cold_s / warm_s})


def test_the_table_can_be_pasted_into_a_page() -> None:
    assert as_markdown([outcome("windows", same=False)]).splitlines()[2:] == [
        "| windows | cold | 4.000 | 4.000 | 8.000 |  | 0.25 | 0% | yes |",
        "| windows | warm | 0.500 | 0.500 | 1.000 | 8.0 | 2.00 | 99% | NO |",
    ]


def test_programs_read_rounds_and_figures_of_each_way() -> None:
    read = json.loads(as_json({"windows": outcome("windows"), "overhead": Outcome([], {"ratio": 0.98})}))
    assert read["windows"]["warm"]["hits"] == 0.99
    assert read["windows"]["cold / warm"] == 8.0
    assert read["overhead"] == {"ratio": 0.98}


def test_what_is_as_wanted_is_no_miss() -> None:
    figures = {"connector": {"cold / warm": 12.0}, "lmcache": {"cold / warm": 6.0}, "windows": {"cold / warm": 5.0}}
    assert misses({**figures, "overhead": {"ratio": 0.97}, "kill": {"failed": 0}}) == []
    assert misses({}) == []


def test_each_miss_is_a_line_with_what_came_out_and_what_is_wanted() -> None:
    assert misses({way: {"cold / warm": 4.94, "ratio": 0.9649} for way in WAYS}) == [
        "missed: connector: the mean TTFT warm is 1/4.9 of that cold, and at most 1/12 is wanted",
        "missed: lmcache: the mean TTFT warm is 1/4.9 of that cold, and at most 1/6 is wanted",
        "missed: windows: the mean TTFT warm is 1/4.9 of that cold, and at most 1/5 is wanted",
        "missed: overhead: with nothing to reuse, 0.965 of the throughput is left, and at least 0.97 is wanted",
    ]


def test_a_figure_that_is_no_number_is_a_miss() -> None:
    (line,) = misses({"overhead": {"ratio": float("nan")}})
    assert "0.97 is wanted" in line


def test_something_is_wanted_only_of_ways_that_there_are() -> None:
    assert WANTED.keys() < WAYS.keys()


def test_a_check_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--check", "--ways", "kill", "overhead"]).check
    with pytest.raises(SystemExit):
        parse(["--check", "--ways", "kill", "pair"])
    assert "of connector, lmcache, windows, overhead" in capsys.readouterr().err


@for_each(
    case=[
        ("--tokens 63", "--tokens: from 64 to 7900, not 63"),
        ("--prompts 0", "--prompts: from 1 to 1000, not 0"),
        ("--hidden 100", "--hidden: a multiple of 64"),
        ("--vllm=it's", "--vllm: No closing quotation"),
        ("--limit 0", "--limit and --overhead-minutes: more than 0 minutes"),
        ("--overhead-minutes -1", "--limit and --overhead-minutes: more than 0 minutes"),
        ("--ways nothing", "invalid choice: 'nothing'"),
        ("--json --markdown", "--markdown: not allowed with argument --json"),
    ]
)
def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str], case: tuple[str, str]) -> None:
    words, message = case
    with pytest.raises(SystemExit) as ended:
        parse(words.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--check"], 1)])
def test_a_miss_is_told_and_fails_where_figures_are_checked(
    arguments: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(given: object, folder: Path, console: object, record: object, outcomes: dict[str, Outcome]) -> int:
        outcomes["connector"] = outcome("connector")
        return 0

    monkeypatch.setattr(serve_bench, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["serve_bench.py", "--ways", "connector", *arguments])
    assert serve_bench.main() == status
    told = capsys.readouterr()
    assert "connector" in told.out
    assert told.err.startswith("missed: connector: the mean TTFT") == bool(status)
    assert told.err.count("\n") == status, "a line for each miss"


def test_what_a_way_has_measured_is_kept_until_all_ways_have(tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    asked = parse(["--prompts", "2", "--resume", str(file)])
    assert kept_in(record_of(asked)) == {}
    record = record_of(asked)
    keep(record, "connector", outcome("connector"))
    keep(record, "disk", Outcome([], {"ratio": 1.5}, "a sentence"))
    assert kept_in(record_of(asked)) == {
        "connector": outcome("connector"),
        "disk": Outcome([], {"ratio": 1.5}, "a sentence"),
    }
    assert list(tmp_path.iterdir()) == [file]


def test_what_went_wrong_is_measured_again(tmp_path: Path) -> None:
    asked = parse(["--resume", str(tmp_path / "kept.json")])
    record = record_of(asked)
    keep(record, "connector", outcome("connector", same=False))
    keep(record, "kill", Outcome([], {}, failed=True))
    assert kept_in(record_of(asked)) == {}


def test_without_a_file_nothing_is_kept_for_another_run() -> None:
    keep(record_of(parse([])), "connector", outcome("connector"))
    assert kept_in(record_of(parse([]))) == {}


@pytest.mark.parametrize("other", [["--prompts", "3"], ["--vllm=--data-parallel-size 2"]])
def test_figures_of_other_settings_are_refused(other: list[str], tmp_path: Path) -> None:
    file = str(tmp_path / "kept.json")
    record_of(parse(["--resume", file]))
    with pytest.raises(RecordError, match=f"other settings .{other[0].split('=')[0].strip('-')}"):
        record_of(parse(["--resume", file, *other]))
