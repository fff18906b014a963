"""Hooks of MkDocs: bring into the site what its pages link to outside of docs/, draw its
diagrams, and have its pictures follow the theme.

A page of the repository, such as CONTRIBUTING.md, becomes a page of the site; any other
file becomes a file of the site; a folder becomes a page that lists its files. Links are
changed to match, so that a link works in the repository and on the site.

A block of Mermaid becomes two pictures, for light and for dark pages. The theme would
load Mermaid itself from another host when a page is read. A `<picture>`, which follows
the preference of the system, becomes the same, which follows the switch of the page.

site_text.py has what is done to text alone: titles in links, tables, names in code.
"""

import hashlib
import posixpath
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import merman
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from site_text import title, with_labels, with_pipes, with_titles, with_whole_names

PROJECT = Path(__file__).resolve().parents[1]
PAGES = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
HOME = "index.md"
"""What the README is on the site."""
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)"\s*srcset="(?P<dark>[^"]+)">'
    r'\s*<img alt="(?P<alt>[^"]*)"\s*src="(?P<light>[^"]+)">\s*</picture>'
)
THEMES = {"light": "neutral", "dark": "dark"}
"""The theme of Mermaid for each kind of page."""
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put pages that the navigation does not name at its end."""
    assert config.nav is not None
    named = set(_pages_of(config.nav))
    pages = [path.relative_to(PROJECT / "docs").as_posix() for path in sorted((PROJECT / "docs").rglob("*.md"))]
    if more := [page for page in pages if page not in named]:
        config.nav.append({"More": more})
    return config


def _pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for one in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages_of(one)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository, and what they and others link to."""
    for name in PAGES:
        files.append(File.generated(config, f"project/{name}", content=(PROJECT / name).read_text(encoding="utf-8")))
    for file in list(files.documentation_pages()):
        for _, path, _ in LINK.findall(FENCED.sub("", file.content_string)):
            target = _in_repository(file.src_uri, path)
            if target is None or target.startswith("docs/") or target in (*PAGES, "README.md"):
                continue
            uri = _on_site(target)
            if files.get_file_from_path(uri) is None:
                source = PROJECT / target
                content = _listing(source) if source.is_dir() else source.read_text(encoding="utf-8")
                files.append(File.generated(config, uri, content=content))
        for diagram in MERMAID.findall(file.content_string):
            for pages in THEMES:
                files.append(File.generated(config, _picture(diagram, pages), content=_draw(diagram, pages)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead the links to the pages and the pictures of the site."""
    folder = posixpath.dirname(page.file.src_uri) or "."
    markdown = MERMAID.sub(lambda found: _pictures(found[1], folder), markdown)
    markdown = _by_theme(markdown)
    if re.search(r"^<picture>", markdown, re.MULTILINE):
        raise ValueError(f"{page.file.src_uri}: a <picture> is written in another way than the others")
    code = FENCED.findall(markdown)
    prose = [_prose(text, page.file.src_uri) for text in FENCED.split(markdown)]
    return "".join(text for pair in zip(prose, [*code, ""], strict=True) for text in pair)


def on_page_content(html: str, **_: Any) -> str:
    """Let names break where a reader would, and tables fit on a phone."""
    return with_labels(with_whole_names(html))


def _prose(text: str, uri: str) -> str:
    """The Markdown of a page between its code blocks, as the site has it."""
    if not uri.startswith("source/"):
        text = with_titles(text, lambda path: _title(_in_repository(uri, path)))
    return LINK.sub(lambda found: _link(found, uri), with_pipes(text))


@cache
def _title(target: str | None) -> str | None:
    return title((PROJECT / target).read_text(encoding="utf-8")) if target else None


def _picture(diagram: str, pages: str) -> str:
    """What the picture of a diagram is called on the site."""
    return f"diagrams/{hashlib.sha256(diagram.encode()).hexdigest()[:16]}-{pages}.svg"


def _pictures(diagram: str, folder: str) -> str:
    """The Markdown that shows a diagram on a page in a folder."""
    return "\n".join(
        f"![Diagram]({posixpath.relpath(_picture(diagram, pages), folder)}#only-{pages})" for pages in THEMES
    )


def _by_theme(markdown: str) -> str:
    """The Markdown with each `<picture>` as one picture for each kind of page."""
    return PICTURE.sub(
        lambda found: "\n".join(f"![{found['alt']}]({found[pages]}#only-{pages})" for pages in THEMES), markdown
    )


def _draw(diagram: str, pages: str) -> str:
    source = f'%%{{init: {{"theme": "{THEMES[pages]}"}}}}%%\n{diagram}'
    return str(merman.Merman().render_svg(source, '{"svg": {"pipeline": "readable"}}'))


def _in_repository(uri: str, path: str) -> str | None:
    """Where a link of a page leads, relative to the repository; None if nowhere."""
    folder = "" if uri.startswith("project/") else posixpath.join("docs", posixpath.dirname(uri))
    target = posixpath.normpath(posixpath.join(folder, path))
    return target if (PROJECT / target).exists() else None


def _on_site(target: str) -> str:
    """Where something of the repository is on the site."""
    if target == "README.md":
        return HOME
    if target in PAGES:
        return f"project/{target}"
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"source/{target}.md" if (PROJECT / target).is_dir() else f"source/{target}"


def _link(found: "re.Match[str]", uri: str) -> str:
    before, path, after = found.groups()
    if uri.startswith("source/"):
        return found[0]
    target = _in_repository(uri, path)
    if target is None:
        return found[0]
    site = _on_site(target)
    if site == HOME and after.startswith("#"):  # a heading of the README
        after = ")"
    return f"{before}{posixpath.relpath(site, posixpath.dirname(uri) or '.')}{after}"


def _listing(folder: Path) -> str:
    """A page with the files of a folder."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and file.suffix != ".pyc"]
    parts = [f"## {file.name}\n\n````{_language(file)}\n{file.read_text().rstrip()}\n````\n" for file in files]
    return "\n".join([f"# {folder.relative_to(PROJECT)}\n", *parts])


def _language(file: Path) -> str:
    return {".py": "python", ".sh": "sh", ".json": "json", ".yaml": "yaml"}.get(file.suffix, "text")
