"""`infinistore route`: run a router before several engines until it is stopped."""

import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import rich_click as click

from infinistore.cli.failures import announcing, innermost, session_of
from infinistore.cli.log_format import set_up_logging
from infinistore.cli.options import SIZE
from infinistore.cli.output import note, print_line
from infinistore.errors import ConfigError

if TYPE_CHECKING:
    from infinistore.routing import Address, Role, RouterOptions

_ENGINES, _CLIENTS, _LIMITS = "Engines", "Clients", "Limits"
_FILE: Final = click.Path(path_type=Path)
_STORE_S: Final = 5.0
"""How long the store may take to list engines; for a prompt, it has far less."""
_SPARE_DESCRIPTORS: Final = 256
"""Beside two for each client: for probes, the store and files."""
_POSITIVE: Final = click.FloatRange(min=0, min_open=True)


@click.command("route", short_help="Run a router before several engines that share a store.")
@click.option(
    "--engine", "engines", metavar="URL", multiple=True, panel=_ENGINES, help="An engine; repeat it for more."
)
@click.option(
    "--prefill", "prefills", metavar="URL", multiple=True, panel=_ENGINES,
    help="An engine that only computes prompts, for any engine of --decode. The store is between them.",
)  # fmt: skip
@click.option(
    "--decode", "decodes", metavar="URL", multiple=True, panel=_ENGINES,
    help="An engine that answers what one of --prefill has computed, and short prompts.",
)  # fmt: skip
@click.option(
    "--engines-file", metavar="FILE", type=_FILE, panel=_ENGINES,
    help="A file with a URL in each line, and prefill or decode behind it. It is read again when it changes.",
)  # fmt: skip
@click.option(
    "--announced", is_flag=True, panel=_ENGINES,
    help='Also engines that announce themselves in the store ("announce_url" in their kv_connector_extra_config).',
)  # fmt: skip
@click.option(
    "--store", metavar="URL", envvar="INFINISTORE_URL", show_envvar=True, panel=_ENGINES,
    help="The store that the engines share, to ask what it has of a prompt. Without one, only their own caches count.",
)  # fmt: skip
@click.option(
    "--engine-key-file", metavar="FILE", type=_FILE, panel=_ENGINES,
    help="The API key that the engines want, also from the router itself. Default: what the client shows.",
)  # fmt: skip
@click.option(
    "--policy", metavar="NAME", default="soonest", show_default=True, panel=_ENGINES,
    help="Which engine a request goes to: soonest, least-work, round-robin, or another package's.",
)  # fmt: skip
@click.option(
    "--split-above", metavar="TOKENS", type=click.IntRange(min=0), default=512, show_default=True, panel=_ENGINES,
    help="With --prefill: prompts of which no more than this has to be computed go straight to --decode.",
)  # fmt: skip
@click.option("--host", metavar="HOST", default="127.0.0.1", show_default=True, panel=_CLIENTS, help="Where to listen.")
@click.option(
    "--port", metavar="PORT", type=click.IntRange(0, 65535), default=8000, show_default=True, panel=_CLIENTS,
    help="Where to listen; 0: any.",
)  # fmt: skip
@click.option(
    "--token-file", metavar="FILE", type=_FILE, panel=_CLIENTS, help="The token that clients have to show as API key."
)
@click.option("--tls-cert", metavar="FILE", type=_FILE, panel=_CLIENTS, help="The certificate, for HTTPS.")
@click.option("--tls-key", metavar="FILE", type=_FILE, panel=_CLIENTS, help="Its key, if that is not in the same file.")
@click.option(
    "--max-body-size", metavar="SIZE", type=SIZE, default="64MiB", show_default=True, panel=_LIMITS,
    help="The longest request.",
)  # fmt: skip
@click.option(
    "--max-connections", metavar="COUNT", type=click.IntRange(min=1), default=2048, show_default=True, panel=_LIMITS,
    help="Clients that are connected at a time.",
)  # fmt: skip
@click.option(
    "--first-byte-timeout", metavar="SECONDS", type=_POSITIVE, default=600, show_default=True, panel=_LIMITS,
    help="How long an engine may take to begin an answer, before another one is asked.",
)  # fmt: skip
@click.option(
    "--answer-timeout", metavar="SECONDS", type=_POSITIVE, default=3600, show_default=True, panel=_LIMITS,
    help="How long an answer may take.",
)  # fmt: skip
@click.option(
    "--tokenize-timeout", metavar="SECONDS", type=_POSITIVE, default=0.05, show_default=True, panel=_LIMITS,
    help="How long to wait for a short prompt's tokens and for the store. Then a prompt is judged by its length.",
)  # fmt: skip
@click.option(
    "--drain-timeout", metavar="SECONDS", type=click.FloatRange(min=0), default=30, show_default=True, panel=_LIMITS,
    help="How long requests may take after SIGTERM or Ctrl-C. A second signal ends them.",
)  # fmt: skip
@click.option(
    "--record", metavar="FILE", type=_FILE, panel=_CLIENTS,
    help="Append what is asked to a trace for `infinistore simulate`: times, lengths, and ids of blocks.",
)  # fmt: skip
@click.option(
    "--record-size", metavar="SIZE", type=SIZE, default="1GiB", show_default=True, panel=_LIMITS,
    help="The most that --record writes to its file.",
)  # fmt: skip
@click.option(
    "--log-format", metavar="FORMAT", type=click.Choice(["auto", "text", "json"]), default="auto", show_default=True,
    panel=_LIMITS, help="How the log is written to standard error; auto: text on a terminal, else JSON.",
)  # fmt: skip
@click.option(
    "--log-level", metavar="LEVEL", type=click.Choice(["error", "warning", "info", "debug"]), default="info",
    show_default=True, panel=_LIMITS, help="What is logged; debug also shows a traceback on failure.",
)  # fmt: skip
@click.pass_context
def command(
    context: click.Context,
    *,
    engines: tuple[str, ...],
    prefills: tuple[str, ...],
    decodes: tuple[str, ...],
    engines_file: Path | None,
    announced: bool,
    store: str | None,
    engine_key_file: Path | None,
    policy: str,
    split_above: int,
    host: str,
    port: int,
    token_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    max_body_size: int,
    max_connections: int,
    first_byte_timeout: float,
    answer_timeout: float,
    tokenize_timeout: float,
    drain_timeout: float,
    record: Path | None,
    record_size: int,
    log_format: str,
    log_level: str,
) -> None:
    """Run a router that speaks as OpenAI, before engines that share a store.

    Each prompt goes to the engine that answers first: by what it has to do, by what it
    has of the prompt itself, and by what the store has. It prints one line when it
    listens. On Ctrl-C or SIGTERM, it finishes running requests and stops.

    \b
        infinistore route --store infinistore://127.0.0.1:22345 \\
            --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8002
        curl http://127.0.0.1:8000/v1/models
    """
    import trio

    from infinistore.host import raise_descriptor_limit
    from infinistore.routing import HttpLimits, RouterOptions
    from infinistore.secret_files import read_token

    if announced and store is None:
        raise ConfigError("--announced: engines announce themselves in a store; name it with --store")
    if tls_key is not None and tls_cert is None:
        raise ConfigError("--tls-key needs --tls-cert")
    named = _named(engines=engines, prefills=prefills, decodes=decodes)
    if prefills and not (decodes or engines or engines_file or announced):
        raise ConfigError("--prefill: no engine answers; give --decode URL, too")
    if not named and engines_file is None and not announced:
        raise ConfigError("there is no engine: give --engine URL, --engines-file FILE or --announced")
    room = (raise_descriptor_limit(2 * max_connections + _SPARE_DESCRIPTORS) - _SPARE_DESCRIPTORS) // 2
    if room < max_connections:
        max_connections = max(1, room)
        note(f"this process may open few descriptors (ulimit -n), so that {max_connections} clients can be connected")
    limits = HttpLimits(body_bytes=max_body_size, first_byte_s=first_byte_timeout, answer_s=answer_timeout)
    options = RouterOptions(
        engines=named,
        engines_file=engines_file,
        announced=announced,
        policy=policy,
        token=None if token_file is None else read_token(token_file, setting="--token-file"),
        engine_key=None if engine_key_file is None else read_token(engine_key_file, setting="--engine-key-file"),
        split_above_tokens=split_above,
        tokenize_s=tokenize_timeout,
        drain_s=drain_timeout,
        record=record,
        record_bytes=record_size,
        most_connections=max_connections,
        limits=limits,
    )
    session_of(context).wants_tracebacks = log_level == "debug"
    set_up_logging(log_level, log_format)
    interrupts: list[int] = []
    try:
        trio.run(_run, options, store, (host, port), (tls_cert, tls_key), interrupts)
    except* ConfigError as group:
        raise innermost(group) from None
    if interrupts:
        raise KeyboardInterrupt


def _named(**urls: tuple[str, ...]) -> "dict[str, tuple[Address, Role]]":
    from infinistore.routing import Address

    named: dict[str, tuple[Address, Role]] = {}
    roles: dict[str, Role] = {"engines": "both", "prefills": "prefill", "decodes": "decode"}
    for setting, role in roles.items():
        for url in urls[setting]:
            address = Address.of(url, f"--{setting.removesuffix('s')}")
            if address.url in named:
                raise ConfigError(f"{address.url} is named twice; an engine has one role")
            named[address.url] = (address, role)
    return named


async def _run(
    options: "RouterOptions",
    store_url: str | None,
    where: tuple[str, int],
    tls: tuple[Path | None, Path | None],
    interrupts: list[int],
) -> None:
    import trio

    from infinistore.addresses import is_loopback, with_port
    from infinistore.client import open_store
    from infinistore.routing import Router, listen

    host, port = where
    async with AsyncExitStack() as stack:
        store = None
        if store_url is not None:
            store = await stack.enter_async_context(
                open_store(store_url, lazy=True, name="router", deadline_s=_STORE_S)
            )
        router = Router(options, store)
        listeners, port = listen(host, port, *tls)
        for listener in listeners:
            stack.push_async_callback(listener.aclose)
        scheme = "http" if tls[0] is None else "https"
        if options.token is None and not is_loopback(host):
            note(f"--host {host} without --token-file: whoever reaches the port may use the engines")
        stop, starting = trio.Event(), trio.CancelScope()
        async with trio.open_nursery() as nursery:

            def end() -> None:
                stop.set()
                starting.cancel()

            await nursery.start(_stop_at_signal, end, nursery.cancel_scope.cancel, interrupts)
            with starting:
                await nursery.start(router.run)
            if starting.cancelled_caught:
                nursery.cancel_scope.cancel()
                return
            up = sum(member.is_up for member in router.fleet)
            with announcing():
                print_line(
                    f"routing on {scheme}://{with_port(host, port)} to {len(router.fleet)}"
                    f" engine{'' if len(router.fleet) == 1 else 's'}, {up} up ({options.policy})"
                )
            await router.serve(listeners, stop)
            nursery.cancel_scope.cancel()


async def _stop_at_signal(
    end: Callable[[], None], end_now: Callable[[], None], interrupts: list[int], *, task_status: Any
) -> None:
    """End in good order at a signal, and at once at another one."""
    import trio

    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        number = await anext(signals)
        if number == signal.SIGINT:
            interrupts.append(number)
        end()
        await anext(signals)
        end_now()
