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
@click.argument("topic", metavar="[COMMAND|exit-codes|settings]", default="")
@click.pass_context
def command(context: click.Context, topic: str) -> None:
    """Show help for a command, the exit codes, or all server settings as Markdown."""
    from infinistore.cli.root import COMMANDS, PROGRAM, root

    if topic == _EXIT_CODES:
        for code, meaning in EXIT_CODES.items():
            print_line(f"{code:>4}  {meaning}")
        return
    if topic == _SETTINGS:
        print_line(markdown_table(server_settings()))
        return
    arguments = [topic, "--help"] if topic else ["--help"]
    if topic and topic not in COMMANDS:
        topics = [*COMMANDS, _EXIT_CODES, _SETTINGS]
        raise click.UsageError(f"there is no help on {topic!r}{near(topic, topics)}", context)
    with root.make_context(PROGRAM, arguments) as again:
        root.invoke(again)
