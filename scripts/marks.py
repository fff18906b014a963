"""What the generators of pages have in common: the part of a page between two marks."""

__all__ = ["between_marks"]


def between_marks(page: str, name: str, text: str, path: str) -> str:
    """Return the page with this text between `<!-- NAME: generated -->` and
    `<!-- end of NAME -->`.

    Raises:
        ValueError: the page at this path lacks a mark.
    """
    before, begin, rest = page.partition(f"<!-- {name}: generated -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if not end:
        raise ValueError(f"{path} lacks the marks `{name}: generated` and `end of {name}`")
    return f"{before}{begin}\n{text.strip()}\n\n{end}{after}"
