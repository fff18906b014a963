"""What a session keeps for a client that reads and writes the pool by itself: its open reservations and leases.

They are named by numbers that mean something on this connection only. Nothing here ends by itself: a client that maps
the pool may write where it has reserved and read what it has leased until it says that it is done, or is gone.
"""

from itertools import count

from infinistore.core.clients import Lease, Reservation
from infinistore.core.store import StoreCore
from infinistore.errors import LimitExceeded, ProtocolError, UnknownReservation
from infinistore.protocol.codec import numbers
from infinistore.protocol.messages import MISSING, Commit, LeaseReply, PutReply, ReserveReply
from infinistore.protocol.places import place_of

__all__ = ["MOST_OPEN", "SharedBatches"]

MOST_OPEN = 1024
"""How many reservations, and how many leases, one connection may have open: an empty one takes no room in the pool."""


class SharedBatches:
    """The open reservations and leases of one connection."""

    def __init__(self, core: StoreCore) -> None:
        self._core = core
        self._ids = count(1)
        self._reservations: dict[int, Reservation] = {}
        self._leases: dict[int, Lease] = {}

    def reserve(self, reservation: Reservation) -> ReserveReply:
        """Keep a reservation for the client to write; return where it is.

        Raises:
            LimitExceeded: too many are open; it has been given back.
        """
        if len(self._reservations) >= MOST_OPEN:
            self._core.abort(reservation)
            raise LimitExceeded(f"{MOST_OPEN} reservations are open on this connection; commit them first")
        number = next(self._ids)
        self._reservations[number] = reservation
        return ReserveReply(number, numbers([place_of(arena, offset) for arena, offset, _ in reservation.extents]))

    def commit(self, commit: Commit) -> tuple[PutReply, int]:
        """Make a batch visible that the client has written; return the reply, and how many bytes it had.

        Raises:
            UnknownReservation: there is none of this number.
            ValueError: the keys do not fit it; it stays open.
        """
        reservation = self._reservations.get(commit.reservation)
        if reservation is None:
            raise UnknownReservation(f"no reservation {commit.reservation} is open on this connection")
        checksums = commit.checksums.tolist() if commit.checksums else None
        skipped = self._core.commit(reservation, commit.keys, checksums, replace=commit.replace)
        del self._reservations[commit.reservation]
        return PutReply(numbers(skipped)), sum(length for _, _, length in reservation.extents)

    def lease(self, lease: Lease) -> LeaseReply:
        """Keep a lease for the client to read; return where its blocks are.

        Raises:
            LimitExceeded: too many are open; it has been given back.
        """
        if len(self._leases) >= MOST_OPEN:
            self._core.release(lease)
            raise LimitExceeded(f"{MOST_OPEN} leases are open on this connection; release them first")
        number = next(self._ids)
        self._leases[number] = lease
        places = [0 if entry is None else place_of(entry[0], entry[1]) for entry in lease.entries]
        sizes = [length or MISSING for length in lease.lengths]
        return LeaseReply(number, numbers(sizes), numbers(lease.checksums), numbers(places))

    def release(self, number: int) -> None:
        """End a lease.

        Raises:
            ProtocolError: there is none of this number.
        """
        lease = self._leases.pop(number, None)
        if lease is None:
            raise ProtocolError(f"no lease {number} is open on this connection")
        self._core.release(lease)
