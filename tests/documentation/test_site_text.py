"""What the site shows otherwise than the repository.

tests/site looks at the built pages.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.documentation.blocks import PROJECT

PAGES = [*sorted((PROJECT / "docs").rglob("*.md")), *(PROJECT / name for name in ("CONTRIBUTING.md", "SECURITY.md"))]


@pytest.fixture
def site_text(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(PROJECT / "scripts")
    return import_module("site_text")


def test_a_link_with_the_name_of_a_file_shows_the_title_of_the_page(site_text: Any) -> None:
    titles = {"../cluster.md": "Clusters"}.get
    shown = site_text.with_titles("[cluster.md](../cluster.md#urls), [docs/cluster.md](../cluster.md)", titles)
    assert shown == "[Clusters](../cluster.md#urls), [Clusters](../cluster.md)"
    for other in ("[nodes](../cluster.md)", "[disk.md](../cluster.md)", "[gone.md](gone.md)", "`[cluster.md]`"):
        assert site_text.with_titles(other, titles) == other
    assert site_text.title("---\nhide: toc\n---\n# A title \n\n# Another\n") == "A title"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_has_a_link_or_a_cell_that_the_site_shows_raw(site_text: Any, page: Path) -> None:
    def title_of(path: str) -> str | None:
        found: str | None = site_text.title((page.parent / path).read_text())
        return found

    shown = site_text.with_pipes(site_text.with_titles(page.read_text(), title_of))
    assert re.findall(r"\[[^\]\n]*\.md`?\]\([^)\s]*\.md[)#]", shown) == []
    rows = [line for line in shown.splitlines() if line.startswith("|")]
    assert [code for row in rows for code in re.findall(r"`[^`]+`", row) if r"\|" in code] == []


def test_an_escaped_bar_in_a_table_is_a_bar_in_code_and_stays_outside(site_text: Any) -> None:
    assert site_text.with_pipes(r"| `a\|b` | c\|d | ``e\|`f`` |") == r"| `a|b` | c\|d | ``e|`f`` |"
    assert site_text.with_pipes(r"`grep 'a\|b'`") == r"`grep 'a\|b'`"


def test_flags_stay_whole_and_long_names_break_after_a_mark(site_text: Any) -> None:
    html = site_text.with_whole_names(
        "<p>With --token-file, <code>serve --disk</code> or <code>infinistore.client.AsyncStore</code></p>"
        "<pre><code>serve --disk</code></pre><code>put_many</code>"
    )
    assert html == (
        '<p>With <span class="whole">--token-file</span>, <code>serve <span class="whole">--disk</span></code> or '
        "<code>infinistore.<wbr>client.<wbr>AsyncStore</code></p>"
        "<pre><code>serve --disk</code></pre><code>put_many</code>"
    )


def table(*rows: list[str]) -> str:
    head, *body = rows
    lines = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in body]
    return f"<table><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>{''.join(lines)}</table>"


def test_only_a_table_too_wide_for_a_phone_has_labels_in_its_cells(site_text: Any) -> None:
    narrow = table(["key", "<code>size</code>"], ["a", "1"], ["b", "2"])
    assert site_text.with_labels(narrow) == narrow
    for wide in (["x" * 20, "y" * 20, "z"], ["a", "b", "a sentence of so many words, that it would be a tower"]):
        html = site_text.with_labels(table(["flag", "<code>key</code>", 'a "<b>"'], wide))
        assert re.findall(r'data-label="(.*?)"', html) == ["flag", "key", "a &quot;&quot;"]
        assert re.findall(r"<td.*?>(.*?)</td>", html) == wide
        assert html.startswith("<table data-stacked")


class _Settings(yaml.SafeLoader):
    """Takes what has a tag of Python's for nothing."""


_Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--disk", ["disk"]),
        ("[--disk=PATH", ["disk", "PATH"]),
        ("store.put_many(", ["store", "put_many"]),
        ("tcp://HOST:PORT", ["tcp", "HOST", "PORT"]),
        ("version 1.0", ["version", "1.0"]),
    ],
)
def test_the_search_splits_flags_and_dotted_names(text: str, words: list[str]) -> None:
    settings = yaml.load((PROJECT / "mkdocs.yml").read_text(), _Settings)
    (search,) = (plugin["search"] for plugin in settings["plugins"] if isinstance(plugin, dict) and "search" in plugin)
    assert [word for word in re.split(search["separator"], text) if word] == words
