"""Runs a command, and converts every failure to a line on standard error and a code.

The exit codes are an interface for scripts; `infinistore help exit-codes` prints
`EXIT_CODES`. Only `--log-level debug` shows a traceback.
"""

import errno
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TextIO

import attrs
import rich_click as click
from click.exceptions import NoArgsIsHelpError

from infinistore import errors
from infinistore.cli.files import BadManifest
from infinistore.cli.log_format import NoteFormatter
from infinistore.settings import near

OK: Final = 0
NEGATIVE: Final = 1
USAGE: Final = 2
UNAVAILABLE: Final = 3
DEADLINE: Final = 4
NO_ROOM: Final = 5
DAMAGED: Final = 6
INTERNAL: Final = 70
INTERRUPTED: Final = 130
OUTPUT_CLOSED: Final = 141

EXIT_CODES: Final = {
    OK: "Success, and the answer is yes.",
    NEGATIVE: "Success, and the answer is no: a key is missing or exists, `doctor` found a problem, or you said no.",
    USAGE: "The command cannot run: a wrong flag, setting or file, a port in use, no memory for a server's pool.",
    UNAVAILABLE: "The store or its disk cannot be used, was lost, wants another token, or speaks another version.",
    DEADLINE: "The call did not finish before its deadline.",
    NO_ROOM: "The store is out of memory, or a limit of the store was reached.",
    DAMAGED: "The data read is not the data written, by its checksum, or not a file that `put` wrote.",
    INTERNAL: "Internal error. Run the command again with --log-level debug, and please report it.",
    INTERRUPTED: "Ctrl-C.",
    OUTPUT_CLOSED: "The reader of the output closed it.",
}

_CODE_OF: Final[tuple[tuple[type[BaseException], int], ...]] = (
    (errors.KeyNotFound, NEGATIVE),
    (errors.ConfigError, USAGE),
    (errors.InvalidRequest, USAGE),
    (errors.DeadlineExceeded, DEADLINE),
    (errors.OutOfMemory, NO_ROOM),
    (errors.ValueTooLarge, NO_ROOM),
    (errors.LimitExceeded, NO_ROOM),
    (errors.ChecksumMismatch, DAMAGED),
    (BadManifest, DAMAGED),
    (errors.StoreUnavailable, UNAVAILABLE),
    (errors.DiskFailed, UNAVAILABLE),
    (errors.AuthenticationFailed, UNAVAILABLE),
    (errors.PermissionDenied, UNAVAILABLE),
    (errors.ProtocolError, UNAVAILABLE),
    (errors.InfiniStoreException, INTERNAL),
    (OSError, USAGE),
)


class NegativeAnswer(Exception):
    """Success, and the answer is no: exit code 1. A message goes to standard error."""


@attrs.define
class Session:
    """The state of one run of the command line."""

    wants_tracebacks: bool = attrs.field(factory=lambda: os.environ.get("INFINISTORE_LOG_LEVEL", "").lower() == "debug")


def session_of(context: click.Context) -> Session:
    """Return the session that `run` started."""
    return context.find_root().ensure_object(Session)


def answered(arguments: Sequence[str], invoke: Callable[[Sequence[str], Session], int]) -> int:
    """Run a command by `invoke`. Returns its exit code and never raises."""
    session = Session()
    # No socket may take the place of a stream that was closed.
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)
    closed = sys.stdout is None
    if closed:  # what is written there fails
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w", closefd=False)  # noqa: SIM115 - until the end
    if sys.stderr is None:  # and there is lost
        sys.stderr = open(os.open(os.devnull, os.O_WRONLY), "w", closefd=False)  # noqa: SIM115 - until the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a key is shown where its characters cannot be
    if logging.lastResort is not None:  # what prints warnings while nobody has set up a log
        logging.lastResort.setFormatter(NoteFormatter())
    try:
        code = invoke(arguments, session)
        sys.stdout.flush()  # a pipe that was closed is met here, where it is handled, and not at the exit of Python
    except BaseException as error:  # noqa: BLE001 - this is the place that answers for every error
        found = innermost(error)
        if closed and isinstance(found, OSError) and found.errno == errno.EBADF and found.filename is None:
            found = OSError(errno.EBADF, "standard output is closed")
        return _report(found, session)
    return code


def innermost(error: BaseException) -> BaseException:
    """The relevant error of a group: an interrupt if there is one, else the first."""
    while isinstance(error, BaseExceptionGroup):
        interrupts = error.subgroup(KeyboardInterrupt)
        error = (interrupts or error).exceptions[0]
    return error


def _report(error: BaseException, session: Session) -> int:
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        error = error.__context__  # rich answers a closed pipe by an exit code of its own
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else OK if error.code is None else INTERNAL
    if isinstance(error, BrokenPipeError):
        abandon_output()
        return OUTPUT_CLOSED
    if session.wants_tracebacks and not isinstance(error, click.ClickException | NegativeAnswer):
        traceback.print_exception(error)
    code, line = _explain(error)
    try:
        sys.stdout.flush()  # what was printed before stands before the error
    except OSError:  # closed, or full
        abandon_output()
    try:
        if line:
            print(f"{'' if code == INTERRUPTED else 'infinistore: '}{line}", file=sys.stderr)
    except OSError:  # the code says it all the same
        abandon_output(sys.stderr)
    return code


def abandon_output(stream: TextIO | None = None) -> None:
    """Discard buffered output, or Python would complain about it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


@contextmanager
def announcing() -> Iterator[None]:
    """Print the line that scripts wait for within the block; it is flushed. A server
    serves even if standard output is closed, or full.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError:
        abandon_output()


def _explain(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the line for standard error."""
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return INTERRUPTED, ""
    if isinstance(error, NegativeAnswer):
        return NEGATIVE, _one_line(str(error))
    if isinstance(error, click.UsageError):
        return USAGE, _usage_line(error)
    if isinstance(error, click.ClickException):
        return USAGE, _one_line(error.format_message())
    code = next((code for kind, code in _CODE_OF if isinstance(error, kind)), INTERNAL)
    if isinstance(error, OSError):
        return code, _one_line(
            f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
        )
    if isinstance(error, errors.AuthenticationFailed):
        return code, _one_line(f"{error}; give it with --token-file FILE")
    if not isinstance(error, errors.InfiniStoreException):
        text = f"internal error: {type(error).__name__}: {error}; --log-level debug shows where"
        return code, _one_line(text)
    return code, _one_line(str(error) or type(error).__name__)


def _usage_line(error: click.UsageError) -> str:
    where = f"; see `{error.ctx.command_path} --help`" if error.ctx is not None else ""
    if isinstance(error, click.NoSuchOption):
        known = {flag.lstrip("-"): flag for flag in _flags(error.ctx)} if error.ctx is not None else {}
        hint = near(error.option_name.lstrip("-"), known, spell=known.__getitem__)
        return f"there is no flag {error.option_name}{hint or where}"
    if isinstance(error, NoArgsIsHelpError) and error.ctx is not None and isinstance(error.ctx.command, click.Group):
        return f"name a command: {', '.join(error.ctx.command.list_commands(error.ctx))}{where}"
    message = _one_line(error.format_message()).removesuffix(".")
    return message[:1].lower() + message[1:] + where


def _flags(context: click.Context) -> Iterable[str]:
    for parameter in context.command.get_params(context):
        yield from (flag for flag in (*parameter.opts, *parameter.secondary_opts) if flag.startswith("--"))


def _one_line(text: str) -> str:
    return " ".join(text.split())
