"""What looks at what clients report finds what is wrong with it; without a cluster."""

from typing import Any

import pytest

from tests.cluster_network.checks import LOOKUP_S, SCHEDULING_S, do_without
from tests.cluster_network.client import CLIENTS, KEYS
from tests.cluster_network.soak import verdict

MISSING = "nft is not installed"


def reports(**changed: Any) -> dict[str, Any]:
    """What two clients report for whom nothing was wrong, but for this of the first."""
    right = {
        "errors": [],
        "wrong": [],
        "longest_lookup_s": LOOKUP_S + SCHEDULING_S,
        "begun": dict.fromkeys(KEYS, 3),
        "highest": dict.fromkeys(KEYS, 3),
    }
    return {name: {**right, **(changed if name == CLIENTS[0] else {})} for name in CLIENTS}


def test_a_soak_in_which_nothing_was_wrong_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    no_node = "StoreUnavailable: no node of the cluster takes blocks"
    assert verdict(reports(errors=[no_node]), steady=True) == 0
    assert capsys.readouterr().out.startswith("1 calls had a view in which no node serves")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"longest_lookup_s": LOOKUP_S + SCHEDULING_S + 0.01}, f"a lookup of client {CLIENTS[0]} took 1.51 s"),
        ({"errors": ["a KeyError"] * 2}, "2 times: a KeyError"),
        ({"wrong": ["x-1: not its value"]}, f"client {CLIENTS[0]} has read"),
        ({"highest": dict.fromkeys(KEYS, 4)}, f"has read a version of {KEYS[0]} that nobody has begun to put"),
    ],
)
def test_a_soak_in_which_something_was_wrong_fails_and_says_it(
    changed: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verdict(reports(**changed), steady=True) == 1
    assert said in capsys.readouterr().out


def test_a_soak_after_which_something_is_missing_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(reports(), steady=False) == 1
    assert "not everything is found again" in capsys.readouterr().out


def test_what_root_lacks_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(pytest.fail.Exception, match=MISSING):
        do_without(MISSING)


def test_what_others_lack_has_a_test_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(pytest.skip.Exception, match=MISSING):
        do_without(MISSING)
