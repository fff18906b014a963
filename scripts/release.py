"""What a release says and consists of.

    python scripts/release.py v1.2.3         check a tag, and print its part of the changelog
    python scripts/release.py --set 1.2.3    write the version and today's date where they stand

The tag must be `v` and the version of the package, the Helm chart must be of that
version, and CHANGELOG.md must have a section for it, with a date. `--set` wants a tree
without changes, in a repository that has no such tag. With `--try` before either,
nothing is written, and only the section has to be there. `make release` calls both.
"""

import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
UNRELEASED = "not released yet"
_VERSION = r"\d+\.\d+\.\d+"  # what both pip and Helm understand
PLACES = {
    "infinistore/version.py": r'(?m)^(__version__ = ")(.*)(")$',
    "deploy/helm/infinistore/Chart.yaml": r'(?m)^(version: |appVersion: ")([^"\n]*)("?)$',
}
"""The files where the version stands: before it, itself, behind it."""


def notes(tag: str, project: Path = PROJECT, *, is_try: bool = False) -> str:
    """Return what the changelog says about this tag.

    Raises:
        SystemExit: it cannot be released; the message says what to do.
    """
    version = tag.removeprefix("v")
    for place, pattern in PLACES.items():
        for _, found, _ in re.findall(pattern, (project / place).read_text(encoding="utf-8")):
            if tag != f"v{found}" and not is_try:
                sys.exit(f"the tag is {tag}, but {place} says {found}: run `make release VERSION={version}`")
    heading, text = _section(version, project)
    if UNRELEASED in heading and not is_try:
        sys.exit(f"CHANGELOG.md has no date for {version}: run `make release VERSION={version}`")
    return text


def set_version(version: str, project: Path = PROJECT, *, is_try: bool = False) -> None:
    """Write a version, and today's date, in every file where they stand.

    Raises:
        SystemExit: it cannot be released; the message says what to do. Nothing was
            written.
    """
    if not re.fullmatch(_VERSION, version):
        sys.exit(f"{version!r} is no version; give one such as 1.2.3")
    _section(version, project)
    if _git(project, "tag", "--list", f"v{version}"):
        sys.exit(f"there is a tag v{version} already; give the next version")
    if is_try:
        return
    if changed := _git(project, "status", "--porcelain"):
        sys.exit(f"the tree has changes, such as {changed.split(maxsplit=1)[1].splitlines()[0]}: commit them first")
    for place, pattern in PLACES.items():
        _rewrite(project / place, pattern, rf"\g<1>{version}\g<3>")
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    _rewrite(project / "CHANGELOG.md", rf"(?m)^(## {re.escape(version)} )\({UNRELEASED}\)$", rf"\g<1>({date})")


def _section(version: str, project: Path) -> tuple[str, str]:
    """Return the heading and the text of a version's part of the changelog."""
    changelog = (project / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(version)} (\([^\n]*)\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        sys.exit(f"CHANGELOG.md has no section `## {version} ({UNRELEASED})`: write what users can see of it")
    return found[1], found[2].strip() + "\n"


def _rewrite(path: Path, pattern: str, replacement: str) -> None:
    path.write_text(re.sub(pattern, replacement, path.read_text(encoding="utf-8")), encoding="utf-8")


def _git(project: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=project, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    is_try = "--try" in sys.argv
    given = [argument for argument in sys.argv[1:] if argument != "--try"]
    if len(given) == 2 and given[0] == "--set":
        set_version(given[1], is_try=is_try)
    elif len(given) == 1 and not given[0].startswith("-"):
        sys.stdout.write(notes(given[0], is_try=is_try))
    else:
        sys.exit(__doc__)
