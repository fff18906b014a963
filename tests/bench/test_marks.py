"""What is measured is marked, and shown in tables, where it is not as it should be."""

import pytest

import scale
import server_cost
import waiting


def waited(ratio: list[float]) -> dict[str, object]:
    turns = {name: [(time_s, 2 * time_s)] * 7 for name, time_s in (("off", 2e-4), ("on", 1e-4), ("adaptive", 1.5e-4))}
    what = {"machine": "idle", "path": "tcp", "operation": "exists", "clients": 2}
    return waiting.summary(turns) | what | {"ratio": ratio}


def test_spinning_is_marked_as_worse_if_the_whole_interval_is() -> None:
    worse, unsure = waited([1.5, 1.11, 1.9]), waited([1.5, 1.1, 1.9])
    assert waiting.is_worse(worse) and not waiting.is_worse(unsure)
    assert waiting.line(worse).endswith("1.50 [1.11, 1.90] of on  WORSE")
    assert waiting.line(unsure).endswith("1.50 [1.10, 1.90] of on")


def test_waiting_has_a_row_for_each_case() -> None:
    what = "| idle | tcp | exists | 2 | 200.0 (400.0) | 100.0 (200.0) | 150.0 (300.0) |"
    assert waiting.markdown_row(waited([1.0, 0.9, 1.2])) == f"{what} 1.00 (0.90 to 1.20) of on |"
    assert waiting.markdown_row(waited([1.5, 1.2, 1.9])) == f"{what} **1.50 (1.20 to 1.90) of on: WORSE** |"
    assert all(line.count("|") == 9 for line in waiting.MARKDOWN_HEAD.splitlines())


def test_the_interval_of_a_median_leaves_out_what_is_outside_in_5_of_100() -> None:
    assert waiting.interval([float(number) for number in range(7)]) == (3.0, 0.0, 6.0)
    assert waiting.interval([float(number) for number in range(15)]) == (7.0, 3.0, 11.0)


def test_what_grows_with_the_work_has_its_exponent_and_is_marked_unless_the_reason_is_known() -> None:
    costs: scale.Costs = {
        "same": {1000: [5.0, 5.0, 9.0], 10: [5.0]},
        "grows": {10: [1.0], 1000: [10.0]},
        "grows *": {10: [1.0], 1000: [100.0]},
    }
    same, grows, starred = scale.fitted("keys", costs)
    assert [one.exponent for one in (same, grows, starred)] == pytest.approx([0.0, 0.5, 1.0])
    assert [one.grows for one in (same, grows, starred)] == [False, True, False]
    assert scale.line(grows).endswith("10:     1.00  1,000:    10.00  exponent  0.500")
    assert scale.markdown([same, grows, starred]).splitlines() == [
        "| keys: microseconds | 10 | 1,000 | exponent |",
        "|---|---|---|---|",
        "| same | 5.00 | 5.00 | 0.000 |",
        "| grows | 1.00 | 10.00 | **0.500** |",
        "| grows \\* | 1.00 | 100.00 | 1.000 |",
    ]


def test_a_request_that_takes_more_than_twice_a_bare_server_is_marked() -> None:
    dear, fine = ({"us": {"server": 90.0, "bare": 40.0}, "ratio": [1.5, ratio, 3.0]} for ratio in (2.01, 2.0))
    assert server_cost.is_dear(dear) and not server_cost.is_dear(fine)
    assert server_cost.line("exists, at once", dear).endswith("2.01 [1.50, 3.00]  MORE")
    assert server_cost.markdown_row("exists, at once", dear) == (
        "| exists, at once | 90.0 | 40.0 | **2.01 (1.50 to 3.00)** |"
    )
    assert server_cost.markdown_row("exists, at once", fine).endswith("| 2.00 (1.50 to 3.00) |")
