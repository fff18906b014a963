"""Reads the files that hold secrets, and replaces the tenants file: for servers,
clients and the command line.

Such a file is accepted with a warning in the log if other users of the machine can read
or change it. OpenSSH refuses such keys. But Kubernetes and Docker mount secrets that
every user in the container can read, and refusing to start there would protect no one.
What a tenants file says is left to `infinistore.access`.
"""

import fcntl
import logging
import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from infinistore.errors import ConfigError

_log = logging.getLogger("infinistore")
MAX_TOKEN_BYTES: Final = 1024


def clean_token(text: str, source: str) -> str:
    """Return a token as it was meant: without the white space around it that editors
    and Kubernetes' secrets add, and without the byte order mark of Windows.

    Raises:
        ConfigError: there is white space within it, or another invisible character. The
            message names the source.
    """
    token = text.removeprefix("\ufeff").strip()
    if any(character.isspace() or not character.isprintable() for character in token):
        raise ConfigError(f"{source}: the token has white space or an invisible character in it; write one word")
    return token


def read_token(token_file: str | Path, *, setting: str = "token_file", what: str = "token") -> str:
    """Return the token: the first line of the file, as `clean_token` does. A password
    may have spaces. `~` is the home folder. Errors name the setting, and what the file
    holds.

    Raises:
        ConfigError: the file is unreadable or empty, or its token is too long or more
            than one word.
    """
    try:
        with Path(token_file).expanduser().open(encoding="utf-8-sig") as file:
            others_may = os.fstat(file.fileno()).st_mode & (stat.S_IROTH | stat.S_IWOTH)
            token = file.readline(4 * MAX_TOKEN_BYTES).strip()
    except (OSError, UnicodeDecodeError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        if isinstance(error, RuntimeError):
            reason = "its home folder is not known"
        raise ConfigError(f"{setting}: cannot read the {what} file {token_file}: {reason}") from None
    if not token:
        raise ConfigError(f"{setting}: the {what} file {token_file} is empty; write the {what} on its first line")
    if len(token.encode()) > MAX_TOKEN_BYTES:
        raise ConfigError(f"{setting}: the {what} in {token_file} is longer than {MAX_TOKEN_BYTES} bytes")
    if what == "token":
        clean_token(token, f"{setting}: {token_file}")
    if others_may:
        # In the message, and not in fields: a program without a log shows nothing else.
        _log.warning("the token file is open to other users: chmod o-rw %s", shlex.quote(str(token_file)))
    return token


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
