"""A server that one benchmark runs."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["serving"]


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """Run a server with these flags, on a free port and a socket of its own, and yield
    its HOST:PORT.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-m", "infinistore", "--host", "127.0.0.1", "--service-port", "0"]
        command += ["--unix-socket", str(Path(folder, "store.sock")), *flags]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                found = re.search(r"tcp://([\d.]+:\d+)", process.stdout.readline())
                if found is None:
                    raise RuntimeError("the server did not start; its standard error says why")
                yield found[1]
            finally:
                process.terminate()
