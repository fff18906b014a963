"""`infinistore help`: help for a command, the exit codes, and the settings.
`infinistore completion`: shell completion of commands and flags.
"""

import rich_click as click
from click.shell_completion import get_completion_class

from infinistore.cli.failures import EXIT_CODES
from infinistore.cli.output import print_line
from infinistore.config import server_settings
from infinistore.settings import markdown_table, near


@click.command("completion", short_help="Print a shell completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a completion script for SHELL.

    \b
    bash    eval "$(infinistore completion bash)"      in ~/.bashrc
    zsh     eval "$(infinistore completion zsh)"       in ~/.zshrc
    fish    infinistore completion fish | source       in ~/.config/fish/config.fish
    """
    from infinistore.cli.root import COMPLETION_VARIABLE, PROGRAM, root

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"there is no completion for {shell}")
    print_line(kind(root, {}, PROGRAM, COMPLETION_VARIABLE).source())


_EXIT_CODES = "exit-codes"
_SETTINGS = "settings"


@click.command("help", short_help="Show help for a command, the exit codes, or the settings.")
@click.argument("topic", metavar="[COMMAND...|exit-codes|settings]", nargs=-1)
@click.pass_context
def command(context: click.Context, topic: tuple[str, ...]) -> None:
    """Show help for a command, the exit codes, or all server settings as Markdown."""
    from infinistore.cli.root import COMMANDS, PROGRAM, root

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
