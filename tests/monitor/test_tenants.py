"""The tenants on the screen of the monitor: their rates, and what is shown where."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.access.tenants import digest_of, make_token
from infinistore.monitor.app import still
from infinistore.monitor.controls import Controls
from infinistore.monitor.lines import ASCII, UNICODE
from infinistore.monitor.model import Model
from infinistore.monitor.tenants import TenantsModel, tenant_lines
from infinistore.monitor.view import document, screen
from infinistore.sizes import MIB
from tests.cli.in_process import server_here

from .made import NOON, loaded_stats, plain, told, watched

TENANTS = Controls(tenants=True)
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def shown(model: Model, width: int, height: int, controls: Controls = TENANTS) -> list[str]:
    return plain(screen(model.snapshot(), controls, width, height), width, height)


def watching(*samples: Mapping[str, Any]) -> Model:
    model = watched(loaded_stats(1))
    model.tenants = TenantsModel()
    for number, one in enumerate(samples):
        model.tenants.observe(one, 2.0 * number)
    return model


def test_rates_are_those_between_two_samples() -> None:
    model = TenantsModel()
    model.observe(told(alice={"hits": 100, "misses": 100, "refused": 7, "keys": 3}), 10.0)
    (first,) = model.tenants.rows
    assert (first.hit_rate, first.reads_per_s, first.refused, first.keys) == (None, None, 7, 3)
    model.observe(told(alice={"hits": 130, "misses": 110, "refused": 9, "evicted": 4, "pauses": 6}), 12.0)
    (row,) = model.tenants.rows
    assert (row.hit_rate, row.reads_per_s) == (0.75, 20.0)
    assert (row.evicted_per_s, row.pauses_per_s, row.refused_per_s) == (2.0, 3.0, 1.0)


def test_after_a_restart_nothing_is_negative_and_a_new_tenant_has_no_rates() -> None:
    model = TenantsModel()
    model.observe(told(alice={"hits": 100}), 1.0)
    model.observe(told(alice={"hits": 5}, bob={"hits": 9}), 2.0)
    assert [(row.tenant, row.reads_per_s) for row in model.tenants.rows] == [("alice", None), ("bob", None)]


def test_what_is_not_told_is_said_and_the_last_figures_stay() -> None:
    model = watching(told(alice={"used_bytes": 5 * MIB}))
    assert model.tenants is not None
    model.tenants.lose("nobody answers")
    lines = shown(model, 80, 24)
    assert any("! nobody answers" in one for one in lines)
    assert any(re.match(r"alice +0 5.00 MiB", one) for one in lines)
    model.tenants.observe(told(alice={}), 9.0)
    assert not any("nobody answers" in one for one in shown(model, 80, 24))


@pytest.mark.parametrize("answer", [{}, {"tenants": 7}, {"tenants": [{"tenant": "a"}]}, [], {"tenants": ["x"]}])
def test_another_answer_is_one_error_and_changes_nothing(answer: Any) -> None:
    model = TenantsModel()
    model.observe(told(alice={}), 1.0)
    before = model.tenants
    with pytest.raises(ValueError, match="it tells of no tenants"):
        model.observe(answer, 2.0)
    assert model.tenants == before


@given(st.integers(0, 250), st.integers(0, 30), st.sampled_from([UNICODE, ASCII]))
def test_any_width_and_height_are_filled_exactly(width: int, height: int, glyphs: Any) -> None:
    tenants = watching(told(alice={"keys": 5}, bob={})).snapshot().tenants
    assert tenants is not None
    plain(tenant_lines(tenants, Controls(), width, height, glyphs), max(width, 1), height)


def test_the_largest_comes_first_and_a_filter_leaves_out_the_others() -> None:
    model = watching(told(alice={"used_bytes": 1, "keys": 1}, bob={"used_bytes": 3, "keys": 5}, bert={"used_bytes": 2}))
    names = [one.split()[0] for one in shown(model, 80, 24) if re.match("alice|bob|bert", one)]
    assert names == ["bob", "bert", "alice"]
    lines = shown(model, 80, 24, Controls(tenants=True, filter="B"))
    assert not any(one.startswith("alice") for one in lines)
    assert any(re.match(r"\(2 of them\) +5 +5 B", one) for one in lines)


def test_limits_are_there_and_what_is_unlimited_is_left_blank() -> None:
    limits = {"max_bytes": 8 * MIB, "reserved_bytes": 2 * MIB, "refused": 12}
    lines = shown(watching(told(alice=limits, bob={})), 80, 24)
    (alice,) = [one for one in lines if one.startswith("alice")]
    (bob,) = [one for one in lines if one.startswith("bob")]
    assert alice.split()[-7:] == ["2.00", "MiB", "8.00", "MiB", "-", "-", "12"]
    assert "MiB" not in bob


def test_t_shows_the_tenants_and_the_store_again() -> None:
    model = watching(told(alice={}))
    controls = Controls()
    assert any("t tenants" in one for one in shown(model, 80, 24, controls))
    controls = controls.press("t")
    assert any(one.startswith("alice") for one in shown(model, 80, 24, controls))
    assert not any(one.startswith("alice") for one in shown(model, 80, 24, controls.press("t")))


def test_who_has_not_asked_for_them_is_told_how() -> None:
    assert any("start the monitor with --manage-url" in one for one in shown(watched(loaded_stats(1)), 80, 24))


def test_programs_and_pipes_get_them_too() -> None:
    model = watching(told(alice={"keys": 3}))
    snapshot = attrs.evolve(model.snapshot(), at=NOON)
    assert [row["tenant"] for row in document(snapshot)["tenants"]] == ["alice"]
    assert "tenants" not in document(watched(loaded_stats(1)).snapshot())
    assert still(snapshot, 1.0, 80, 24, UNICODE)[-1].plain.startswith("alice ")


@pytest.fixture
def tokens(tmp_path: Path) -> Mapping[str, str]:
    return {name: make_token(name, os.urandom) for name in ("alice", "ops")}


@pytest.fixture
def served(tmp_path: Path, tokens: Mapping[str, str], environment: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The URLs of a server with tenants, and of its management API."""
    file = tmp_path / "tenants.yaml"
    file.write_text(
        f"tenants:\n  alice:\n    tokens: [{digest_of(tokens['alice'])}]\n    roles: [read, write, monitor]\n"
        f"  ops:\n    tokens: [{digest_of(tokens['ops'])}]\n    roles: [monitor]\n    operator: true\n"
    )
    file.chmod(0o600)
    for name, token in tokens.items():
        (tmp_path / name).write_text(token)
        (tmp_path / name).chmod(0o600)
    flags = ["--unix-socket", "off", "--prealloc-size", "16MiB", "--tenants", str(file)]
    with server_here(environment, *flags) as server:
        yield server.url, server.management


def test_one_screen_has_the_tenants_of_a_server_and_a_wrong_token_is_one_line(
    run: Run, served: tuple[str, str], tmp_path: Path
) -> None:
    url, management = served
    asked = ["monitor", url, "--once", "--interval", "0.2", "--manage-url", management, "--token-file"]
    done = run(*asked, str(tmp_path / "ops"))
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[-2:]] == ["alice", "ops"]
    tenants = json.loads(run(*asked, str(tmp_path / "ops"), "--json").stdout)["tenants"]
    assert {row["tenant"]: row["connections"] for row in tenants} == {"alice": 0, "ops": 1}
    refused = run(*asked, str(tmp_path / "alice"))
    assert refused.returncode != 0
    assert "the management API is for operators" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_of_a_cluster_no_single_management_api_is_asked(run: Run) -> None:
    done = run("monitor", "infinistore+static://127.0.0.1:1", "--once", "--manage-url", "http://127.0.0.1:1")
    assert done.returncode == 2
    assert "--manage-url is of one server" in done.stderr
