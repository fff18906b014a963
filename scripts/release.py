"""Checks that a tag can be released, and prints its part of the changelog.

    python scripts/release.py v1.2.3

The tag must be `v` and the version of the package, CHANGELOG.md must have a section for
it, and no entry may be left in changes/: `towncrier build` has been run.
"""

import re
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]


def notes(tag: str, project: Path = PROJECT) -> str:
    """Return what the changelog says about this tag.

    Raises:
        SystemExit: it cannot be released; the message says what to do.
    """
    version = _version(project)
    if tag != f"v{version}":
        sys.exit(
            f"the tag is {tag}, but the package says {version}: set __version__ in infinistore/version.py, or the tag"
        )
    left = sorted(path.name for path in (project / "changes").iterdir() if path.name != "README.md")
    if left:
        sys.exit(f"changes/ still has {', '.join(left[:3])}: run `towncrier build --version {version}`")
    changelog = (project / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(
        rf"^## .*?\b{re.escape(version)}\b[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
    )
    if section is None:
        sys.exit(f"CHANGELOG.md has no section for {version}: run `towncrier build --version {version}`")
    return section.group(1).strip() + "\n"


def _version(project: Path) -> str:
    found = re.search(r'^__version__ = "(.*)"$', (project / "infinistore" / "version.py").read_text(), re.MULTILINE)
    if found is None:
        sys.exit("infinistore/version.py has no __version__")
    return found.group(1)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.stdout.write(notes(sys.argv[1]))
