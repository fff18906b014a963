"""Who may open a Unix socket, by the user and the groups that the kernel tells."""

from collections.abc import Collection
from typing import Final

import attrs

from infinistore.errors import AuthenticationFailed

__all__ = ["UnixAccess"]

_ROOT: Final = 0
_OF_OWNER, _OF_GROUP, _OF_OTHERS = 0o200, 0o020, 0o002  # who may write may connect: unix(7)


@attrs.frozen
class UnixAccess:
    """Lets in whom a socket file with this owner, group and mode lets in. A mode that
    is changed later changes nothing here.
    """

    uid: int
    gid: int
    mode: int

    def check(self, uid: int, groups: Collection[int]) -> None:
        """Refuse a user with these groups who may not be here.

        Raises:
            AuthenticationFailed: this one may not.
        """
        needed = _OF_OWNER if uid == self.uid else _OF_GROUP if self.gid in groups else _OF_OTHERS
        if uid != _ROOT and not self.mode & needed:
            group = f" and group {self.gid}" if self.mode & _OF_GROUP else ""
            raise AuthenticationFailed(
                f"this Unix socket is for user {self.uid}{group}, and user {uid} has connected; connect as one of "
                "them, or by TCP, or start the server with another --unix-socket-access"
            )
