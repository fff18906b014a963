"""The tables in shared memory that one client writes: its hazards, what it touched, and
its commit word.

`infinistore/protocol/shared_tables.py` says what is in them. The core reads the hazards
before it uses room again.
"""

import logging
from collections.abc import Callable, Sequence

from infinistore.core.arena import Arena, create_arena
from infinistore.core.clients import Client, Hazard
from infinistore.core.store import StoreCore
from infinistore.errors import InfiniStoreException
from infinistore.protocol.codec import decode_notices
from infinistore.protocol.messages import Message, Touch
from infinistore.protocol.shared_tables import READER_BYTES, CommitWord, Hazards, TouchLog

__all__ = ["ClientTables"]

_log = logging.getLogger("infinistore.server")
_HAZARD_LIKE_BYTES = 16  # of a touch log: to read so many takes about as long as to look at a hazard


class ClientTables:
    """The hazard table, the touch log and the commit word of one client. Blocking to
    make: a fraction of a millisecond.

    OutOfMemory, OSError: there is no memory, or no descriptor, for them.
    """

    def __init__(self, create_arena: Callable[..., Arena] = create_arena) -> None:
        self.arena: Arena = create_arena(0, READER_BYTES, name="reader")
        self.hazards = Hazards(self.arena.memory)
        self._log = TouchLog(self.arena.memory)
        self.commit_word = CommitWord(self.arena.memory)
        self._hear: Callable[[Message], object] | None = None
        self._withdrawn = False

    def watch(self, core: StoreCore, client: Client, hear: Callable[[Message], object]) -> None:
        """Have the core respect the client's hazards from now on, and tell `hear` what
        the client used.
        """
        self._hear = hear
        core.accept_hazards(client, self._look, self._news)

    def listen(self) -> None:
        """Read the touch log: what the client has used since the last time.

        A malformed log is read up to the fault, and never again. Raises nothing: the
        store calls this in the middle of what it does for other clients.
        """
        if self._hear is None:
            return
        try:
            logged = self._log.take()
            if not logged:  # most of the time
                return
            for touch in decode_notices(logged, Touch):
                self._hear(touch)
        except InfiniStoreException:
            self._hear = None
        except Exception:  # noqa: BLE001  # a fault of ours, and no matter of whoever is served just now
            _log.exception("internal error")
            self._hear = None

    def _look(self) -> list[Hazard]:
        self.listen()
        return self.hazards.look()

    def _news(self) -> int:
        """About how many hazards `_look` would have to look at, a touch log counted as
        if it were some.
        """
        logged_bytes = 0 if self._hear is None else self._log.waiting_bytes
        return self.hazards.news + logged_bytes // _HAZARD_LIKE_BYTES

    def committed(self, reservation: int, blocks: int) -> Sequence[int] | None:
        """Return the checksums of a batch if the client has committed it."""
        return None if self._withdrawn else self.commit_word.checksums_of(reservation, blocks)

    def share(self) -> int:
        """Return the descriptor of the tables, for the client to map and write. The
        tables close it.
        """
        return self.arena.share(writable=True)

    def end(self) -> None:
        """Let the client begin no more reads. Those that have begun go on."""
        self.hazards.close()

    def withdraw(self) -> None:
        """Take nothing for committed any more."""
        self._withdrawn = True

    def close(self) -> None:
        """Close the tables."""
        self.arena.close()
