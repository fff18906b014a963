"""The flags that several commands share.

The flags of a server derive from `ServerConfig`; no setting is repeated here.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs
import rich_click as click
from click.core import ParameterSource

from infinistore.addresses import DEFAULT_SERVICE_PORT, default_socket_path
from infinistore.cli.failures import session_of
from infinistore.config import server_settings
from infinistore.errors import PermissionDenied, StoreUnavailable, TlsFailed
from infinistore.keys import check_keys
from infinistore.settings import Setting
from infinistore.sizes import GIB, parse_size

if TYPE_CHECKING:
    from infinistore.blocking import BlockingStore

DEFAULT_URL: Final = f"infinistore://127.0.0.1:{DEFAULT_SERVICE_PORT}"
_CONNECTING = "Connection"
_RETRY_S: Final = 0.05

Function = TypeVar("Function", bound=Callable[..., Any])


if TYPE_CHECKING:  # generic for a type checker; at run time only in newer versions of click
    _TextToText = click.ParamType[str]
    _TextToSize = click.ParamType[int]
else:
    _TextToText = _TextToSize = click.ParamType


class _Key(_TextToText):
    """A key that a store accepts."""

    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            check_keys([value])
        except ValueError as error:
            self.fail(str(error).replace("key 0", "the key"), param, ctx)
        return str(value)


class _Size(_TextToSize):
    """A size with a unit, or in units of `unit_bytes`."""

    name = "size"

    def __init__(self, unit_bytes: int = 1) -> None:
        self.unit_bytes = unit_bytes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            size_bytes = parse_size(value, self.unit_bytes)
        except ValueError as error:
            self.fail(f"{value} {error}", param, ctx)
        if size_bytes < 1:
            self.fail(f"{value} must be at least one byte", param, ctx)
        return size_bytes


KEY: Final = _Key()
SIZE: Final = _Size()
SIZE_IN_GB: Final = _Size(GIB)
"""As the sizes of a server's settings."""


@attrs.frozen
class Target:
    """The store that a command talks to."""

    url: str
    token_file: Path | None
    deadline_s: float | None
    """None: the URL's value, or the client's default."""
    wait_s: float

    def check(self) -> None:
        """Raise ConfigError if URL or token file are invalid. Does not connect."""
        from infinistore import blocking

        with blocking.open_store(self.url, lazy=True, **self._given()):
            pass

    @contextmanager
    def open(self) -> Iterator["BlockingStore"]:
        """Connect, waiting up to `wait_s` for the server, and disconnect at the end."""
        from infinistore import blocking

        # What is logged of a cluster, the error says, too: it is one line.
        logging.getLogger("infinistore.cluster").addHandler(logging.NullHandler())
        given = self._given()
        self._wait_for_server(given)
        with blocking.open_store(self.url, **given) as store:
            yield store

    def _given(self) -> dict[str, Any]:
        """The options given by flags; others may be in the URL."""
        given: dict[str, Any] = {}
        if (token := read_given_token(self.token_file)) is not None:
            given["token"] = token
        if self.deadline_s is not None:
            given["deadline_s"] = self.deadline_s
        return given

    def over(self, path: str) -> "Target":
        """Return the same server with a transport: auto, tcp, unix, shm or rdma."""
        if path == "auto":
            return self
        from urllib.parse import urlsplit

        parts = urlsplit(self.url)
        if parts.scheme == "unix":
            raise click.UsageError(f"--path {path} needs a --url with a host, not {self.url}")
        if path != "unix":
            if parts.scheme == "infinistores":  # another scheme would send the token in the clear
                transport = f"transport={'inline' if path == 'tcp' else path}"
                query = f"{parts.query}&{transport}" if parts.query else transport
                return attrs.evolve(self, url=parts._replace(query=query).geturl())
            return attrs.evolve(self, url=parts._replace(scheme=path).geturl())
        socket_path = default_socket_path(parts.port or DEFAULT_SERVICE_PORT)
        return attrs.evolve(self, url=unix_url(str(socket_path), parts.query))

    def _wait_for_server(self, given: dict[str, Any]) -> None:
        import time

        from infinistore import blocking

        end = time.monotonic() + self.wait_s
        while time.monotonic() < end:
            try:
                with blocking.open_store(self.url, **given) as store:
                    store.stats()
            except TlsFailed:  # to wait would not change that
                raise
            except StoreUnavailable:
                time.sleep(_RETRY_S)
            except PermissionDenied:  # it has answered
                return
            else:
                return


def read_given_token(token_file: Path | None) -> str | None:
    """Return the token in the file that the running command was given; None without
    one. An error names the flag, or the variable, that named it.
    """
    if token_file is None:
        return None
    from infinistore.secret_files import read_token

    context = click.get_current_context(silent=True)
    by_variable = context is not None and context.get_parameter_source("token_file") is ParameterSource.ENVIRONMENT
    return read_token(token_file, setting="INFINISTORE_TOKEN_FILE" if by_variable else "--token-file")


def client_options(function: Function) -> Function:
    """Add the flags of the server address; the function receives them as `target`."""

    @functools.wraps(function)
    def call(url: str, token_file: Path | None, deadline: float | None, wait: float, **more: Any) -> Any:
        return function(target=Target(url, token_file, deadline, wait), **more)

    decorated: Any = call
    for option in reversed(_client_options()):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


def _client_options() -> list[Callable[[Any], Any]]:
    return [
        click.option(
            "--url", metavar="URL", default=DEFAULT_URL, show_default=True, envvar="INFINISTORE_URL", show_envvar=True,
            panel=_CONNECTING, help="The store to use.",
        ),
        token_file_option,
        click.option(
            "--deadline", metavar="SECONDS", type=click.FloatRange(min=0, min_open=True),
            panel=_CONNECTING, help="Longest time for one call. Default: the URL's deadline_s, or 30.",
        ),
        click.option(
            "--wait", metavar="SECONDS", type=click.FloatRange(min=0), default=0.0, panel=_CONNECTING,
            help="Wait this long for a server that is not up yet.",
        ),
        log_level_option,
    ]  # fmt: skip


def token_file_option(function: Function) -> Function:
    """Add `--token-file`; the function receives it as `token_file`."""
    return click.option(
        "--token-file", metavar="FILE", type=click.Path(path_type=Path), envvar="INFINISTORE_TOKEN_FILE",
        show_envvar=True, panel=_CONNECTING, help="File whose first line is the server's token.",
    )(function)  # fmt: skip


def log_level_option(function: Function) -> Function:
    """Add `--log-level`, which takes effect by itself."""
    return click.option(
        "--log-level", metavar="LEVEL", type=click.Choice(["error", "warning", "info", "debug"]), expose_value=False,
        callback=_note_log_level, panel=_CONNECTING, help="debug shows a traceback on failure.",
    )(function)  # fmt: skip


def json_option(function: Function) -> Function:
    """Add `--json`; the function receives it as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")(function)


def server_options(function: Function) -> Function:
    """Add a flag for each server setting; the function receives them as `settings`."""
    settings = server_settings()

    @functools.wraps(function)
    def call(**values: Any) -> Any:
        written = {setting.key: values.pop(setting.key) for setting in settings}
        for setting in settings:
            if setting.is_switch:  # an unset flag must not hide a variable or the file
                written[setting.key] = False if values.pop(_off(setting)) else written[setting.key] or None
            elif setting.kind.several:
                written[setting.key] = written[setting.key] or None
        return function(settings=written, **values)

    decorated: Any = call
    for setting in reversed(settings):
        if setting.is_switch:  # hidden: a column of --no- twins would bury the rest of the help
            decorated = click.option(setting.negative_flag, _off(setting), is_flag=True, hidden=True)(decorated)
        decorated = _server_option(setting)(decorated)
    return decorated  # type: ignore[no-any-return]


def _off(setting: Setting) -> str:
    return f"no_{setting.key}"


def _server_option(setting: Setting) -> Callable[[Any], Any]:
    return click.option(
        setting.flag,
        setting.key,
        default=None,
        is_flag=setting.is_switch,
        multiple=setting.kind.several,
        metavar=setting.kind.metavar or None,
        help=f"{setting.help}. Default: {setting.default_text}.",
        callback=_note_log_level if setting.key == "log_level" else None,
        shell_complete=lambda context, parameter, incomplete: [
            name for name in setting.kind.choices if name.lower().startswith(incomplete.lower())
        ],
        panel=setting.group,
    )


def _note_log_level(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None:
        session_of(context).wants_tracebacks = value.lower() == "debug"
    return value


def unix_url(socket_path: str, query: str) -> str:
    """Return the URL of a Unix socket with another URL's options, except for TLS."""
    from urllib.parse import quote

    kept = "&".join(one for one in query.split("&") if one.partition("=")[0] not in ("", "ca", "cert", "key"))
    return f"unix://{quote(socket_path)}" + (f"?{kept}" if kept else "")
