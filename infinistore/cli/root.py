"""The command `infinistore`: finds the subcommand, and imports only its module. Help on
all of them (`infinistore help`), and their completion (`infinistore completion`).

A subcommand is a click command in a module of this package, and a line in `COMMANDS`
that names both. Without a subcommand, `infinistore` is the server:
`infinistore --service-port 9` means `infinistore serve --service-port 9`.
"""

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Final

import rich_click as click
from click.exceptions import Exit
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

from infinistore.cli.failures import EXIT_CODES, OK, Session, answered
from infinistore.cli.output import note, print_line
from infinistore.config import misspelt_variables, server_settings
from infinistore.settings import markdown_table, near
from infinistore.version import __version__

PROGRAM: Final = "infinistore"
COMPLETION_VARIABLE: Final = "_INFINISTORE_COMPLETE"

# name: (heading, module:function). The order is that of the help.
COMMANDS: Final = {
    "serve": ("Server", "infinistore.cli.serve:command"),
    "monitor": ("Server", "infinistore.cli.monitor:command"),
    "doctor": ("Server", "infinistore.cli.doctor:command"),
    "stat": ("Server", "infinistore.cli.store_commands:stat"),
    "selftest": ("Server", "infinistore.cli.selftest:command"),
    "evict": ("Server", "infinistore.cli.store_commands:evict"),
    "purge": ("Server", "infinistore.cli.store_commands:purge"),
    "bench": ("Server", "infinistore.cli.bench:command"),
    "disk": ("Server", "infinistore.cli.disk:command"),
    "tenant": ("Server", "infinistore.cli.tenant:command"),
    "cluster": ("Server", "infinistore.cli.cluster:command"),
    "route": ("Server", "infinistore.cli.route:command"),
    "simulate": ("Server", "infinistore.cli.simulate:command"),
    "put": ("Keys", "infinistore.cli.store_commands:put"),
    "get": ("Keys", "infinistore.cli.store_commands:get"),
    "exists": ("Keys", "infinistore.cli.store_commands:exists"),
    "ls": ("Keys", "infinistore.cli.store_commands:ls"),
    "rm": ("Keys", "infinistore.cli.store_commands:rm"),
    "pin": ("Keys", "infinistore.cli.store_commands:pin"),
    "unpin": ("Keys", "infinistore.cli.store_commands:unpin"),
    "demo": ("Help", "infinistore.cli.demo:command"),
    "completion": ("Help", "infinistore.cli.root:show_completion"),
    "help": ("Help", "infinistore.cli.root:show_help"),
}

_OWN_FLAGS: Final = ("--help", "-h", "--version")

_HELP: Final = """A KV-cache store for large language model inference.

Without a command this is the server, and takes the flags of `infinistore serve`.

A first session:

\b
    infinistore --prealloc-size 512MiB &
    echo hello | infinistore put greeting --wait 10
    infinistore get greeting
    infinistore stat
    kill $!
"""

_EPILOG: Final = "The flags of a command: infinistore COMMAND --help. Exit codes: infinistore help exit-codes."


class _Root(click.RichGroup):
    """A group that imports subcommands on demand; `serve` is the default."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        names_a_command = not args or not args[0].startswith("-") or args[0] in _OWN_FLAGS
        if not names_a_command or (not args and not ctx.resilient_parsing):
            if not ctx.resilient_parsing and (command := next((arg for arg in args if arg in COMMANDS), None)):
                self._check_order(ctx, args[0], command)
            args = ["serve", *args]
        return super().parse_args(ctx, args)

    def _check_order(self, ctx: click.Context, flag: str, command: str) -> None:
        """Raise UsageError if a flag that `serve` does not have precedes a command."""
        serve = self.get_command(ctx, "serve")
        name = flag.partition("=")[0]
        if serve is not None and not any(name in parameter.opts for parameter in serve.params):
            raise click.UsageError(f"flags follow the command: infinistore {command} {name}", ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        heading, place = COMMANDS[cmd_name]
        module, _, function = place.partition(":")
        command: click.RichCommand = getattr(import_module(module), function)
        command.name, command.panel = cmd_name, heading
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            raise click.UsageError(f"there is no command {args[0]!r}{near(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = super().shell_complete(ctx, incomplete)
        serve = self.get_command(ctx, "serve")
        if incomplete.startswith("-") and serve is not None:
            with click.Context(serve, parent=ctx, info_name="serve", resilient_parsing=True) as serve_context:
                found += serve.shell_complete(serve_context, incomplete)
        return found


root: Final = _Root(
    name=PROGRAM,
    help=_HELP,
    epilog=_EPILOG,
    invoke_without_command=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
click.version_option(__version__, "--version", prog_name=PROGRAM, message="%(prog)s %(version)s")(root)


@click.command("completion", short_help="Print a shell completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def show_completion(shell: str) -> None:
    """Print a completion script for SHELL.

    \b
    bash    eval "$(infinistore completion bash)"      in ~/.bashrc
    zsh     eval "$(infinistore completion zsh)"       in ~/.zshrc
    fish    infinistore completion fish | source       in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"there is no completion for {shell}")
    print_line(kind(root, {}, PROGRAM, COMPLETION_VARIABLE).source())


_EXIT_CODES = "exit-codes"
_SETTINGS = "settings"


@click.command("help", short_help="Show help for a command, the exit codes, or the settings.")
@click.argument("topic", metavar="[COMMAND...|exit-codes|settings]", nargs=-1)
@click.pass_context
def show_help(context: click.Context, topic: tuple[str, ...]) -> None:
    """Show help for a command, the exit codes, or all server settings as Markdown."""
    if topic == (_EXIT_CODES,):
        for code, meaning in EXIT_CODES.items():
            print_line(f"{code:>4}  {meaning}")
        return
    if topic == (_SETTINGS,):
        print_line(markdown_table(server_settings()))
        return
    found: click.Command = root
    topics = [*COMMANDS, _EXIT_CODES, _SETTINGS]
    for count, name in enumerate(topic, 1):
        deeper = found.get_command(context, name) if isinstance(found, click.Group) else None
        if deeper is None:
            raise click.UsageError(f"there is no help on {' '.join(topic[:count])!r}{near(name, topics)}", context)
        found = deeper
        topics = found.list_commands(context) if isinstance(found, click.Group) else []
    with root.make_context(PROGRAM, [*topic, "--help"]) as again:
        root.invoke(again)


def run(arguments: Sequence[str]) -> int:
    """Run the command named by `arguments`. Returns its exit code and never raises."""
    return answered(arguments, _invoke)


def _invoke(arguments: Sequence[str], session: Session) -> int:
    """Run the command named by `arguments`; return its exit code or raise its error."""
    if _complete():
        return OK
    for warning in misspelt_variables():
        note(warning)
    try:
        with root.make_context(PROGRAM, list(arguments), obj=session) as context:
            root.invoke(context)
    except Exit as stop:  # how click ends --help and --version
        return stop.exit_code
    return OK


def _complete() -> bool:
    """Answer a shell's request for completions. Returns whether there was one."""
    instruction = os.environ.get(COMPLETION_VARIABLE)
    if not instruction:
        return False
    shell_complete(root, {}, PROGRAM, COMPLETION_VARIABLE, instruction)
    return True
