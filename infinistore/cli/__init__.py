"""The command line.

`main` is the entry point. The rest: `root.py` finds the subcommands, one module each, imported when they are asked for;
`failures.py` turns every error into one line and an exit code; `options.py` has the flags that commands share;
`output.py` prints. Commands use the public API only.
"""

import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with `arguments` (None: those of this process) and exit with the code that fits."""
    try:
        from infinistore.cli.failures import run

        code = run(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:  # Ctrl-C before the command had started, or while it was being tidied up
        code = 130
    sys.exit(code)
