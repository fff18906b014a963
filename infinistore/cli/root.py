"""The command `infinistore`: finds the subcommand, and imports only its module.

A subcommand is a module of this package with a click command called `command`, and a
line in `COMMANDS`. Without a subcommand, `infinistore` is the server:
`infinistore --service-port 9` means `infinistore serve --service-port 9`.
"""

import os
from importlib import import_module
from typing import Final

import rich_click as click
from click.shell_completion import CompletionItem, shell_complete

from infinistore.settings import near
from infinistore.version import __version__

__all__ = ["COMMANDS", "COMPLETION_VARIABLE", "PROGRAM", "complete", "root"]

PROGRAM: Final = "infinistore"
COMPLETION_VARIABLE: Final = "_INFINISTORE_COMPLETE"

# name: (heading, module). The order is that of the help.
COMMANDS: Final = {
    "serve": ("Server", "infinistore.cli.serve"),
    "monitor": ("Server", "infinistore.cli.monitor"),
    "doctor": ("Server", "infinistore.cli.doctor"),
    "stat": ("Server", "infinistore.cli.stat"),
    "selftest": ("Server", "infinistore.cli.selftest"),
    "evict": ("Server", "infinistore.cli.evict"),
    "purge": ("Server", "infinistore.cli.purge"),
    "bench": ("Server", "infinistore.cli.bench"),
    "disk": ("Server", "infinistore.cli.disk"),
    "tenant": ("Server", "infinistore.cli.tenant"),
    "cluster": ("Server", "infinistore.cli.cluster"),
    "put": ("Keys", "infinistore.cli.put"),
    "get": ("Keys", "infinistore.cli.get"),
    "exists": ("Keys", "infinistore.cli.exists"),
    "ls": ("Keys", "infinistore.cli.ls"),
    "rm": ("Keys", "infinistore.cli.rm"),
    "pin": ("Keys", "infinistore.cli.pin"),
    "unpin": ("Keys", "infinistore.cli.unpin"),
    "demo": ("Help", "infinistore.cli.demo"),
    "completion": ("Help", "infinistore.cli.completion"),
    "help": ("Help", "infinistore.cli.help"),
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
            args = ["serve", *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        heading, module = COMMANDS[cmd_name]
        command: click.RichCommand = import_module(module).command
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


def complete() -> bool:
    """Answer a shell's request for completions. Returns whether there was one."""
    instruction = os.environ.get(COMPLETION_VARIABLE)
    if not instruction:
        return False
    shell_complete(root, {}, PROGRAM, COMPLETION_VARIABLE, instruction)
    return True
