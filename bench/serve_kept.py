"""What ways of `serve_bench` have measured, kept in a file as each of them ends, so that
a run that was ended measures only what is missing.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

import attrs
import cattrs

from programs import ProgramError
from serve_ways import Outcome

__all__ = ["Kept"]


@attrs.frozen
class _Contents:
    settings: dict[str, str]
    outcomes: dict[str, Outcome]


class Kept:
    """The outcomes in a file, all measured with these settings; without a file, nothing
    is kept.

    Raises:
        ProgramError: the file cannot be read, or was made with other settings.
    """

    def __init__(self, file: Path | None, settings: Mapping[str, str]) -> None:
        self._file = file
        self._settings = dict(settings)
        self.outcomes: dict[str, Outcome] = {}
        """By the names of their ways."""
        if file is None or not file.exists():
            return
        try:
            found = cattrs.structure(json.loads(file.read_text()), _Contents)
        except Exception as error:
            raise ProgramError(f"--resume {file}: not a file of this program; name another one") from error
        if found.settings != self._settings:
            before = shlex.join(f"--{name}={value}" for name, value in found.settings.items())
            raise ProgramError(f"--resume {file}: was measured with {before}; give the same, or name another file")
        self.outcomes = found.outcomes

    def add(self, way: str, outcome: Outcome) -> None:
        """Keep what a way has measured, unless it has to be measured again."""
        if self._file is None or outcome.failed or not all(row.same for row in outcome.rows):
            return
        self.outcomes[way] = outcome
        contents = json.dumps(cattrs.unstructure(_Contents(self._settings, self.outcomes)), indent=2)
        fresh = self._file.with_name(f"{self._file.name}.new")
        fresh.write_text(contents)
        fresh.replace(self._file)
