"""Reads and replaces the tenants file, for servers and the command line.

What the file says is left to `infinistore.access`. Like a token file, it is accepted
with a warning if other users can change it, because Kubernetes and Docker mount secrets
that every user in the container can read.
"""

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from infinistore.errors import ConfigError

__all__ = ["locked", "read_text", "replace_text"]

_log = logging.getLogger("infinistore")
_MOST_BYTES: Final = 16 * 1024 * 1024
_MODE: Final = 0o600


def read_text(file: Path) -> str:
    """Return what a tenants file holds.

    Raises:
        ConfigError: it cannot be read, or is no text.
    """
    try:
        with file.open("rb") as opened:
            others_may = os.fstat(opened.fileno()).st_mode & (stat.S_IROTH | stat.S_IWOTH)
            data = opened.read(_MOST_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}; {_remedy(error)}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}:{line}: is not text in UTF-8") from None
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{file}: is longer than {_MOST_BYTES >> 20} MiB; no tenants file is")
    if others_may:
        remedy = f"chmod o-rw {file}"
        _log.warning("the tenants file is open to other users", extra={"file": str(file), "remedy": remedy})
    return text


def _remedy(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return (
            "let the user of the server read it, and enter its folders (chown USER FILE), and run commands as that "
            "user or as root"
        )
    if isinstance(error, FileNotFoundError):
        return "`infinistore tenant add ID` makes one"
    return "give a file of text"


def replace_text(file: Path, text: str) -> None:
    """Replace a tenants file, or create it, for its owner alone: whoever reads it sees
    the old text or the new one, also after a crash. A symbolic link stays one.

    Raises:
        OSError: it cannot be written; the old one is there.
    """
    file = file.resolve()
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        with open(descriptor, "w", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        _keep_owner(file, temporary)
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _keep_owner(file: Path, temporary: Path) -> None:
    """Root edits the file of a server that is another user's: it must stay readable for
    that server.
    """
    try:
        found = file.stat()
    except FileNotFoundError:
        return
    if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
        os.chown(temporary, found.st_uid, found.st_gid)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Keep other commands from editing a tenants file within the block.

    Raises:
        ConfigError: its folder cannot be opened.
    """
    try:
        folder = os.open(file.resolve().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{file}: its folder cannot be opened: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
