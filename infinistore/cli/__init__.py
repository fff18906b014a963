"""The command line.

`main` is the entry point. `root.py` finds the subcommands, whose modules are imported
on demand. `failures.py` converts every error to one line and an exit code. `options.py`
has the flags that commands share, and `output.py` prints. Commands use only the public
API.
"""

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with `arguments` (None: `sys.argv`), and exit."""
    try:
        from infinistore.cli.root import run

        code = run(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:  # before the command started, or during its cleanup
        code = 130
    sys.exit(code)
