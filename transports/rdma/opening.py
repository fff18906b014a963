"""Opening an RDMA device: the way from the interface to what implements it."""

from collections.abc import Callable
from typing import TypeAlias

from infinistore.transports.rdma.devices import Address, Place
from infinistore.transports.rdma.verbs import Device

OpenDevice: TypeAlias = Callable[..., Device]
"""Opens a port: device name or None, port number, link ("IB", "Ethernet") or None,
preferred GID index or -1, and an address of this machine that peers are known to reach,
or None. By keyword, `peer` is the address of a peer, and `place` is where the memory is
that is to be moved.
"""


def open_device(
    name: str | None,
    port: int = 1,
    link: str | None = None,
    gid_index: int = -1,
    near: Address | None = None,
    *,
    peer: Address | None = None,
    place: Place | None = None,
) -> Device:
    """Open a port of an RDMA device; without a name, the best one that works. A port is
    preferred that has the address `near`; with a `place`, the nearest of those that
    reach `peer`.

    Raises:
        NoRdma: there is none, or it cannot be used.
    """
    from infinistore.transports.rdma import ibverbs

    return ibverbs.open_device(name, port, link, gid_index, near, peer=peer, place=place)
