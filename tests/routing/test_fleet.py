"""What a router knows of its engines."""

from pathlib import Path

import pytest

from infinistore.errors import ConfigError
from infinistore.integrations.vllm.announcements import AnnouncedBlocks, AnnouncedEngine
from infinistore.integrations.vllm.blocks import BlockNames
from infinistore.routing import Address, Role
from infinistore.routing.fleet import FAILURES, Fleet, Member, usual_blocks
from infinistore.routing.watcher import read_engines
from infinistore.scheduling import Request


def kind(fingerprint: str = "0123", *, model: str = "small", block_tokens: int = 16) -> AnnouncedBlocks:
    names = BlockNames(f"vllm/{model}/{fingerprint}", ("0", "1"))
    return AnnouncedBlocks(names, block_tokens, block_tokens, 1000)


def fleet_of(*urls: str, role: Role = "both") -> Fleet:
    fleet = Fleet()
    fleet.update({url: (Address.of(url), role) for url in urls})
    for member in fleet:
        member.models = {"chat": "/models/small"}
        member.answered()
    return fleet


def test_an_engine_is_down_after_some_failures_in_a_row_and_up_with_an_answer() -> None:
    (member,) = fleet_of("http://a")
    for _ in range(FAILURES - 1):
        assert not member.failed("no route")
    assert not member.answered()  # it was not down
    assert [member.failed("no route") for _ in range(FAILURES)] == [*[False] * (FAILURES - 1), True]
    assert (member.is_up, member.problem) == (False, "no route")
    assert not member.failed("no route")  # told once
    assert member.failed("no key")  # and again if it is something else
    assert member.answered()


def test_engines_that_stay_keep_what_is_known_of_them() -> None:
    fleet = fleet_of("http://a", "http://b")
    stays = next(iter(fleet))
    new, gone = fleet.update({url: (Address.of(url), "both") for url in ("http://a", "http://c")})
    assert ([one.address.url for one in new], [one.address.url for one in gone]) == (["http://c"], ["http://b"])
    assert next(iter(fleet)) is stays


def test_an_engine_with_another_role_is_another_one() -> None:
    fleet = fleet_of("http://a")
    new, gone = fleet.update({"http://a": (Address.of("http://a"), "decode")})
    assert ([one.role for one in new], [one.role for one in gone]) == (["decode"], ["both"])


def test_an_engine_is_known_by_the_url_that_it_has_announced() -> None:
    fleet = fleet_of("http://a", "http://b")
    kinds = {"vllm-engines/small/1": kind("1"), "vllm-engines/small/2": kind("2")}
    engines = [AnnouncedEngine("http://a/", "vllm-engines/small/1", 4800)]
    problems = fleet.learn(engines, kinds)
    assert [member.blocks for member in fleet] == [kinds["vllm-engines/small/1"], None]
    assert len(problems) == 1
    assert "announce_url" in problems[0]


def test_engines_are_taken_for_those_of_their_model_if_there_is_one_kind() -> None:
    fleet = fleet_of("http://a")
    assert fleet.learn([], {"x": kind("1"), "y": kind("9", model="large")}) == []
    assert [member.blocks for member in fleet] == [kind("1")]


def test_an_engine_with_other_blocks_than_most_is_told_and_loads_nothing() -> None:
    fleet = fleet_of("http://a", "http://b", "http://c")
    kinds = {"1": kind("1"), "2": kind("2", block_tokens=32)}
    engines = [AnnouncedEngine(f"http://{name}", "2" if name == "b" else "1", 4800) for name in "abc"]
    (problem,) = fleet.learn(engines, kinds)
    assert "http://b has blocks that most engines of its model do not read" in problem


def test_what_is_known_of_an_engine_outlasts_an_announcement_that_says_the_same() -> None:
    fleet = fleet_of("http://a")
    fleet.learn([], {"x": kind()})
    (member,) = fleet
    engine = member.engine
    fleet.learn([], {"x": kind()})
    assert member.engine is engine


def test_the_most_frequent_blocks_are_the_usual_ones() -> None:
    assert usual_blocks([None, kind("1"), kind("2"), kind("2")]) == kind("2")
    assert usual_blocks([None]) is None


@pytest.mark.parametrize(
    ("metrics", "waits"),
    [
        ('vllm:num_requests_waiting{engine="0"} 5.0\nvllm:num_requests_waiting{engine="1"} 2.0\n', True),
        ('vllm:num_requests_waiting_by_reason{reason="x"} 5.0\n', False),
        ("junk \0", False),
    ],
)
def test_the_queue_of_an_engine_is_read_off_its_metrics(metrics: str, waits: bool) -> None:
    member = Member(Address.of("http://a"))
    member.engine.send(1, Request(1000), 0.0)
    member.engine.lost(1, 0.0)
    member.told_queue(metrics)
    assert (member.engine.queued_s(0.0) > 0) is waits


def test_a_file_has_an_engine_in_each_line(tmp_path: Path) -> None:
    file = tmp_path / "engines"
    file.write_text("# ours\nhttp://a:8000/\n\nhttps://b/v  decode  # the fast one\n")
    found = read_engines(file)
    assert [(url, role, one.port) for url, (one, role) in found.items()] == [
        ("http://a:8000", "both", 8000),
        ("https://b/v", "decode", 443),
    ]


@pytest.mark.parametrize(
    "text", ["http://a both decode", "a:8000", "ftp://a", "http://a?x=1", "http://[a", "http://a:x"]
)
def test_a_line_that_is_no_engine_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "engines"
    file.write_text(f"http://good\n{text}\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_engines(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--engines-file .*: No such file"):
        read_engines(tmp_path / "none")
