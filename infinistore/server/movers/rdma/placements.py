"""Where the blocks of a request lie in the client's registered memory, and which part
of a batch a piece is.

Arithmetic on addresses and lengths; it touches no memory and no device.
"""

from collections.abc import Sequence

from infinistore.core.clients import Lease
from infinistore.core.entry import length_of
from infinistore.errors import ProtocolError
from infinistore.sizes import in_units
from infinistore.transports.rdma.plan import Placement

__all__ = ["cut", "end_to_end", "of_present", "packed", "present_lengths", "remote_placement"]


def remote_placement(addresses: Sequence[int], keys: Sequence[int]) -> Placement:
    """Return the places that a request names; one remote key stands for all addresses.

    Raises:
        ProtocolError: the columns do not fit, or a key has more than 32 bits.
    """
    if len(keys) == 1:
        keys = [keys[0]] * len(addresses)
    if len(keys) != len(addresses) or max(keys, default=0) >= 1 << 32:
        raise ProtocolError(f"{len(addresses)} addresses with {len(keys)} remote keys")
    return Placement(addresses, keys)


def present_lengths(lease: Lease) -> list[int]:
    """Return the lengths of the blocks that are there."""
    return list(map(length_of, lease.pinned))


def packed(remote: Placement, lease: Lease) -> Placement:
    """Return the places of the blocks that are there, back to back in the one span of
    the request.
    """
    return end_to_end(remote.addresses[0], remote.keys[0], present_lengths(lease))


def of_present(remote: Placement, lease: Lease) -> Placement:
    """Return the places, of those of all blocks, of the blocks that are there."""
    if len(lease.pinned) == len(remote.addresses):
        return remote
    present = [i for i, entry in enumerate(lease.entries) if entry is not None]
    return Placement([remote.addresses[i] for i in present], [remote.keys[i] for i in present])


def end_to_end(address: int, key: int, lengths: Sequence[int]) -> Placement:
    """Return places of these lengths, back to back from `address` on."""
    addresses = []
    for length in lengths:
        addresses.append(address)
        address += length
    return Placement(addresses, [key] * len(addresses))


def cut(extents: Sequence[tuple[int, int, int]], first_byte: int, count: int) -> list[tuple[int, int, int]]:
    """Return what `count` bytes of these extents are, end to end, from `first_byte` on.

    Raises:
        ProtocolError: there are not so many.
    """
    part: list[tuple[int, int, int]] = []
    position = 0
    for arena, offset, length in extents:
        start, end = max(first_byte, position), min(first_byte + count, position + length)
        if start < end:
            part.append((arena, offset + start - position, end - start))
        position += length
    if not count or first_byte + count > position:
        raise ProtocolError(f"{in_units(count)} from byte {first_byte} on, of a batch of {position}")
    return part
