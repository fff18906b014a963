"""`infinistore help`: help for a command, the exit codes, and the settings."""

import rich_click as click

from infinistore.cli.failures import EXIT_CODES
from infinistore.cli.output import print_line
from infinistore.config import server_settings
from infinistore.settings import markdown_table, near

__all__ = ["command"]

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
