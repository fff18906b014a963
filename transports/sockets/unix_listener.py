"""A server's Unix socket, in a folder in which nobody else can replace it.

Clients send their token to the process that listens there, and trust its answers. So no
component of the path may belong to another user, who could lead it elsewhere, and none
may be writable by everybody, unless it is sticky like /tmp.
"""

import contextlib
import grp
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Final, Literal

from infinistore.errors import ConfigError
from infinistore.transports.sockets.raw_sockets import BACKLOG, reason

Access = Literal["user", "group", "all"]
MODES: Final[dict[Access, tuple[int, int]]] = {"user": (0o700, 0o600), "group": (0o750, 0o660), "all": (0o755, 0o666)}
"""The modes of a folder that is made for the socket, and of the socket."""
_NOBODY: Final = 65534
"""The owner of files of unknown users in a container (`overflowuid` in /proc)."""


class UnixListener(socket.socket):
    """Listens at a path, and removes it on close, unless another process's socket is
    there by then.

    It removes the path before it stops listening: while a process listens there, no
    other one replaces its socket.
    """

    _bound: tuple[Path, tuple[int, int]] | None = None

    def bind_path(self, path: Path) -> None:
        """Create the socket at this path."""
        self.bind(str(path))
        self._bound = path, _inode(path)

    def own_path(self) -> None:
        """Remove the path on close, as the process that created it would have."""
        path = Path(self.getsockname())
        self._bound = path, _inode(path)

    def leave_path(self) -> None:
        """Leave the path to another process that listens on this socket."""
        self._bound = None

    @property
    def owns_path(self) -> bool:
        """Whether it removes the path on close."""
        return self._bound is not None

    def close(self) -> None:
        """Remove the path, if it is this socket, and stop listening. Idempotent."""
        if self._bound is not None:
            path, inode = self._bound
            self._bound = None
            with contextlib.suppress(OSError):  # it has gone, or may not be looked at any more
                if _inode(path) == inode:
                    path.unlink()
        super().close()


def _inode(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def listen_unix(path: Path, access: Access = "user", group: str | None = None) -> socket.socket:
    """Listen on a Unix socket that only these users may open; replace a socket that a
    dead server left behind.

    The folder is created for the same users if it does not exist. Closing the listener
    removes the socket. `group` is the name or the number of another group than that of
    this process.

    Raises:
        ConfigError: the path is too long, belongs to another user, is not a socket or
            can be changed by others, a live server listens there, or the group does not
            exist or cannot be given to the socket.
    """
    folder_mode, mode = MODES[access]
    group_id = -1 if group is None else _group_id(group)
    try:
        _check(path.parent, access)
        if not path.parent.exists():
            path.parent.mkdir(mode=folder_mode, parents=True, exist_ok=True)
            _give(path.parent, group_id, group)
            path.parent.chmod(folder_mode)  # whatever the umask is
            _check(path.parent, access)
        _remove_stale(path)
        sock = UnixListener(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--unix-socket {path}: {reason(error)}; choose another path, or `off`") from None
    try:
        sock.setblocking(False)
        # It has its mode before it can be connected to: between bind and listen nobody
        # gets in.
        sock.bind_path(path)
        _give(path, group_id, group)
        path.chmod(mode)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"--unix-socket {path}: {reason(error)}; choose another path, or `off`") from None
    except ConfigError:
        sock.close()
        raise
    return sock


def _group_id(group: str) -> int:
    if group.isascii() and group.isdigit():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"--unix-socket-group {group}: there is no such group; `getent group` lists them") from None


def _give(path: Path, group_id: int, group: str | None) -> None:
    """Give a socket, or its folder, to a group; -1 leaves it as it is."""
    try:
        os.chown(path, -1, group_id)
    except (OSError, OverflowError) as error:
        problem = reason(error) if isinstance(error, OSError) else "no group has this number"
        remedy = "start the server as a member of the group, or as root"
        raise ConfigError(f"--unix-socket-group {group}: {path} cannot be given to it: {problem}; {remedy}") from None


def make_private(folder: Path) -> bool:
    """Create a folder for this user alone; return whether it is one, and stays so."""
    try:
        if _what_others_can_do(folder, "user"):
            return False
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        return (
            stat.S_ISDIR(found.st_mode)
            and found.st_uid == os.getuid()
            and not found.st_mode & 0o077
            and not _what_others_can_do(folder, "user")
        )
    except OSError:
        return False


def make_private_folder() -> Path:
    """Create a folder for this user alone, under another name each time.

    Raises:
        ConfigError: the system does not allow it.
    """
    try:
        return Path(tempfile.mkdtemp(prefix=f"infinistore-{os.getuid()}-"))
    except OSError as error:
        raise ConfigError(f"--unix-socket auto: {reason(error)}; give a path, or `off`") from None


def _check(folder: Path, access: Access) -> None:
    problem = _what_others_can_do(folder, access)
    if problem:
        raise ConfigError(f"--unix-socket: {problem}; choose a path that is this user's, or `off`")


def _what_others_can_do(folder: Path, access: Access) -> str:
    """Return how another user could replace a socket in this folder, or nothing."""
    trusted = (0, os.getuid(), _NOBODY)
    for path in (folder.absolute(), folder.resolve()):
        for part in (*reversed(path.parents), path):
            try:
                found = part.lstat()
            except FileNotFoundError:
                break
            if found.st_uid not in trusted:
                return f"{part} belongs to another user ({found.st_uid})"
            mode = found.st_mode
            open_to_all = mode & stat.S_IWOTH and not mode & stat.S_ISVTX and stat.S_ISDIR(mode)
            if open_to_all and access != "all":  # then they are trusted with everything
                return f"every user can change {part} (mode {stat.S_IMODE(mode):o})"
    return ""


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"--unix-socket: {path} is there and is no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:  # its backlog is full: somebody listens
            pass
    raise ConfigError(f"--unix-socket: a server listens on {path} already; choose another path, or `off`")
