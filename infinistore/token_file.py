"""Reads tokens, for servers and clients: the same one from every source.

A file that other users of the machine can read is accepted with a warning in the log.
OpenSSH refuses such keys. But Kubernetes and Docker mount secrets that every user in
the container can read, and refusing to start there would protect no one.
"""

import logging
import os
import shlex
import stat
from pathlib import Path
from typing import Final

from infinistore.errors import ConfigError

__all__ = ["MAX_TOKEN_BYTES", "clean_token", "read_token"]

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
