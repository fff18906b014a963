"""Which port of which RDMA device is used, and the address it speaks from, read from /sys/class/infiniband."""

from pathlib import Path

import attrs

from infinistore.transports.rdma_verbs import NoRdma

__all__ = ["Port", "choose_port", "there_is_rdma"]

_SYSTEM = Path("/sys/class/infiniband")
_LINKS = {"IB": "InfiniBand", "Ethernet": "Ethernet"}


@attrs.frozen
class Port:
    """An active port and its address. `gid` is 32 hexadecimal digits; `lid` is 0 on Ethernet."""

    device: str
    number: int
    link: str
    lid: int
    gid: str
    gid_index: int

    def describe(self) -> str:
        """Name it for people."""
        return f"{self.device} port {self.number} ({self.link}, GID index {self.gid_index})"


def there_is_rdma(system: Path = _SYSTEM) -> bool:
    """Whether this host has an RDMA device at all. Quick: asked before anything slow is imported."""
    try:
        return any(system.iterdir())
    except OSError:
        return False


def choose_port(name: str | None, number: int, link: str | None, gid_index: int, system: Path = _SYSTEM) -> Port:
    """Choose a port; without a name, the first device whose port is active.

    Raises:
        NoRdma: there is none, it is down, or it is of another kind than `link`.
    """
    devices = sorted(path.name for path in system.iterdir()) if there_is_rdma(system) else []
    if not devices:
        raise NoRdma("this host has no RDMA device")
    if name is not None and name not in devices:
        raise NoRdma(f"there is no RDMA device {name!r} here; there is {', '.join(devices)}")
    refused: NoRdma | None = None
    for device in [name] if name is not None else devices:
        try:
            return _port(system / device, number, link, gid_index)
        except NoRdma as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _port(folder: Path, number: int, link: str | None, gid_index: int) -> Port:
    place = f"port {number} of the RDMA device {folder.name}"
    port = folder / "ports" / str(number)
    if not port.is_dir():
        raise NoRdma(f"there is no {place}")
    if not _line(port / "state").endswith("ACTIVE"):
        raise NoRdma(f"{place} is {_line(port / 'state').partition(': ')[2] or 'in an unknown state'}; bring it up")
    found = _line(port / "link_layer")
    if link is not None and found != _LINKS[link]:
        raise NoRdma(f"{place} is {found}, not {_LINKS[link]} as --link-type says")
    gids = {
        int(path.name): text.replace(":", "")
        for path in (port / "gids").iterdir()
        if (text := _line(path)).replace(":", "").strip("0")
    }
    usable = [index for index in sorted(gids) if _kind(port, index) != "" or found == "InfiniBand"]
    if not usable:
        raise NoRdma(f"{place} has no GID; give its network interface an address")
    best = gid_index if gid_index in usable else min(usable, key=lambda index: _rank(port, index, gids[index]))
    lid = int(_line(port / "lid") or "0", 16) if found == "InfiniBand" else 0
    return Port(folder.name, number, found, lid, gids[best], best)


def _rank(port: Path, index: int, gid: str) -> tuple[bool, bool, int]:
    """RoCE v2 before v1, routable before link-local."""
    return (_kind(port, index) != "RoCE v2", gid.startswith("fe80"), index)


def _kind(port: Path, index: int) -> str:
    return _line(port / "gid_attrs" / "types" / str(index))


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # an empty entry of the GID table has no type, and says EINVAL
        return ""
