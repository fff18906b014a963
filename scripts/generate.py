"""Write the files of this repository that are generated from others.

    python scripts/generate.py            write those that are out of date
    python scripts/generate.py --check    write nothing; name those that are out of date, and fail

`make generate` and `make check` call it. It needs ruff.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from blocking_face import blocking_face
from client_options import client_options
from command_reference import command_reference
from gpu_figures import gpu_figures
from public_api import public_api
from reference_tables import reference_tables
from scaling_tables import scaling_tables

PROJECT = Path(__file__).resolve().parents[1]

GENERATORS = (
    blocking_face,
    client_options,
    public_api,
    command_reference,
    reference_tables,
    gpu_figures,
    scaling_tables,
)
"""Each returns the text of files by their paths from the top folder.

A later one may read what an earlier one wrote.
"""


def formatted(source: str, path: str) -> str:
    """Put Python source in the order and layout of this repository."""
    for command in ("check --select I,F401 --fix-only --quiet", "format --quiet"):
        ruff = [sys.executable, "-m", "ruff", *command.split(), "--stdin-filename", path, "-"]
        source = subprocess.run(ruff, cwd=PROJECT, input=source, capture_output=True, text=True, check=True).stdout
    return source


def generate(project: Path, *, check: bool) -> int:
    """Write what is out of date, or only name it. Returns how many files were."""
    outdated = 0
    for generator in GENERATORS:
        for path, source in generator(project).items():
            text = formatted(source, path) if path.endswith(".py") else source
            file = project / path
            if file.is_file() and file.read_text() == text:
                continue
            outdated += 1
            if not check:
                file.write_text(text)
            print(f"{'out of date, run `make generate`' if check else 'written'}: {path}")
    return outdated


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    parser.add_argument("--project", type=Path, default=PROJECT, help="the top folder; this checkout unless given")
    options = parser.parse_args()
    sys.path.insert(0, str(options.project))  # what is described there, not in the package that is installed
    try:
        outdated = generate(options.project, check=options.check)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 1 if outdated and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
