"""The command line, and servers, in the process of the tests.

The command line sees what a process would see: it has streams, an environment, a folder
and a log of its own, and afterwards they are those of the tests again. What only a
process shows, as how a signal ends it, is for tests of processes.
"""

import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import rich_click as click

from infinistore.cli import main
from infinistore.cli.options import server_options
from infinistore.config import load_server_config
from tests.clients.event_loops import TrioThread
from tests.server import running

__all__ = ["FREE_PORTS", "ServerHere", "run_here", "server_here", "written"]

FREE_PORTS = ("--service-port", "0", "--manage-port", "0")


def run_here(
    *arguments: str | bytes,
    environment: Mapping[str, str],
    cwd: Path,
    input: bytes = b"",  # noqa: A002 - as subprocess calls it
    stdout: int | None = None,
    unbuffered: bool = False,
) -> "subprocess.CompletedProcess[bytes]":
    """Run `infinistore` with these arguments, to its end.

    `stdout` is a descriptor to write to, which is closed, and None captures what is
    written. `unbuffered` is Python's `-u`.
    """
    raw = None if stdout is None else open(stdout, "wb", 0)  # noqa: SIM115 - closed below
    captured = io.BytesIO()
    errors = io.BytesIO()
    binary: Any = captured if raw is None else raw if unbuffered else io.BufferedWriter(raw)
    own = io.TextIOWrapper(binary, "utf-8", write_through=unbuffered)
    with ExitStack() as stack:
        stack.enter_context(_own_log())
        stack.enter_context(mock.patch.dict(os.environ, environment, clear=True))
        stack.enter_context(_folder(cwd))
        stack.enter_context(mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(input), "utf-8")))
        stack.enter_context(mock.patch.object(sys, "stdout", own))
        said = io.TextIOWrapper(errors, "utf-8", "backslashreplace", line_buffering=True)
        stack.enter_context(mock.patch.object(sys, "stderr", said))
        try:
            main([os.fsdecode(argument) for argument in arguments])
        except SystemExit as ended:
            code = ended.code
        own.flush()  # as at the end of a process
        said.flush()
        output = None if raw else captured.getvalue()
        if raw:
            own.close()
        assert isinstance(code, int)
        return subprocess.CompletedProcess(list(arguments), code, output, errors.getvalue())


@contextmanager
def _folder(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _own_log() -> Iterator[None]:
    """Nobody has set up a log; what the commands do to it is undone."""
    before = {logger: (logger.handlers, logger.level) for logger in _loggers()}
    last_resort = logging.lastResort
    assert last_resort is not None
    formatter = last_resort.formatter
    logging.root.handlers = []
    logging.root.setLevel(logging.WARNING)
    for logger in _loggers():
        logger.handlers = []
    try:
        yield
    finally:
        last_resort.setFormatter(formatter)
        for logger in _loggers():
            logger.handlers, level = before.get(logger, ([], logging.NOTSET))
            logger.setLevel(level)


def _loggers() -> list[logging.Logger]:
    """The root, and those of the package."""
    named = logging.root.manager.loggerDict.items()
    return [
        logging.root,
        *(one for name, one in named if name.startswith("infinistore") and isinstance(one, logging.Logger)),
    ]


def written(*flags: str) -> dict[str, object]:
    """What the server's command hands to the configuration."""

    @click.command()
    @server_options
    def command(settings: dict[str, object]) -> dict[str, object]:
        return settings

    settings: dict[str, object] = command.main(list(flags), standalone_mode=False)
    return settings


@attrs.frozen
class ServerHere:
    """A server in a thread of this process."""

    url: str
    unix_socket: Path | None
    management: str
    running: running.RunningServer
    loop: TrioThread


@contextmanager
def server_here(environment: Mapping[str, str], *flags: str) -> Iterator[ServerHere]:
    """Run a server with these flags, on free ports, as `infinistore serve` does."""
    with TrioThread() as loop:
        with mock.patch.dict(os.environ, environment, clear=True):
            config = load_server_config(written(*FREE_PORTS, *flags), environment={})
            entered = loop.entered(lambda: running.running_server(config))
            server = entered.__enter__()
        try:
            addresses = server.server.addresses
            (host, port), *_ = addresses.tcp
            (management,) = addresses.management
            scheme = "tcp" if config.tls_cert is None else "infinistores"
            yield ServerHere(
                f"{scheme}://{host}:{port}", addresses.unix_socket, f"http://{host}:{management[1]}", server, loop
            )
        finally:
            entered.__exit__(None, None, None)
