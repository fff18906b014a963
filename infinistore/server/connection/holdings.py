"""What the client of one connection holds: open reservations and leases, pins, and its
tables.

They belong to the connection, whichever mover made them, and are named by numbers that
mean something on this connection only. Nothing here ends after a timeout: a client that
maps the pool may write where it has reserved and read what it has leased until it says
that it is done, or is gone. What a lost client may still write to is in quarantine.
"""

from itertools import count
from operator import itemgetter

from infinistore.core.clients import Lease as CoreLease
from infinistore.core.clients import Reservation
from infinistore.errors import LimitExceeded, ProtocolError, UnknownReservation
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import Abort, Commit, Message, Numbers, PutReply, Release, ReserveReply, Touch
from infinistore.protocol.packed_offsets import pack_offsets
from infinistore.protocol.server_connection import Received
from infinistore.server.connection.client_tables import ClientTables
from infinistore.server.connection.conversation import Conversation
from infinistore.sizes import in_units

__all__ = ["MOST_OPEN", "Holdings"]

MOST_OPEN = 1024
"""How many reservations, and how many leases, one connection may have open: an empty
one takes no room in the pool.
"""
_LENGTH = itemgetter(2)


class Holdings:
    """The reservations, leases and tables of one connection, and the requests that name
    them by number.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._core = conversation.core
        self._numbers = count(1)
        self._reservations: dict[int, Reservation] = {}
        self._filled_bytes: dict[int, int] = {}  # by the number of a reservation
        self._leases: dict[int, CoreLease] = {}
        self._latest_lease = 0
        self._tables: ClientTables | None = None

    # Reservations

    async def reserve(self, sizes: Numbers, received: Received, *, spare: bool = False) -> ReserveReply:
        """Open a reservation, and return the reply; the number is 0 for a spare one
        that is not granted.

        Raises:
            LimitExceeded: too many reservations are open on this connection.
            OutOfMemory: there is no room.
        """
        if len(self._reservations) >= MOST_OPEN:
            raise LimitExceeded(f"{MOST_OPEN} reservations are open on this connection; commit them first")
        self._core.limits.check_batch(len(sizes))
        lengths = sizes.tolist()  # everything that looks at a list takes half the time that an array takes
        reservation = (
            self._core.reserve_spare(self._conversation.client, lengths)
            if spare
            else await self._conversation.reserve(lengths, received.deadline_us)
        )
        if reservation is None:
            return ReserveReply(0, pack_u64())
        number = next(self._numbers)
        self._reservations[number] = reservation
        return ReserveReply(number, pack_u64(pack_offsets(reservation.extents)))

    def reservation(self, number: int) -> Reservation:
        """Return an open reservation.

        Raises:
            UnknownReservation: there is none of this number.
        """
        reservation = self._reservations.get(number)
        if reservation is None:
            raise UnknownReservation(f"no reservation {number} is open on this connection")
        return reservation

    def forget_committed(self, number: int) -> None:
        """Forget a reservation that its client has committed through its commit word.

        Raises:
            ProtocolError: it is still open.
        """
        reservation = self._reservations.get(number)
        if reservation is not None:
            if reservation.state == "open":
                raise ProtocolError("a connection prepares one batch at a time: it has one commit word")
            del self._reservations[number]

    def fill(self, number: int, count: int) -> None:
        """Note that the server has written the next `count` bytes of a reservation."""
        self._filled_bytes[number] = self._filled_bytes.get(number, 0) + count

    def filled_bytes(self, number: int) -> int:
        """How many bytes of a reservation the server has written, from the first one
        on.
        """
        return self._filled_bytes.get(number, 0)

    def check_filled(self, number: int) -> None:
        """Check that the server has written all of a reservation: new room holds what
        others had there before.

        Raises:
            UnknownReservation: there is none of this number.
            ProtocolError: a part is missing.
        """
        missing = sum(map(_LENGTH, self.reservation(number).extents)) - self.filled_bytes(number)
        if missing:
            raise ProtocolError(f"{in_units(missing)} of this reservation have not been filled")

    async def commit(self, commit: Commit, received: Received) -> None:
        """Answer a Commit: make a written batch visible. If the keys do not fit it, it
        stays open. Of too many checksums, one too many is looked at.
        """
        self._conversation.check_lengths(commit.keys)
        reservation = self.reservation(commit.reservation)
        checksums = commit.checksums[: len(reservation.extents) + 1].tolist() if commit.checksums else None
        skipped = self._core.commit(
            reservation, commit.keys, checksums, replace=commit.replace, free=False, ttl_s=commit.ttl_us / 1e6
        )
        del self._reservations[commit.reservation]
        if self._filled_bytes:
            self._filled_bytes.pop(commit.reservation, None)
        self._conversation.traffic.received_bytes += sum(map(_LENGTH, reservation.extents))
        try:
            await self._conversation.reply(PutReply(pack_u64(skipped)))
        finally:
            self._core.free_replaced()  # while the client reads the answer

    async def abort(self, abort: Abort, received: Received) -> None:
        """Answer an Abort: give the room of a reservation back."""
        self.abort_reservation(abort.reservation)

    def abort_reservation(self, number: int) -> None:
        """Give the room of a reservation back.

        Raises:
            ProtocolError: there is none of this number.
        """
        reservation = self._reservations.pop(number, None)
        if reservation is None:
            raise ProtocolError(f"no reservation {number} is open on this connection")
        self._filled_bytes.pop(number, None)
        self._core.abort(reservation)

    # Leases

    def begin_lease(self) -> None:
        """Check that one more lease may be kept; until `keep_latest`, `Release(0)`
        names none.

        Raises:
            LimitExceeded: too many leases are open on this connection.
        """
        self._latest_lease = 0
        self._check_may_keep()

    def _check_may_keep(self) -> None:
        if len(self._leases) >= MOST_OPEN:
            raise LimitExceeded(f"{MOST_OPEN} leases are open on this connection; release them first")

    def keep(self, lease: CoreLease) -> int:
        """Keep a lease until the client releases it; return the number that it has from
        now on.

        Raises:
            LimitExceeded: too many are open; this one is still the caller's.
        """
        self._check_may_keep()
        number = next(self._numbers)
        self._leases[number] = lease
        return number

    def keep_latest(self, lease: CoreLease) -> int:
        """Keep a lease as `keep` does, as the one that `Release(0)` names."""
        self._latest_lease = number = self.keep(lease)
        return number

    def lease(self, number: int) -> CoreLease:
        """Return a lease that is kept.

        Raises:
            ProtocolError: there is none of this number.
        """
        lease = self._leases.get(number)
        if lease is None:
            raise ProtocolError(f"no lease {number} is open on this connection")
        return lease

    async def release(self, release: Release, received: Received) -> None:
        """Answer a Release: end a lease. Number 0 is the latest one, if it was kept."""
        number = release.lease or self._latest_lease
        if release.lease or number in self._leases:
            self._core.release(self.lease(number))
            del self._leases[number]

    # Tables that the client writes

    @property
    def tables(self) -> ClientTables | None:
        """The tables that the client writes, if it has asked for any."""
        return self._tables

    def add_tables(self, tables: ClientTables) -> None:
        """Respect the client's hazards, and hear what it used, from now on. They are
        closed with the connection.
        """
        self._tables = tables
        tables.watch(self._core, self._conversation.client, self.note_use)

    def note_use(self, touch: Message) -> None:
        """Count what the client has used without asking."""
        assert isinstance(touch, Touch)
        self._conversation.traffic.sent_bytes += self._core.note_use(touch.keys, read=touch.read)

    def listen(self) -> None:
        """Hear what the client did since its last request: it may have used blocks that
        nobody else has seen yet.
        """
        if self._tables is not None:
            self._core.commit_written()
            self._tables.listen()

    # The end of the connection

    def revoke_tables(self) -> None:
        """Let the client begin no more reads through its tables, and commit no more
        batches.

        The reads that have begun count as pinned now, and the batches that it has
        committed are visible.
        """
        if self._tables is not None:
            self._tables.end()
            self._core.scan_hazards(self._conversation.client)

    def withdraw_tables(self) -> None:
        """As `revoke_tables`, and for good: the client may no longer do what tables are
        for. What it commits through them from now on is not.
        """
        self.revoke_tables()
        if self._tables is not None:
            self._tables.withdraw()

    def quarantine(self) -> None:
        """Give no room that the client holds to anybody else, because the client may
        still touch it.
        """
        self._core.quarantine(self._conversation.client)

    def give_back(self) -> None:
        """End all that the client holds: it cannot touch any of it any more."""
        self._core.close_client(self._conversation.client)
        if self._tables is not None:
            self._tables.close()
            self._tables = None
