"""The screen, in every state and at many sizes: it fits, it says what matters, and
nothing moves.
"""

import itertools
import re
from datetime import timedelta
from io import StringIO
from itertools import pairwise

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from infinistore.monitor import figures
from infinistore.monitor.app import still
from infinistore.monitor.controls import ClientOrder, Controls
from infinistore.monitor.lines import ASCII, UNICODE, Glyphs, fit, line, memory_map, sparkline
from infinistore.monitor.model import Lost, Model, Snapshot
from infinistore.monitor.rates import Quantile
from infinistore.monitor.view import screen
from infinistore.sizes import GIB
from infinistore.statistics import ArenaStatistics, PrefixStatistics, Stats
from tests.tables import for_each

from .made import (
    NOON,
    loaded_stats,
    make_client,
    make_details,
    make_disk,
    make_disks,
    make_operation,
    make_stats,
    on_disks,
    plain,
    states,
    watched,
)

SIZES = ((80, 24), (200, 60), (20, 10), (40, 12), (60, 16), (100, 30), (160, 24), (159, 50), (12, 4), (11, 3), (1, 1))
STATES = states()


def shown(
    snapshot: Snapshot, width: int, height: int, controls: Controls | None = None, glyphs: Glyphs = UNICODE
) -> list[str]:
    """The lines as a recording console of that size shows them."""
    console = Console(width=width, height=height, record=True, file=StringIO(), force_terminal=True)
    lines = screen(snapshot, controls or Controls(), width, height, glyphs)
    plain(lines, width, height)
    for one in lines:
        console.print(one)
    recorded = console.export_text().splitlines()
    assert len(recorded) <= height  # nothing was folded
    return recorded + [""] * (height - len(recorded))


CONTROLS = (Controls(), Controls(help=True), Controls(typing="x"), Controls(paused=True), Controls(tenants=True))


@for_each(state=STATES, size=SIZES, controls=CONTROLS)
def test_every_state_fits_every_size(state: str, size: tuple[int, int], controls: Controls) -> None:
    shown(STATES[state], *size, controls)


@given(st.integers(1, 250), st.integers(1, 100), st.sampled_from(sorted(STATES)), st.sampled_from(CONTROLS))
def test_any_size_is_filled_exactly(width: int, height: int, state: str, controls: Controls) -> None:
    plain(screen(STATES[state], controls, width, height), width, height)


@pytest.mark.parametrize("size", [(80, 24), (200, 60)], ids=["80x24", "200x60"])
def test_a_loaded_server_shows_all_its_parts(size: tuple[int, int]) -> None:
    text = "\n".join(shown(STATES["loaded"], *size))
    for part in (
        *("tcp://127.0.0.1:22345", "serving", "up 2 min 9 s", "every 1 s", "12:00:29", "nothing to report"),
        *("75.0 %", "3.00 GiB of 4.00 GiB", "12,345 keys", "largest free"),
        *("arena 0", "arena 1", "100 %", "50.0 %"),
        *("put", "get", "match prefix", "p50", "p99", "900", "MiB/s", "90.0 %", "peak"),
        *("evicted/s", "on demand", "pinned", "20.0 MiB", "holds"),
        *("client, by traffic", "decode-0", "prefix, by bytes", "qwen2.5-7b/tp0/", "66.7 %"),
        *("q quit", "? help", "p pause"),
    ):
        assert part in text, part


def test_how_far_off_an_estimate_may_be_is_shown_beside_it() -> None:
    def rows(error_bytes: int) -> list[str]:
        stats = loaded_stats(50)
        assert stats.details is not None
        prefixes = [PrefixStatistics("model/", 4000, GIB, 100, error_bytes)]
        snapshot = watched(attrs.evolve(stats, details=attrs.evolve(stats.details, prefixes=prefixes))).snapshot()
        lines = shown(snapshot, 80, 24)
        first = next(index for index, text in enumerate(lines) if text.startswith("prefix, by"))
        return [text.rstrip() for text in lines[first : first + 2]]

    assert rows(GIB // 40)[0].endswith("share       +-")
    assert rows(GIB // 40)[1].endswith("1.00 GiB    100 %    2.5 %")
    assert rows(0)[1].endswith("1.00 GiB    100 %")


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (200, 60), (160, 16), (60, 16)])
def test_every_disk_has_a_line(size: tuple[int, int]) -> None:
    lines = shown(STATES["disks"], *size)
    heading = next(index for index, text in enumerate(lines) if text.startswith("disk, 12.0 MiB due "))
    assert lines[heading].split()[4:6] in (["state", "used"], ["state", "read/s"])
    shown_disks = 2 if size[1] > 16 else 1
    for number, text in enumerate(lines[heading + 1 : heading + 1 + shown_disks]):
        assert text.startswith(f"/mnt/nvme{number} ")
        assert re.search(rf" healthy .* 200 MiB +{300 + number} MiB", text)
    if size[0] >= 80:
        assert lines[heading + 1].split()[2:4] == ["25.0", "%"]
        assert lines[heading + 1].split()[-2:] == ["200", "5"]  # hits a second, and the queue
    assert "nothing to report" in lines[1]


def test_a_store_without_disks_has_no_word_of_them() -> None:
    for size in SIZES:
        assert "disk" not in "\n".join(shown(STATES["loaded"], *size))


def test_the_worst_disk_is_shown_when_there_is_no_room_for_all() -> None:
    lines = shown(STATES["bad disks"], 60, 16)
    heading = next(index for index, text in enumerate(lines) if text.startswith("disk, "))
    assert lines[heading + 1].split()[:2] == ["/mnt/gone", "off"]
    tall = shown(STATES["bad disks"], 80, 50)
    first = next(index for index, text in enumerate(tall) if text.startswith("disk, ")) + 1
    assert [text.split()[0].rpartition("/")[2] for text in tall[first : first + 6]] == [
        *("gone", "locked", "new", "well", "late", "bad"),
    ]
    assert tall[first + 5].endswith(" 22")  # errors
    assert tall[first + 4].split()[-1] == "4"  # late ones are in the queue, too


def test_disks_with_long_paths_are_told_apart_by_their_ends() -> None:
    paths = [f"/var/lib/infinistore/volumes/nvme{number}" for number in range(2)]
    snapshot = watched(make_stats(details=make_details(), disk=make_disks(*map(make_disk, paths)))).snapshot()
    lines = shown(snapshot, 80, 24)
    names = [text.split()[0] for text in lines if "healthy" in text]
    assert [name[0] for name in names] == ["…", "…"]
    assert [name[-6:] for name in names] == ["/nvme0", "/nvme1"]


def test_a_small_terminal_says_how_full_the_disks_are() -> None:
    text = "\n".join(shown(STATES["disks"], 40, 12))
    assert re.search(r"disks +25\.8 % [█▓▒░·]+", text)


def test_without_an_earlier_sample_a_disk_has_no_rates() -> None:
    (line_of_disk,) = (text for text in shown(watched(on_disks(0, 1)).snapshot(), 80, 24) if "healthy" in text)
    assert line_of_disk.split()[4:8] == ["-", "-", "-", "5"]


def test_columns_are_aligned_and_nothing_moves_from_sample_to_sample() -> None:
    def columns(snapshot: Snapshot) -> list[list[int]]:
        """Where the words of each line end that has a label, without those whose first
        figures change in width.
        """
        return [
            [match.end() for match in re.finditer(r"(GiB|MiB|%|us|ms)\b|/s\b|keys|leases|holds", text)]
            for text in shown(snapshot, 80, 24)[2:]
        ]

    first, second = (watched(*map(loaded_stats, range(start, start + 12))).snapshot() for start in (50, 51))
    for before, after in zip(columns(first), columns(second), strict=True):
        if len(before) == len(after):
            assert before == after


def test_a_lost_server_says_since_when_and_why() -> None:
    text = "\n".join(shown(STATES["lost"], 80, 24))
    assert "NO ANSWER since 12:00:05" in text
    assert "Connection refused" in text
    assert "tried 3 times" in text
    assert "figures are of 12:00:04" in " ".join(text.split())
    assert "75.0 %" in text  # what was known last
    small = "\n".join(shown(STATES["lost"], 20, 10))
    assert "NO ANSWER" in small


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_a_reason_that_is_too_long_for_its_lines_ends_in_an_ellipsis(glyphs: Glyphs) -> None:
    lost = attrs.evolve(STATES["lost"], lost=Lost(NOON, "this is a long reason " * 20, 3))
    said = [text.rstrip() for text in shown(lost, 80, 24, glyphs=glyphs) if "long reason" in text]
    assert said[0].startswith("! this is a long reason")
    assert [text.endswith(glyphs.ellipsis) for text in said] == [False] * (len(said) - 1) + [True]


def test_a_restarted_server_says_so_and_shows_a_gap_in_the_history() -> None:
    lines = shown(STATES["restarted"], 80, 24)
    assert "another process serves; seen at 12:00:06. All 12,345 keys are gone" in lines[1]
    flow = next(text for text in lines if text.startswith("in  "))
    assert re.search(r"in +- +[▁-█]{4}  ", flow)


def test_a_restart_is_old_news_after_a_while() -> None:
    later = attrs.evolve(STATES["restarted"], at=NOON + timedelta(minutes=5))
    assert "another process" not in "\n".join(shown(later, 80, 24))


@pytest.mark.parametrize(
    ("before", "after", "disks", "said"),
    [
        (206, 206, False, ""),
        (206, 300, False, ""),
        (0, 0, False, ""),
        (206, 0, False, ". All 206 keys are gone"),
        (12_345, 206, False, ". Of 12,345 keys, 206 are left"),
        (206, 0, True, ""),
    ],
)
def test_another_process_has_lost_what_the_number_of_keys_says(before: int, after: int, disks: bool, said: str) -> None:
    disk = make_disks(make_disk()) if disks else None
    old = make_stats(store={"keys": before}, server={"instance": "a"}, details=make_details(), disk=disk)
    new = make_stats(
        store={"keys": after}, server={"instance": "b", "uptime_s": 1.0}, details=make_details(), disk=disk
    )
    lines = shown(watched(old, new).snapshot(), 100, 24)
    assert lines[1].rstrip() == f"! another process serves; seen at 12:00:01{said}"


def counted(second: int, **counts: int) -> Stats:
    """A server that has had so many requests of each kind."""
    found = [make_operation(kind, count=count) for kind, count in counts.items()]
    return make_stats(server={"uptime_s": 100.0 + second}, details=make_details(operations=found))


def kinds_shown(*samples: Stats) -> list[str]:
    lines = shown(watched(*samples).snapshot(), 80, 24)
    start = next(number for number, text in enumerate(lines) if text.startswith("requests "))
    rows = itertools.takewhile(lambda text: re.match(r"[a-z_ ]{14} ", text), lines[start + 1 :])
    return [text[:14].strip() for text in rows if not text.startswith(("evicted", "pinned"))]


def test_the_requests_that_are_shown_are_those_of_late_with_put_and_get() -> None:
    old = {"exists": 10_000, "delete": 9_000, "evict": 8_000, "list_keys": 7_000, "purge": 6_000}
    now = {"put": 1, "get": 1, "match_prefix": 5, "pin": 40, "release_hold": 9}
    early = counted(0, **old, **now)
    late = counted(1, **old, **{kind: 2 * count for kind, count in now.items()})
    assert not {"put", "get"} - set(kinds_shown(early))
    assert {"put", "get", "pin"} <= set(kinds_shown(early, late))
    assert not set(old) & set(kinds_shown(early, late))


def test_kinds_with_about_as_many_requests_do_not_take_turns() -> None:
    busy = {"exists": 0, "delete": 0, "match_prefix": 0, "pin": 0, "evict": 0, "purge": 0}
    model = Model("tcp://127.0.0.1:22345")
    seen = set()
    for second in range(40):
        for number, kind in enumerate(busy):
            busy[kind] += 100 + 60 * ((second // 4 + number) % 2)
        model.observe(counted(second, **busy), now_s=float(second), at=NOON)
        seen.add(tuple(model.snapshot().busiest))
    assert len(seen) == 1
    busy["quiet"] = 0
    for second in range(40, 60):
        busy["quiet"] += 1000
        model.observe(counted(second, **busy), now_s=float(second), at=NOON)
    assert model.snapshot().busiest[0] == "quiet"


def test_warnings_come_before_the_figures_and_are_counted_when_there_is_no_room() -> None:
    only = shown(STATES["warnings"], 80, 24)[1]
    assert only.startswith("! 10 blocks were dropped")
    assert only.endswith("+7 more")
    tall = shown(STATES["warnings"], 200, 60)
    assert all(text.startswith("! ") for text in tall[1:4])
    assert tall[3].endswith("+5 more")
    assert "draining" in tall[0]


def test_what_an_older_server_does_not_tell_is_named() -> None:
    text = "\n".join(shown(STATES["without details"], 80, 24))
    for part in ("requests by kind", "clients", "keys by prefix"):
        assert re.search(rf"{part} +not told by this server \(0\.1\.0\)", text), part
    assert "in use" in text and "75.0 %" in text
    assert "MiB/s" in text


def test_before_the_first_answer_nothing_is_made_up() -> None:
    text = "\n".join(shown(STATES["empty"], 80, 24))
    assert "connecting" in text and "waiting for the first answer" in text
    assert "0 %" not in text


def test_a_small_terminal_gets_what_matters_most() -> None:
    text = "\n".join(shown(STATES["loaded"], 20, 10))
    for part in ("serving", "nothing to report", "75.0 %", "in", "out", "hits", "q quit"):
        assert part in text, part
    assert shown(STATES["loaded"], 11, 3)[0] == "too small"


def test_clients_are_sorted_reversed_and_filtered() -> None:
    def names(controls: Controls) -> list[str]:
        return re.findall(
            r"^((?:decode|prefill)-\d)", "\n".join(shown(STATES["loaded"], 100, 50, controls)), re.MULTILINE
        )

    assert names(Controls()) == ["decode-0", "decode-1", "decode-2", "prefill-1", "prefill-0"]
    assert names(Controls(client_order=ClientOrder.NAME)) == sorted(names(Controls()))
    assert names(Controls(client_order=ClientOrder.NAME, reversed=True)) == sorted(names(Controls()), reverse=True)
    assert names(Controls(filter="FILL")) == ["prefill-1", "prefill-0"]
    last = shown(STATES["loaded"], 80, 24, Controls(filter="FILL", reversed=True))[-1]
    assert last.startswith('only "FILL"   reversed   q quit')


def test_a_filter_that_is_typed_stands_in_the_last_line() -> None:
    assert shown(STATES["loaded"], 80, 24, Controls(typing="dec"))[-1].startswith("filter: dec")


def test_names_cannot_move_the_cursor() -> None:
    nasty = "\x1b[2J\n\r\u202eevil\x9b31m"
    snapshot = watched(make_stats(details=make_details(clients=[make_client(nasty)], state="\x1b[2J"))).snapshot()
    for text in screen(snapshot, Controls(filter=nasty), 200, 60):
        assert text.plain.isprintable()
    assert "\\x1b[2J" in "\n".join(shown(snapshot, 200, 60))


@given(st.text(), st.integers(0, 60), st.sampled_from([ASCII, UNICODE]), st.booleans())
def test_a_text_is_fitted_to_the_cell(text: str, width: int, glyphs: Glyphs, keeps_end: bool) -> None:
    assert line([(fit(text, width, glyphs, keeps_end=keeps_end), "")], width, glyphs).cell_len == width


def test_plain_characters_are_enough() -> None:
    nasty = watched(make_stats(details=make_details(clients=[make_client("größe")]))).snapshot()
    for snapshot in (*STATES.values(), nasty):
        for size in ((80, 24), (200, 60), (40, 12)):
            assert "\n".join(shown(snapshot, *size, glyphs=ASCII)).isascii()


def test_many_arenas_share_rows_and_one_is_spread_over_them() -> None:
    def maps(arenas: int) -> list[str]:
        known = [ArenaStatistics(index, 100, 50, [1.0, 0.0]) for index in range(arenas)]
        snapshot = watched(make_stats(details=make_details(arenas=known))).snapshot()
        return [text for text in shown(snapshot, 80, 50) if re.search("[·░▒▓█]", text)]

    assert len(maps(1)) == 4
    assert len(maps(3)) == 3
    assert [text[:10].strip() for text in maps(6)] == ["0 to 1", "2 to 3", "4 to 5"]
    assert all(text.count("█") == text.count("·") for text in maps(6))
    assert len(maps(256)) == 4


def test_one_screen_to_print_has_no_keys_and_no_runs_of_blank_lines() -> None:
    lines = [text.plain for text in still(STATES["loaded"], 1.0, 120, 60, UNICODE)]
    assert "q quit" not in "\n".join(lines)
    assert lines[-1].strip()
    assert not any(one == other == "" for one, other in pairwise(lines))


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (figures.size(0), "0 B"), (figures.size(1023), "1023 B"), (figures.size(1536), "1.50 KiB"),
        (figures.size(1023.9 * 2**20), "1.00 GiB"), (figures.size(None), "-"),
        (figures.count(99_999), "99,999"), (figures.count(123_456), "123 k"), (figures.count(1_234_567), "1.23 M"),
        (figures.rate(0.25), "0.2"), (figures.rate(0), "0"), (figures.rate(1234.4), "1,234"),
        (figures.percent(0.00001), "0.1 %"), (figures.percent(0.99999), "99.9 %"), (figures.percent(1.0), "100 %"),
        (figures.duration(42), "42 s"), (figures.duration(312), "5 min 12 s"), (figures.duration(90_000), "1 d 1 h"),
        (figures.latency(Quantile(87e-6)), "87 us"), (figures.latency(Quantile(1.2e-3)), "1.2 ms"),
        (figures.latency(Quantile(20e-6, "<")), "<20 us"), (figures.latency(Quantile(10.0, ">")), ">10 s"),
    ],
)  # fmt: skip
def test_numbers_read_well(made: str, expected: str) -> None:
    assert made == expected


@given(st.floats(0, 2**60))
def test_numbers_are_never_wider_than_their_column(number: float) -> None:
    assert len(figures.size(number)) <= 8
    assert len(figures.size_rate(number)) <= 10
    assert len(figures.count(number)) <= 7
    assert len(figures.rate(number)) <= 7
    assert len(figures.percent(min(1.0, number))) <= 6
    assert len(figures.latency(Quantile(min(10.0, number)))) <= 7


@given(st.lists(st.none() | st.floats(0, 1e12)), st.integers(0, 80), st.floats(0, 1e12))
def test_a_sparkline_has_its_width_and_only_zero_is_lowest(values: list[float | None], width: int, top: float) -> None:
    bars = sparkline(values, width, top, UNICODE)
    assert len(bars) == width
    tail = values[-width:] if width else []
    for value, bar in zip(tail, bars[width - len(tail) :], strict=True):
        assert (bar == " ") == (value is None)
        assert (bar == UNICODE.bars[0]) == (value is not None and (value <= 0 or top <= 0))


@given(st.lists(st.floats(0, 1), min_size=1), st.integers(1, 300))
def test_a_map_shows_full_and_free_as_what_they_are(fill: list[float], cells: int) -> None:
    assert len(memory_map(fill, cells, UNICODE)) == cells
    assert set(memory_map([0.0] * len(fill), cells, UNICODE)) == {UNICODE.shades[0]}
    assert set(memory_map([1.0] * len(fill), cells, UNICODE)) == {UNICODE.shades[-1]}
