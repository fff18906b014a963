"""`infinistore completion`: shell completion of commands and flags."""

import rich_click as click
from click.shell_completion import get_completion_class

from infinistore.cli.output import print_line

__all__ = ["completion"]


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
