"""How this server asks other nodes who they are: with which token, and what becomes of
a refusal.
"""

import logging
from pathlib import Path

from infinistore.access.identity import Credentials
from infinistore.access.policy import Policy
from infinistore.cluster.membership import Node
from infinistore.errors import AuthenticationFailed, ConfigError, InfiniStoreException, PermissionDenied
from infinistore.secret_files import read_token

__all__ = ["PeerToken", "Refusals"]

_log = logging.getLogger("infinistore.cluster")


class PeerToken:
    """The token that is in the file of --peer-token-file, for a server with tenants.

    Every node has the same tenants. So it must be good here, too.
    """

    def __init__(self, file: Path, policy: Policy) -> None:
        """Raises ConfigError if the file cannot be used."""
        self._file = file
        self._policy = policy
        self.token = self._read()

    async def reload_and_log(self) -> str:
        """Read the file again, and log what came of it; return the problem, if there is
        one."""
        try:
            self.token = self._read()
        except ConfigError as error:
            _log.error("the token for other nodes stays as it was", extra={"problem": str(error)})
            return str(error)
        return ""

    def _read(self) -> str:
        token = read_token(self._file, setting="peer_token_file")
        try:
            # What matters is whose it is: the other nodes see how this one connects.
            self._policy.identify(Credentials(token, private=True))
        except AuthenticationFailed:
            raise ConfigError(
                f"peer_token_file: the token in {self._file} is that of no tenant of this server; make one with"
                " `infinistore tenant add nodes --role monitor`, and give every node the same tenants file"
            ) from None
        return token


class Refusals:
    """Logs which nodes refuse this one, once each until they do not."""

    def __init__(self) -> None:
        self._refused: set[str] = set()

    def note(self, node: Node, error: InfiniStoreException | None) -> None:
        """Take note of a node that answers, and why it refused, if it did."""
        if not isinstance(error, AuthenticationFailed | PermissionDenied):
            self._refused.discard(node.id)
        elif node.id not in self._refused:
            self._refused.add(node.id)
            _log.warning("another node refuses this one", extra={"node": node.id, "problem": str(error)})
