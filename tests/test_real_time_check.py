"""The check that names tests which look at a clock finds each kind, and no other."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from real_time import offences

OFFENCES = [
    "time.sleep(0.1)",
    "trio.sleep(delay)",
    "asyncio.sleep(5)",
    "trio.fail_after(5)",
    "trio.move_on_after(59)",
    "thread.join(5)",
    "process.wait(timeout=10)",
    "store.get('key', timeout_s=0.5)",
    "asyncio.wait_for(task, 1)",
    "sock.settimeout(3)",
    "time.monotonic()",
    "trio.current_time()",
]
FINE = [
    "time.sleep(0)",
    "trio.fail_after(60)",
    "thread.join()",
    "', '.join(names)",
    "process.wait(timeout=None)",
    "timedelta(seconds=5)",
]


@pytest.mark.parametrize("call", [*OFFENCES, *FINE])
def test_a_call_on_a_real_clock_is_named(tmp_path: Path, call: str) -> None:
    file = tmp_path / "test_file.py"
    file.write_text(f"def test_of_something():\n    {call}\n")
    assert [line for line, _ in offences(file)] == ([2] if call in OFFENCES else [])


@pytest.mark.parametrize("call", OFFENCES)
@pytest.mark.parametrize(
    "text",
    [
        "def test_of_something(autojump_clock):\n    {}\n",
        "def test_of_something():\n    def inner():\n        {}\n    run_in_virtual_time(inner)\n",
        "def helper():\n    {}\ndef test_of_something(*, mock_clock):\n    helper()\n",
        "def test_of_something():\n    {}  # real time: it never answers\n",
        "clock = MockClock()\ndef test_of_something():\n    {}\n",
    ],
)
def test_virtual_time_and_a_reason_are_fine(tmp_path: Path, text: str, call: str) -> None:
    file = tmp_path / "test_file.py"
    file.write_text(text.format(call))
    assert [*offences(file)] == []


@pytest.mark.parametrize(
    "text",
    [
        # pytest-trio wants the clock as an argument.
        "@pytest.mark.usefixtures('autojump_clock')\ndef test_of_something():\n    time.sleep(1)\n",
        "def test_of_something(autojump_clock):\n    pass\ndef test_of_more():\n    time.sleep(1)\n",
        "def helper():\n    time.sleep(1)\ndef test_of_something(mock_clock):\n    pass\nTestAll = Machine.TestCase\n",
    ],
)
def test_what_only_seems_to_be_in_virtual_time_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "test_file.py"
    file.write_text(text)
    assert len([*offences(file)]) == 1
