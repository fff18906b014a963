"""`infinistore help`: the help of a command, and the exit codes."""

import rich_click as click

from infinistore.cli.failures import EXIT_CODES
from infinistore.cli.output import print_line
from infinistore.settings import near

__all__ = ["command"]

_EXIT_CODES = "exit-codes"


@click.command("help", short_help="Show help on a command, or the exit codes.")
@click.argument("topic", metavar="[COMMAND|exit-codes]", default="")
@click.pass_context
def command(context: click.Context, topic: str) -> None:
    """Show the help of a command, or what the exit codes mean."""
    from infinistore.cli.root import COMMANDS, PROGRAM, root

    if topic == _EXIT_CODES:
        for code, meaning in EXIT_CODES.items():
            print_line(f"{code:>4}  {meaning}")
        return
    arguments = [topic, "--help"] if topic else ["--help"]
    if topic and topic not in COMMANDS:
        raise click.UsageError(f"there is no help on {topic!r}{near(topic, [*COMMANDS, _EXIT_CODES])}", context)
    with root.make_context(PROGRAM, arguments) as again:
        root.invoke(again)
