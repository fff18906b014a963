"""Generate docs/reference/commands.md: every command with its flags, as click knows
them; and the manual page, which is that page with the settings of a server.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click

__all__ = ["command_reference"]

PAGE = "docs/reference/commands.md"
MAN = "docs/reference/infinistore.1"
WIDTH = 88
SHARED = "Connection"
"""The heading, in the help, of the flags that many commands have."""
BEGINNING = """\
# Every command

<!-- Generated from infinistore/cli by scripts/generate.py. -->

This is what `infinistore COMMAND --help` prints, for looking up.
[The command line](../command-line.md) explains the commands with examples.

## Shared flags

Each command names those that it has of these, as *connection* if it has all but
`--json`. One with another default is in the list of the command. `--help` is
everywhere.
"""


def command_reference(_: Path) -> dict[str, str]:
    """Return the pages, by their paths from the top folder."""
    import click

    from infinistore.cli.root import root

    context = click.Context(root, info_name="infinistore")
    commands = list(commands_of(root, context))
    ping = root.get_command(context, "stat")
    assert ping is not None
    shared = {
        described(option, context): option.opts[0]
        for option in options_of(ping)
        if panel(option) == SHARED or option.name == "as_json"
    }
    connection = [name for name in shared.values() if name != "--json"]
    lines = [BEGINNING, *listed(list(shared)), "", "## Commands"]
    for command, within in commands:
        lines += ["", f"### {within.command_path}", ""]
        if (called := usage(command, within)) != f"{within.command_path} [OPTIONS]":
            lines += [f"`{called}`", ""]
        lines += text_of(command)
        if within.command_path == "infinistore serve":
            lines += ["", "[Its other flags are its settings.](../configuration.md#all-settings)"]
        flags = [described(option, within) for option in options_of(command) if not is_setting(option, within)]
        if own := [one for one in flags if one not in shared]:
            lines += ["", *listed(own)]
        if has := [shared[one] for one in flags if one in shared]:
            also = [f"`{one}`" for one in has if one not in connection or not {*connection} <= {*has}]
            also += ["connection"] if {*connection} <= {*has} else []
            lines += ["", f"Also: {', '.join(also)}."]
    page = "\n".join(lines) + "\n"
    return {PAGE: page, MAN: man_page(page.partition("## Shared flags")[2])}


MAN_BEGINNING = r""".\" Generated from infinistore/cli by scripts/generate.py.
.TH INFINISTORE 1
.SH NAME
infinistore \- a store for the KV cache of LLM inference
.SH SYNOPSIS
.B infinistore
.I COMMAND
.RI [ OPTIONS ]
.SH SHARED FLAGS
"""


def man_page(commands: str) -> str:
    """Return the manual page: this part of the page in Markdown, the settings of a
    server, and the exit codes.
    """
    from infinistore.cli.failures import EXIT_CODES
    from infinistore.config import server_settings

    settings = [
        f"- `{f'{one.flag} {one.kind.metavar}'.rstrip()}`: {in_markdown(one.help)}. Default: {one.default_text}."
        for one in server_settings()
    ]
    codes = [f"- `{code}`: {meaning}" for code, meaning in EXIT_CODES.items()]
    rest = ["## Settings of a server", "", *settings, "", "## Exit status", "", *codes]
    return MAN_BEGINNING + "".join(f"{line}\n" for line in in_roff(f"{commands}\n" + "\n".join(rest)))


def in_roff(page: str) -> Iterator[str]:
    """Yield the lines of a page in Markdown that has headings, paragraphs, lists of
    flags and blocks, for man(1).
    """
    for block in re.split(r"\n\n|\n(?=- )", page.strip()):
        if block.startswith("```"):
            yield from [".nf", *map(escaped, block.splitlines()[1:-1]), ".fi"]
        elif block.startswith("#"):
            marks, _, title = block.partition(" ")
            yield f".SS {escaped(title)}" if marks == "###" else f".SH {escaped(title.upper())}"
        else:
            text = re.sub(r"\[(.*?)\]\(.*?\)|\*(\w+)\*", r"\1\2", " ".join(block.split()))
            flag, colon, meaning = text.removeprefix("- ").partition(": ")
            yield from [".TP", bold(flag), bold(meaning)] if text.startswith("- ") and colon else [".PP", bold(text)]


def bold(text: str) -> str:
    """Return text with its code in bold."""
    parts = escaped(text).split("`")
    parts[1::2] = [rf"\fB{part}\fR" for part in parts[1::2]]
    return "".join(parts)


def escaped(line: str) -> str:
    """Return a line that is text, with no command and no typographic hyphen in it."""
    line = line.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{line}" if line.startswith((".", "'")) else line


def commands_of(group: "click.Group", context: "click.Context") -> Iterator[tuple["click.Command", "click.Context"]]:
    """Yield the commands of a group, and those of groups in it, in the order of the
    help.
    """
    import click

    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        within = click.Context(command, parent=context, info_name=name)
        yield command, within
        if isinstance(command, click.Group):
            yield from commands_of(command, within)


def usage(command: "click.Command", context: "click.Context") -> str:
    """Return how the command is called."""
    return " ".join([context.command_path, *command.collect_usage_pieces(context)])


def text_of(command: "click.Command") -> Iterator[str]:
    """Yield the lines of the text of the help. What it shows line by line is a block."""
    for index, paragraph in enumerate(textwrap.dedent(f"    {command.help or ''}").strip().split("\n\n")):
        if index:
            yield ""
        first, *rest = paragraph.splitlines()
        if first.strip() == "\b":
            yield from ["```text", *rest, "```"]
        else:
            words = in_markdown(" ".join(" ".join([first, *rest]).split()))
            yield from textwrap.wrap(words, WIDTH, break_long_words=False, break_on_hyphens=False)


def options_of(command: "click.Command") -> list["click.Option"]:
    """Return the flags that the help shows."""
    import click

    return [one for one in command.params if isinstance(one, click.Option) and not one.hidden and one.name != "help"]


def panel(option: "click.Option") -> str | None:
    """Return the heading of a flag in the help."""
    return getattr(option, "panel", None)


def is_setting(option: "click.Option", context: "click.Context") -> bool:
    """Whether the flag is a setting of a server, which another page lists."""
    from infinistore.config import server_settings

    return context.command_path == "infinistore serve" and option.name in {one.key for one in server_settings()}


def listed(items: list[str]) -> list[str]:
    """Return a list of flags, wrapped."""
    return [
        line
        for item in items
        for line in textwrap.wrap(
            f"- {item}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    ]


def described(option: "click.Option", context: "click.Context") -> str:
    """Return a flag with its variable, what it does, and its default."""
    help_text, _, default = (option.help or "").partition(" Default: ")
    if not default and not option.is_flag and isinstance(option.default, str | int | float):
        default = str(option.default).removesuffix(".0")
    metavar = "" if option.is_flag else f" {value_of(option, context)}"
    names = ", ".join(f"`{name}{metavar}`" for name in (*option.opts, *option.secondary_opts))
    if option.envvar:
        names += f" (`{option.envvar}`)"
    text = f"{names}: {in_markdown(help_text.rstrip('.'))}."
    return f"{text} Default: {in_markdown(default.rstrip('.'))}." if default else text


def value_of(option: "click.Option", context: "click.Context") -> str:
    """Return what stands for the value of a flag."""
    import click

    if isinstance(option.type, click.Choice) and not option.metavar:
        return "|".join(option.type.choices)
    return option.make_metavar(context)


def in_markdown(text: str) -> str:
    """Return text of the help with flags and variables as code."""
    parts = text.split("`")  # every other one is code
    parts[::2] = [re.sub(r"(?<![\w-])(--[a-z][a-z-]*|\$?INFINISTORE_\w+)", r"`\1`", part) for part in parts[::2]]
    return "`".join(parts)
