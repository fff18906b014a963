"""The server's log: one line for each event, whatever a client puts into its name, and
no keys above debug.
"""

import json
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore import blocking
from infinistore.cli.log_format import JsonFormatter, TerminalFormatter, set_up_logging
from infinistore.errors import InfiniStoreException
from tests.cli.conftest import StartProcess


def record(event: str, **fields: Any) -> logging.LogRecord:
    made = logging.makeLogRecord({"levelno": logging.INFO, "levelname": "INFO", "name": "infinistore.server"})
    made.msg = event
    vars(made).update(fields)
    return made


@given(st.text(), st.text())
def test_a_line_is_one_line_whatever_is_in_it(event: str, client: str) -> None:
    for formatter in (JsonFormatter(), TerminalFormatter()):
        line = formatter.format(record(event.replace("%", ""), client=client))
        assert len(line.splitlines()) == 1
        assert line.isprintable()


@given(st.text(st.characters(exclude_characters="%")), st.text())
def test_json_has_the_event_and_its_fields(event: str, client: str) -> None:
    line = json.loads(JsonFormatter().format(record(event, client=client, blocks=7)))
    assert (line["event"], line["client"], line["blocks"]) == (event, client, 7)
    assert (line["level"], line["logger"]) == ("info", "infinistore.server")
    assert line["time"].endswith("+00:00")


def test_a_person_reads_the_event_and_then_its_fields() -> None:
    line = TerminalFormatter().format(record("the pool grew", arena_bytes=5, error="no room", client="a"))
    assert line[8:] == ' info    the pool grew  arena_bytes=5  error="no room"  client=a'


def test_a_traceback_is_a_field_in_json_and_follows_on_a_terminal() -> None:
    made = record("internal error")
    try:
        raise ZeroDivisionError("of the test")
    except ZeroDivisionError:
        made.exc_info = sys.exc_info()
    assert "ZeroDivisionError: of the test" in json.loads(JsonFormatter().format(made))["exception"]
    assert TerminalFormatter().format(made).endswith("ZeroDivisionError: of the test")


@pytest.mark.parametrize(
    ("setting", "on_terminal", "is_json"),
    [("auto", True, False), ("auto", False, True), ("text", False, False), ("json", True, True)],
)
def test_the_format_is_that_of_the_setting_or_of_where_it_goes(
    setting: str, on_terminal: bool, is_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: on_terminal))
    made: list[logging.Handler] = []
    monkeypatch.setattr(logging, "basicConfig", lambda *, level, handlers: made.extend(handlers))
    set_up_logging("info", setting)
    assert isinstance(made[0].formatter, JsonFormatter) is is_json


def log_of(running_process: StartProcess, level: str) -> list[dict[str, Any]]:
    """What a server in a process of its own logs of a few requests, one of them
    refused.
    """
    with running_process("--prealloc-size", "1MiB", "--log-level", level) as own:
        with blocking.open_store(own.url, name="me") as store:
            store.put("secret-key", b"secret value")
            with pytest.raises(InfiniStoreException):
                store.match_prefix(["secret-key"], hold_s=1e6)
        _, errors = own.stop()
    assert b"secret value" not in errors
    return [json.loads(line) for line in errors.splitlines()]


@pytest.mark.process
def test_the_log_of_a_server_is_json_without_requests_and_keys(running_process: StartProcess) -> None:
    lines = log_of(running_process, "info")
    may_be = ("serving without RDMA", "taking the pool")  # as the machine has no RDMA, or is slow
    assert [line["event"] for line in lines if line["event"] not in may_be] == ["draining"]
    assert lines[-1]["signal"] == "SIGTERM"
    assert "secret" not in str(lines)


@pytest.mark.process
def test_debug_shows_every_request(running_process: StartProcess) -> None:
    requests = [line for line in log_of(running_process, "debug") if line["event"] == "request"]
    assert [(line["client"], line["request"], line["outcome"]) for line in requests] == [
        ("me", "Put", "ok"),
        ("me", "MatchPrefix", "LimitExceeded"),
    ]
    assert requests[0]["payload_bytes"] == 20
    assert requests[0]["elapsed_us"] >= 0
