"""The blocks of code in the README and in docs/."""

import re
from pathlib import Path

import attrs

__all__ = ["PAGES", "PROJECT", "TUTORIALS", "Block", "blocks", "of_pages", "programs"]

PROJECT = Path(__file__).resolve().parents[2]
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]
TUTORIALS = ["docs/tutorials/five-minutes.md", "docs/tutorials/moving.md", "docs/tutorials/two-hosts.md"]
"""Their programs run between their commands, and what they show is printed."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@attrs.frozen
class Block:
    """A block of code on a page."""

    page: Path
    language: str
    code: str
    line: int

    @property
    def page_name(self) -> str:
        """The page, from the top of the repository."""
        return str(self.page.relative_to(PROJECT))

    @property
    def name(self) -> str:
        return f"{self.page_name}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """All blocks, or those in these languages."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found += [
            Block(page, match[1], match[2], text[: match.start()].count("\n") + 1) for match in FENCE.finditer(text)
        ]
    return [block for block in found if not languages or block.language in languages]


def of_pages(pages: list[str]) -> list[Block]:
    """The blocks of these pages, named from the top of the repository."""
    return [block for block in blocks() if block.page_name in pages]


def programs(page: str) -> list[Block]:
    """The programs of a page."""
    return [block for block in of_pages([page]) if block.language == "python"]
