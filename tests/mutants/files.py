"""Which files are mutated, by which tests their mutants are to be killed, and which
mutants are known to survive.

`files.toml` says the first two, in one place. A mutant has a name that a change
elsewhere leaves alone: its function, the lines that it replaces, and by what.
"""

import difflib
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent

EQUIVALENT = "equivalent: "
"""So begins the reason of a mutant that no test can tell from the product."""
LEFT = "left: "
"""So begins the reason of one that a test could tell, but that is not worth it."""


_STRICT = re.compile(r",\s*strict=True\)")


class Mutant(NamedTuple):
    """One change of one function."""

    function: str
    was: str
    now: str
    nth: int
    """1, or which one it is of several that read the same."""

    @property
    def only_asserts_less(self) -> bool:
        """Whether it takes the `strict=True` from a `zip`: an assertion that holds, so
        no test can tell. Such a mutant needs no entry."""
        lax = (_STRICT.sub(by, self.was) for by in (", )", ", strict=None)", ", strict=False)"))
        return self.now != self.was and self.now in lax

    def entry(self) -> str:
        """The mutant as an entry of a list of survivors, whose reason is missing."""
        nth = f"nth = {self.nth}\n" if self.nth > 1 else ""
        quoted = "".join(f"{name} = {_quoted(getattr(self, name))}\n" for name in ("function", "was", "now"))
        return f'[[survivor]]\n{quoted}{nth}reason = ""\n'


def mutated_files() -> dict[str, list[str]]:
    """The files that are mutated, each with the tests that are to kill its mutants."""
    tests: dict[str, list[str]] = tomllib.loads((HERE / "files.toml").read_text())
    return tests


def list_of_survivors(file: str) -> Path:
    """Where the survivors of a file are listed; there may be none."""
    return HERE / "survivors" / file.removeprefix("infinistore/").replace("/", ".").replace(".py", ".toml")


def known_survivors(file: str) -> dict[Mutant, str]:
    """The listed survivors of a file, each with its reason."""
    path = list_of_survivors(file)
    entries: list[dict[str, Any]] = tomllib.loads(path.read_text())["survivor"] if path.exists() else []
    known = {Mutant(one["function"], one["was"], one["now"], one.get("nth", 1)): one["reason"] for one in entries}
    assert len(known) == len(entries), f"{path} lists a mutant twice"
    return known


def mutants_in(mutated: str) -> dict[str, Mutant]:
    """The mutants in a file that mutmut wrote, by its names for them."""
    functions = {match[2]: match[0] for match in re.finditer(_FUNCTION, mutated, flags=re.MULTILINE)}
    seen: Counter[tuple[str, str, str]] = Counter()
    mutants = {}
    for name, text in functions.items():
        base, _, number = name.rpartition("_")
        if number != "orig":
            function = base.removesuffix("__mutmut").removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
            called = function.rpartition(".")[2]
            was, now = _difference(
                functions[f"{base}_orig"].replace(f"{base}_orig", called, 1), text.replace(name, called, 1)
            )
            seen[function, was, now] += 1
            mutants[name] = Mutant(function, was, now, seen[function, was, now])
    return mutants


# From its `def` to the first line that is not deeper, except the end of its parameters.
_FUNCTION = r"^( *)(?:async )?def (x[_ǁ]\w*__mutmut_(?:orig|\d+))\(.*\n(?:(?:\1 +\S.*|\1\).*)?\n)*"


def _difference(original: str, mutant: str) -> tuple[str, str]:
    lines = list(difflib.ndiff(original.splitlines(), mutant.splitlines()))
    return _joined(lines, "- "), _joined(lines, "+ ")


def _joined(lines: Iterable[str], mark: str) -> str:
    return " ".join(line[2:].strip() for line in lines if line.startswith(mark) and line[2:].strip())


def _quoted(text: str) -> str:
    if "'" not in text:
        return f"'{text}'"
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
