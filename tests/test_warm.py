"""Programs that are forked from a warm parent behave as those that are started."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm

pytestmark = pytest.mark.process

LOOK = """
import json, os, sys, warnings
print(json.dumps([
    __name__, sys.argv, os.getcwd(), dict(os.environ), sys.stdin.read(), sorted(os.listdir("/proc/self/fd")),
    [warning[0] for warning in warnings.filters][:1] == ["error"], os.getpid() == os.getpgid(0), os.getppid(),
    sys.path[0], sys.stdout.line_buffering,
]))
"""


@pytest.mark.parametrize(
    ("flags", "program", "session"),
    [([], ["-c", LOOK], False), (["-W", "error"], ["-m", "look"], True), (["-P", "-u"], ["look.py"], False)],
    ids=["code", "module", "file"],
)
def test_a_program_sees_what_one_that_is_started_sees(
    tmp_path: Path, flags: list[str], program: list[str], session: bool
) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    environment = {**os.environ, "ADDED": "\udcff"}
    ends = [
        warm.run(
            [sys.executable, *flags, *program, "one", "two words"],
            cold=cold,
            cwd=tmp_path,
            env=environment,
            input="read",
            text=True,
            capture_output=True,
            start_new_session=session,
        )
        for cold in (False, True)
    ]
    assert ends[0].returncode == ends[1].returncode == 0, ends
    assert ends[0].stdout == ends[1].stdout
    assert ends[0].stderr == ends[1].stderr == ""


@pytest.mark.parametrize(
    ("program", "code", "error"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('why')", 1, "why\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import atexit; atexit.register(print, 'late', flush=True)", 0, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import threading; threading.Thread(target=print, args=['late']).start()", 0, ""),
    ],
)
def test_it_ends_as_one_that_was_started(program: str, code: int, error: str) -> None:
    done = warm.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr.endswith(error)
    assert (done.stderr == "") == (error == "")
    assert done.stdout == ("late\n" if "late" in program else "")


def test_it_is_a_child_of_the_tests_and_takes_signals() -> None:
    with warm.Popen(
        [sys.executable, "-c", "print('ready', flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert f"PPid:\t{os.getpid()}\n" in Path(f"/proc/{process.pid}/status").read_text()
        process.send_signal(signal.SIGINT)
        # A signal just before `read` does not end it; the end of its input does.
        assert process.communicate() == (b"", None)
    assert process.returncode == -signal.SIGINT


def test_descriptors_that_are_passed_have_their_numbers() -> None:
    reader, writer = os.pipe()
    with warm.Popen([sys.executable, "-c", f"import os; os.write({writer}, b'there')"], pass_fds=[writer]):
        os.close(writer)
        with open(reader, "rb") as stream:
            assert stream.read() == b"there"


@pytest.mark.parametrize(
    "options", [{"env": {"PYTHONHASHSEED": "1"}}, {"cold": True}, {"preexec_fn": int}, {"close_fds": False}], ids=str
)
def test_what_a_warm_parent_cannot_do_is_started(options: dict[str, Any]) -> None:
    done = warm.run([sys.executable, "-c", "import sys; print('trio' in sys.modules)"], stdout=-1, **options)
    assert done.stdout == b"False\n"


def test_a_warm_parent_has_imported_the_package() -> None:
    done = warm.run([sys.executable, "-c", "import sys; print('infinistore.cli.serve' in sys.modules)"], stdout=-1)
    assert done.stdout == b"True\n"
