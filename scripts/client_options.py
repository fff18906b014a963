"""Generate what derives from the options of `open_store`.

That is: the keyword arguments for type checkers, with the docstring that explains them,
and tables on a page. The options are described in `infinistore/client/options.py`.
"""

import ast
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from marks import between_marks

if TYPE_CHECKING:
    from infinistore.settings import Setting

__all__ = ["client_options"]

OPTIONS = "infinistore/client/options.py"
KEYWORDS = "infinistore/client/store_options.py"
PAGE = "docs/opening-a-store.md"
WIDTH = 88
INDENT = " " * 8


def client_options(project: Path) -> dict[str, str]:
    """Return the files with their generated parts, by path from the top folder."""
    from infinistore.client.options import option_settings

    arguments = docstring_arguments(option_settings())
    return {
        KEYWORDS: keywords((project / OPTIONS).read_text(), arguments),
        PAGE: with_tables((project / PAGE).read_text()),
    }


def keywords(source: str, arguments: str) -> str:
    """Return the module with the keyword arguments, from the source of `Options`, and
    with this section in their docstring.
    """
    (options,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Options")
    fields = [
        f"    {ast.unparse(node.target)}: {ast.unparse(node.annotation).replace(chr(39), chr(34))}"
        for node in options.body
        if isinstance(node, ast.AnnAssign)
    ]
    return "\n".join(
        [
            "# Generated from options.py by scripts/generate.py: change that one instead.",
            '"""The keyword arguments of every `open_store`, for type checkers."""',
            "",
            "from collections.abc import Sequence",
            "from pathlib import Path",
            "from typing import TYPE_CHECKING, Literal, TypedDict",
            "",
            "if TYPE_CHECKING:",
            "    from ssl import SSLContext",
            "",
            '__all__ = ["StoreOptions"]',
            "",
            "",
            "class StoreOptions(TypedDict, total=False):",
            '    """The keyword arguments of every `open_store`, and what else it takes.',
            "",
            arguments,
            '    """',
            "",
            *fields,
            "",
        ]
    )


def docstring_arguments(settings: Sequence["Setting"]) -> str:
    """Return what the keys are for; every `open_store` has it as its section `Args`."""
    from infinistore.client.options import SCHEMES

    lines = [" " * 4 + "Attributes:"]
    url = (
        "Where the server is, and over which transport to reach it. Options may follow, as in `?deadline_s=5`; "
        "arguments take precedence. Without a URL, the store is embedded. The URLs are:"
    )
    lines += [*wrapped(f"url: {url}", INDENT), ""]  # without it, Markdown would see no list
    for scheme in SCHEMES.values():
        lines += wrapped(f"* `{scheme.form}`: {scheme.meaning}", INDENT + " " * 4, hanging=2)
    for heading, group in groupby(settings, key=lambda setting: setting.group):
        for setting in group:
            scope = "" if heading == settings[0].group else f" {heading} only."
            lines += wrapped(f"{setting.key}: {setting.help}.{scope} Default: {setting.default_text}.", INDENT)
    environment = (
        "What the store takes from its process, for simulations: the network, chance, shared memory. It is an "
        "`Environment` of `infinistore.client.extension`. With a server only. Default: sockets, and a "
        "generator of random numbers."
    )
    lines += wrapped(f"environment: {environment}", INDENT)
    return "\n".join(lines)


def wrapped(text: str, indent: str, hanging: int = 4) -> list[str]:
    """Return a paragraph as lines; all but the first are indented further."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + " " * hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def with_tables(page: str) -> str:
    """Return the page with the tables of URLs and options renewed.

    Raises:
        ValueError: a mark where a table begins or ends is missing.
    """
    for name, table in (("urls", table_of_urls()), ("options", tables_of_options())):
        page = between_marks(page, name, table, PAGE)
    return page


def table_of_urls() -> str:
    """Return the table of URLs in Markdown."""
    from infinistore.client.options import SCHEMES

    rows = [f"| `{scheme.form}` | {scheme.meaning} |" for scheme in SCHEMES.values()]
    return "\n".join(["| URL | transport |", "|---|---|", *rows])


def tables_of_options() -> str:
    """Return the tables of options in Markdown, one for each scope."""
    from infinistore.client.options import EMBEDDED, option_settings, url_settings

    in_urls = {setting.key for setting in url_settings()}
    arguments = {setting.key for setting in option_settings()}
    settings = [*option_settings(), *(setting for setting in url_settings() if setting.key not in arguments)]
    lines: list[str] = []
    for heading in dict.fromkeys(setting.group for setting in settings):
        lines += [
            "",
            f"### {heading}",
            "",
            "| Option | Default | What it does |",
            "|---|---|---|",
        ]
        for setting in settings:
            if setting.group == heading:
                only = "" if setting.key in in_urls or heading == EMBEDDED else ". Only as an argument"
                lines.append(f"| `{setting.key}` | {setting.default_text} | {setting.help}{only} |")
    return "\n".join(lines)
