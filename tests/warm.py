"""Programs in processes that are forked from a warm parent instead of started anew.

A new interpreter takes half a second of processor time to import what `infinistore`
needs, which is most of what a short test of a process costs. Each process that runs
tests has one *parent*, started on first use, that has imported the package. It forks
itself for each program, with CLONE_PARENT: so the program is a child of the tests'
process, as if that had started it, and `Popen` is subprocess's own in all but that.

`Popen` forks `python [-P] [-u] [-W action] (-m module | -c code | file) ...` with this
interpreter. Everything else is started as always: other programs, other flags, an
environment that the interpreter or the loader reads when it starts, `preexec_fn`. So is
what asks for it with `cold`, for tests about imports or about a start itself, and
everything if TEST_COLD=1.

What differs from a start: modules are there already, the seed of hashes is the
parent's, and what the program's own children are is their business.
"""

import atexit
import contextlib
import ctypes
import inspect
import io
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["Popen", "run"]

_READ_AT_START: Final = ("PYTHON", "LC_", "LANG", "GLIBC_", "LD_", "MALLOC_")
_SYSCALL_CLONE: Final = {"x86_64": 56, "aarch64": 220}
_CLONE_PARENT: Final = 0x8000
_ABOVE_ALL: Final = 1000
"""Descriptors from here on are in the way of none that a program is given."""
_OURS: Final = dict(os.environ)
"""The parent's environment, which no test changed before it asked for the parent."""


class _Program(NamedTuple):
    """A command line of the interpreter, read as the interpreter reads it."""

    way: str
    """How it is given: `-m`, `-c`, or empty for a file."""
    what: str
    arguments: list[str]
    is_safe_path: bool
    is_unbuffered: bool
    warnings: list[str]


def _parsed(command: Sequence[str]) -> _Program | None:
    """The program of this command line, or None if a warm parent cannot run it."""
    flags = list(command[1:])
    is_safe_path = is_unbuffered = False
    actions: list[str] = []
    while flags:
        flag = flags.pop(0)
        if flag == "-P":
            is_safe_path = True
        elif flag == "-u":
            is_unbuffered = True
        elif flag == "-W" and flags:
            actions.append(flags.pop(0))
        elif flag in ("-m", "-c") and flags:
            return _Program(flag, flags[0], flags[1:], is_safe_path, is_unbuffered, actions)
        elif not flag.startswith("-"):
            return _Program("", flag, flags, is_safe_path, is_unbuffered, actions)
        else:
            break
    return None


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}
    return found | {"PYTHONUTF8": "1"}  # which all of them speak


class _Parent:
    """The end of the tests' process of a warm parent."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.environment = _read_at_start(_OURS)
        self._one_at_a_time = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-W", "error", __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=_OURS, pass_fds=[theirs.fileno()])

    def fork(self, job: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Have a program run with these descriptors. Returns the id of its process."""
        document = json.dumps(job).encode()
        with self._one_at_a_time:
            socket.send_fds(self._socket, [len(document).to_bytes(8, "little")], descriptors)
            self._socket.sendall(document)
            answer = self._socket.recv(8)
        if not answer:
            raise RuntimeError("the warm parent has ended")
        return int.from_bytes(answer, "little")

    def end(self) -> None:
        """End it. Programs that it forked go on."""
        if self.owner != os.getpid():
            self._socket.close()
            return
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)  # for a forked child may hold it, too
        self._socket.close()
        self._process.wait()


_parents: dict[int, _Parent] = {}
"""By the process that runs tests; one that a test forked gets its own."""


def _parent() -> _Parent:
    if (found := _parents.get(os.getpid())) is None:
        found = _parents[os.getpid()] = _Parent()
        atexit.register(found.end)
    return found


class Popen(subprocess.Popen[Any]):
    """As `subprocess.Popen`, by a warm parent if it can run this; never if `cold`."""

    def __init__(self, command: Sequence[Any], *, cold: bool = False, **options: Any) -> None:
        self._cold = cold or os.environ.get("TEST_COLD") == "1"
        super().__init__(command, **options)

    def _execute_child(self, *arguments: Any) -> None:
        names = [*inspect.signature(subprocess.Popen._execute_child).parameters][1:]  # type: ignore[attr-defined]
        given = types.SimpleNamespace(**dict(zip(names, arguments, strict=True)))
        if not self._forked(given):
            super()._execute_child(*arguments)  # type: ignore[misc]

    def _forked(self, given: Any) -> bool:
        odd = (given.preexec_fn, given.shell, given.gid, given.gids, given.uid, given.executable)
        if self._cold or not given.close_fds or given.umask != -1 or any(item not in (None, False) for item in odd):
            return False
        if isinstance(given.args, str | bytes) or os.fspath(given.args[0]) != sys.executable:
            return False
        program = _parsed([os.fsdecode(argument) for argument in given.args])
        environment = {
            os.fsdecode(name): os.fsdecode(value)
            for name, value in (os.environ if given.env is None else given.env).items()
        }
        cwd = os.path.abspath(os.fsdecode(given.cwd or "."))
        if program is None or platform.machine() not in _SYSCALL_CLONE or not os.path.isdir(cwd):
            return False
        parent = _parent()
        if _read_at_start(environment) != parent.environment:
            return False
        job = {
            "program": program,
            "environment": environment,
            "cwd": cwd,
            "command": [os.fsdecode(argument) for argument in given.args],
            "group": 0 if given.start_new_session else given.process_group,
            "session": given.start_new_session,
            "targets": [0, 1, 2, *given.pass_fds],
        }
        theirs = [given.p2cread, given.c2pwrite, given.errwrite]
        standard = [own if end == -1 else end for own, end in enumerate(theirs)]
        sys.audit("tests.warm", given.args)
        self.pid = parent.fork(job, [*standard, *given.pass_fds])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        subprocess.Popen._close_pipe_fds(self, *(getattr(given, name) for name in pipes))  # type: ignore[attr-defined]
        return True


def run(
    command: Sequence[Any], *, cold: bool = False, check: bool = False, **options: Any
) -> "subprocess.CompletedProcess[Any]":
    """As `subprocess.run`, by a warm parent if it can run this; never if `cold`."""
    given, timeout = options.pop("input", None), options.pop("timeout", None)
    if given is not None:
        options["stdin"] = subprocess.PIPE
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, cold=cold, **options) as process:
        try:
            output, errors = process.communicate(given, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


# The other end: the parent's own program.

_COMMANDS: Final = Path(__file__).parent.parent / "infinistore" / "cli"


def _import_everything() -> None:
    """Import what programs need, but for what is heavy and imported late."""
    import importlib

    for name in sorted(path.stem for path in _COMMANDS.glob("*.py")):
        if name not in ("__init__", "raw_peer", "shard"):
            importlib.import_module(f"infinistore.cli.{name}")
    for name in (
        "aio",
        "blocking",
        "server.composition",
        "server.management",
        "server.shards",
        "server.take_over",
        "monitor",
        "demo",
        "dropin",
    ):
        importlib.import_module(f"infinistore.{name}")


def _received(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    head, descriptors, _, _ = socket.recv_fds(control, 8, 64)
    if not head:
        return None
    left = int.from_bytes(head, "little")
    parts = []
    while left:
        parts.append(control.recv(left))
        left -= len(parts[-1])
    return json.loads(b"".join(parts)), descriptors


def _fork() -> int:
    """As os.fork, of a child of this process's own parent."""
    api, system = ctypes.pythonapi, ctypes.PyDLL(None)
    api.PyOS_BeforeFork()
    child: int = system.syscall(_SYSCALL_CLONE[platform.machine()], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if child == 0:
        api.PyOS_AfterFork_Child()
    else:
        api.PyOS_AfterFork_Parent()
    return child


def _serve(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each job. Returns in the children, with theirs."""
    while (asked := _received(control)) is not None:
        child = _fork()
        if child == 0:
            return asked
        control.sendall(child.to_bytes(8, "little"))
        for descriptor in asked[1]:
            os.close(descriptor)
    os._exit(0)


def _become(job: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Make this process what a start would have made of it."""
    import fcntl

    if job["session"]:
        os.setsid()
    elif job["group"] is not None and job["group"] >= 0:
        os.setpgid(0, job["group"])
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE_ALL) for descriptor in descriptors]
    os.closerange(0, _ABOVE_ALL)
    for descriptor, target in zip(high, job["targets"], strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.orig_argv[:] = job["command"]


def _open_streams(is_unbuffered: bool) -> None:
    def opened(number: int, mode: str, errors: str) -> Any:
        raw = open(number, mode + "b", 0 if is_unbuffered and mode == "w" else -1, closefd=False)  # noqa: SIM115
        line = number == 2 or raw.isatty()
        return io.TextIOWrapper(raw, "utf-8", errors, line_buffering=line, write_through=is_unbuffered)

    sys.stdin = sys.__stdin__ = opened(0, "r", "strict")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = opened(1, "w", "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = opened(2, "w", "backslashreplace")  # type: ignore[misc]


def _run(program: _Program) -> None:
    if "error" not in program.warnings:
        filters: Any = warnings.filters
        filters.remove(next(item for item in filters if item[0] == "error"))
        sys.warnoptions.clear()
    sys.argv[:] = [program.way or program.what, *program.arguments]
    if program.way and not program.is_safe_path:
        sys.path.insert(0, os.getcwd() if program.way == "-m" else "")
    if program.way == "-m":
        runpy.run_module(program.what, run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    source, name = program.what, "<string>"
    if not program.way:
        source, name = Path(program.what).read_text(), program.what
        main.__file__ = name
        if not program.is_safe_path:
            sys.path.insert(0, os.path.dirname(os.path.abspath(name)))
    exec(compile(source, name, "exec"), main.__dict__)


def _main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    _import_everything()
    import gc

    gc.freeze()
    with contextlib.suppress(KeyboardInterrupt):
        job, descriptors = _serve(control)
    control.detach()
    program = _Program(*job["program"])
    _become(job, descriptors)
    _open_streams(program.is_unbuffered)
    _run(program)


if __name__ == "__main__":
    _main()
