"""Asks before something is deleted for good."""

import sys

import rich_click as click

from infinistore.cli.failures import NegativeAnswer

__all__ = ["demand_yes"]


def demand_yes(question: str, *, yes: bool, warning: str) -> None:
    """Return if the user means it: by the flag `--yes`, or by an answer at a terminal.

    Raises:
        NegativeAnswer: the answer is no.
        UsageError: there is nobody to ask; `warning` says what this would do.
    """
    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError(f"{warning}; add --yes to say that you mean it")
    if not click.confirm(question, err=True):
        raise NegativeAnswer("nothing was done")
