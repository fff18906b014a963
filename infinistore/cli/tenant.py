"""`infinistore tenant`: edits the file with the tenants of a server."""

import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import rich_click as click

from infinistore.cli.options import SIZE, json_option, read_given_token, token_file_option
from infinistore.cli.output import counted, note, print_json, print_line, print_table
from infinistore.errors import ConfigError
from infinistore.sizes import describe_size, format_size

if TYPE_CHECKING:
    from infinistore.access.tenants import Tenant, Tenants

Function = TypeVar("Function", bound=Callable[..., Any])
_FLAGS: Final = ("operator", "require_tls")
_ROLES: Final = ("read", "write", "monitor", "admin")
_RELOAD: Final = "a running server reads the file again at SIGHUP or POST /reload"


@click.group("tenant", short_help="Add tenants to a server, and give them tokens.")
def command() -> None:
    """Edit the file that a server was given with --tenants.

    The file has the hashes of tokens only: a token is printed once, when it is made. A
    file is replaced as a whole, with mode 0600, and its comments stay. A running server
    reads it again at SIGHUP or POST /reload.
    """


def _file_option(*, required: bool = True) -> Callable[[Function], Function]:
    return click.option(
        "--tenants", "file", metavar="FILE", required=required, envvar="INFINISTORE_TENANTS", panel="Options",
        type=click.Path(path_type=Path, dir_okay=False),
        help="The tenants file. Default: $INFINISTORE_TENANTS.",
    )  # fmt: skip


_ID = click.argument("tenant", metavar="ID")


@command.command("add", short_help="Add a tenant, and print its first token.")
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(_ROLES),
    help="What it may do; several times. Default: read and write.",
)
@click.option(
    "--operator", is_flag=True, help="Its roles monitor and admin are for the whole server, by the management API."
)
@click.option(
    "--require-tls", is_flag=True, help="Let it in over TLS only, and on the machine of the server by the Unix socket."
)
@click.option("--group", metavar="NAME", help="Its trust group.")
@click.option("--reserved-bytes", metavar="SIZE", type=SIZE, help="What no other tenant takes from it.")
@click.option("--max-bytes", metavar="SIZE", type=SIZE, help="The most that it may take.")
@click.option("--max-keys", metavar="N", type=click.IntRange(1), help="The most keys that it may have.")
@click.option("--disk-max-bytes", metavar="SIZE", type=SIZE, help="What its blocks may take of the disks; else none.")
@click.option("--weight", metavar="N", type=click.IntRange(1), help="Its share of what nobody reserved.")
@click.option(
    "--requests-per-s", metavar="N", type=click.FloatRange(0, min_open=True), help="How many requests a second."
)
@click.option("--bytes-per-s", metavar="SIZE", type=SIZE, help="How many bytes a second.")
@click.option("--max-connections", metavar="N", type=click.IntRange(1), help="The most connections that it may have.")
@click.option(
    "--certificate",
    "certificates",
    multiple=True,
    metavar="NAME",
    help="A name in client certificates that stands for it, such as DNS:worker.example.",
)
@click.option(
    "--uid",
    "uids",
    multiple=True,
    metavar="N",
    type=click.IntRange(0),
    help="A user of this machine that is this tenant on the Unix socket.",
)
@click.option("--no-token", is_flag=True, help="Make no token.")
@_file_option()
@json_option
@_ID
def add(tenant: str, file: Path, as_json: bool, no_token: bool, **given: Any) -> None:
    """Add a tenant, and print its token, which is shown only now.

    The file is created if it does not exist.
    """
    from infinistore.access.tenants import digest_of, make_token
    from infinistore.access.tenants_file import EMPTY_FILE, add_tenant

    try:
        token = make_token(tenant, os.urandom)
    except ValueError as error:
        raise click.UsageError(f"the name of a tenant {error}") from None
    digest = "" if no_token else digest_of(token)
    _edit(file, lambda text: add_tenant(text, str(file), tenant, digest, keys=_keys(given), note=_today()), EMPTY_FILE)
    _show(tenant, "" if no_token else token, as_json)
    note(f"tenant {tenant} is in {file}; {_RELOAD}")


@command.command("rotate", short_help="Give a tenant a new token; the one before stays good.")
@_file_option()
@json_option
@_ID
def rotate(tenant: str, file: Path, as_json: bool) -> None:
    """Print a new token of a tenant, which is shown only now.

    The newest token before stays good, so that clients can change over one by one; an
    older one is revoked. `infinistore tenant revoke --old ID` ends it, too.
    """
    from infinistore.access.tenants import digest_of, make_token
    from infinistore.access.tenants_file import replace_tokens

    token, dropped = "", 0

    def edit(text: str) -> str:
        nonlocal token, dropped
        before = _tenant(_parsed(text, file), tenant, file).digests
        dropped = len(before[:-1])
        token = make_token(tenant, os.urandom)
        return replace_tokens(text, str(file), tenant, [*before[-1:], digest_of(token)], _today())

    _edit(file, edit)
    _show(tenant, token, as_json)
    revoked = ", and an older one is revoked" if dropped else ""
    note(f"the tokens of {tenant} are this and the one before{revoked}; {_RELOAD}")


@command.command("revoke", short_help="Revoke the tokens of a tenant, or remove it.")
@click.option("--old", is_flag=True, help="Revoke all but the newest token.")
@click.option("--remove", is_flag=True, help="Remove the tenant from the file.")
@_file_option()
@_ID
def revoke(tenant: str, file: Path, old: bool, remove: bool) -> None:
    """Revoke all tokens of a tenant. Its sessions end when the server reads the file.

    What it has stored stays, unless it is removed.
    """
    from infinistore.access.tenants_file import remove_tenant, replace_tokens

    if old and remove:
        raise click.UsageError("--old and --remove do not go together")
    count = 0

    def edit(text: str) -> str:
        nonlocal count
        before = _tenant(_parsed(text, file), tenant, file).digests
        kept = before[-1:] if old else ()
        count = len(before) - len(kept)
        return remove_tenant(text, str(file), tenant) if remove else replace_tokens(text, str(file), tenant, kept)

    _edit(file, edit)
    what = f"tenant {tenant} is removed" if remove else f"{counted(count, 'token')} of {tenant} revoked"
    note(f"{what} in {file}; {_RELOAD}")


@command.command("list", short_help="Show the tenants of a file, or of a running server.")
@_file_option(required=False)
@click.option(
    "--manage-url", metavar="URL", panel="Connection",
    help="Show what each tenant has of the server whose management API is here, such as http://127.0.0.1:18080.",
)  # fmt: skip
@click.option(
    "--ca", metavar="FILE", type=click.Path(path_type=Path), panel="Connection",
    help="Authorities to trust instead of the system's, for an https:// URL.",
)  # fmt: skip
@token_file_option
@json_option
def list_tenants(
    file: Path | None, manage_url: str | None, ca: Path | None, token_file: Path | None, as_json: bool
) -> None:
    """Show the tenants of a file, and what each may do. No token is in the file.

    With --manage-url, show what each tenant has of a running server, and has done. The
    token is that of an operator with the role monitor.
    """
    if manage_url is not None:
        _show_live(manage_url, token_file, ca, as_json)
    elif file is not None:
        _show_file(file, as_json)
    else:
        raise click.UsageError("give --tenants FILE, or --manage-url URL for a running server")


_LIVE: Final = {
    "connections": "open",
    "keys": "keys",
    "used_bytes": "used",
    "pinned_bytes": "pinned",
    "reserved_bytes": "reserved",
    "max_bytes": "most",
    "hits": "hits",
    "misses": "misses",
    "evicted": "evicted",
    "refused": "refused",
    "pauses": "pauses",
}
"""The figures of a tenant, and the columns that show them."""


def _show_live(url: str, token_file: Path | None, ca: Path | None, as_json: bool) -> None:
    from infinistore.cli.managing import ask_server

    found = ask_server(url, "/tenants", token=read_given_token(token_file), ca=ca)
    if as_json:
        print_json(found)
        return
    rows = [(one["tenant"], *(_figure(name, one[name]) for name in _LIVE)) for one in found["tenants"]]
    print_table(("tenant", *_LIVE.values()), rows, numbers=tuple(_LIVE.values()))


def _figure(name: str, value: int | None) -> str:
    return _most(value) if name.endswith("_bytes") else str(value)


def _show_file(file: Path, as_json: bool) -> None:
    from infinistore.access.identity import in_words
    from infinistore.secret_files import read_text

    found = _parsed(read_text(file), file).tenants.values()
    if as_json:
        print_json({"tenants": [_described(tenant) for tenant in found]})
        return
    rows = [
        (
            *(tenant.id, in_words(tenant.roles) + (" (operator)" if tenant.operator else ""), tenant.limits.group),
            "yes" if tenant.require_tls else "",
            *(str(len(tenant.digests)), " ".join([*tenant.certificates, *(f"uid:{uid}" for uid in tenant.uids)])),
            *(describe_size(tenant.limits.reserved_bytes), _most(tenant.limits.max_bytes)),
        )
        for tenant in found
    ]
    print_table(
        ("tenant", "roles", "group", "TLS", "tokens", "also", "reserved", "most"),
        rows,
        numbers=("tokens", "reserved", "most"),
    )


def _most(size_bytes: int | None) -> str:
    return "" if size_bytes is None else describe_size(size_bytes)


def _described(tenant: "Tenant") -> dict[str, Any]:
    import attrs

    return {
        "id": tenant.id,
        "roles": sorted(role.value for role in tenant.roles),
        "operator": tenant.operator,
        "require_tls": tenant.require_tls,
        "tokens": len(tenant.digests),
        "certificates": list(tenant.certificates),
        "uids": list(tenant.uids),
        **{key: value for key, value in attrs.asdict(tenant.limits).items() if key != "tenant"},
    }


def _keys(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the lines of an entry."""
    lists = {key: value for key, value in given.items() if isinstance(value, tuple)}
    keys = {key: "[" + ", ".join(map(_quoted, values)) + "]" for key, values in lists.items() if values}
    keys |= {key: "true" for key in _FLAGS if given[key]}
    rest = {key: value for key, value in given.items() if key not in (*lists, *_FLAGS) and value is not None}
    return keys | {key: _written(key, value) for key, value in rest.items()}


def _written(key: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.9f}".rstrip("0").rstrip(".")
    return format_size(value) if "bytes" in key else str(value)


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) and ":" in value else str(value)


def _today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


def _show(tenant: str, token: str, as_json: bool) -> None:
    if as_json:
        print_json({"tenant": tenant, "token": token or None})
    elif token:
        print_line(token)


def _parsed(text: str, file: Path) -> "Tenants":
    from infinistore.access.tenants_file import parse_tenants

    return parse_tenants(text, str(file))


def _tenant(tenants: "Tenants", name: str, file: Path) -> "Tenant":
    found = tenants.tenants.get(name)
    if found is None:
        raise ConfigError(f"{file}: there is no tenant {name}; `infinistore tenant list` shows those that are")
    return found


def _edit(file: Path, edit: Callable[[str], str], empty: str | None = None) -> None:
    from infinistore.secret_files import locked, read_text, replace_text

    with locked(file):
        text = empty if empty is not None and not file.exists() else read_text(file)
        replace_text(file, edit(text))
