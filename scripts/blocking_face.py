"""Generate the blocking half of the client from the asynchronous half, by unasync.

A file is translated as text: names, code and docstrings alike. The rows of a table are
applied in turn: first those of the file, then those for all files. A row of a file must
match, so that no row outlives its purpose.
"""

import re
from pathlib import Path

import attrs

__all__ = ["Translation", "blocking_face"]


@attrs.frozen
class Translation:
    """An asynchronous module, the blocking one made from it, and rows for it alone."""

    source: str
    target: str
    rows: tuple[tuple[str, str], ...] = ()


IN_PARENTHESES = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"
"""Anything, with parentheses in it to a depth of two."""

TRANSLATIONS = (
    Translation(
        "infinistore/integrations/internal/store_calls.py",
        "infinistore/integrations/internal/blocking_store_calls.py",
        ((r"infinistore\.aio import", "infinistore.blocking import"),),
    ),
    Translation(
        "infinistore/tensors/transfers.py",
        "infinistore/tensors/blocking_transfers.py",
        (
            (r"infinistore\.client import", "infinistore.blocking import"),
            (rf"await beside_loop\(batch, lambda: ({IN_PARENTHESES})\)", r"\1"),
        ),
    ),
    Translation(
        "infinistore/client/api/store.py",
        "infinistore/client/api/blocking_store.py",
        (
            (r"_aside\b", ""),
            (r"    Any call may be cancelled\.\n\n", ""),
        ),
    ),
)

EVERYWHERE = (
    # A call in parentheses needs none without `await`.
    (rf"(?<![\w)\]])\(await (self\.\w+\({IN_PARENTHESES}\))\)", r"\1"),
    (r"\bawait ", ""),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bAsync(Store|Opening|Lease|Reservation|Removals)\b", r"Blocking\1"),
    (r"\b__a(enter|exit)__\b", r"__\1__"),
    (r"\baclose\b", "close"),
    (r"\b[Aa]n asynchronous\b", "a blocking"),
    (r"\basynchronous\b", "blocking"),
    (r"\btasks\b", "threads"),
)


def blocking_face(project: Path) -> dict[str, str]:
    """Return the blocking modules, not formatted yet, by their paths."""
    return {each.target: translate(each, (project / each.source).read_text()) for each in TRANSLATIONS}


def translate(translation: Translation, source: str) -> str:
    """Return the blocking module for the source of an asynchronous one.

    Raises:
        ValueError: a row of the translation does not match, or something asynchronous
            is left.
    """
    for pattern, replacement in translation.rows:
        source, count = re.subn(pattern, replacement, source)
        if not count:
            raise ValueError(f"{pattern!r} is nowhere in {translation.source}: take it out of scripts/blocking_face.py")
    for pattern, replacement in EVERYWHERE:
        source = re.sub(pattern, replacement, source)
    left = re.search(r"\b\w*(?i:async|await)\w*\b", source)
    if left:
        raise ValueError(
            f"{left[0]!r} in {translation.source} has no blocking counterpart: add it to scripts/blocking_face.py"
        )
    name = translation.source.rpartition("/")[2]
    return f"# Generated from {name} by scripts/generate.py: change that one instead.\n{source}"
