"""Memory that a processor cannot read or write: of a GPU, by address and length.

The memory views of the rest of the code are of this process's memory, and hashing or
copying one of a GPU's would crash. So memory of a GPU has this type of its own. It is
cut like a view, and nothing else can be done to it here.

`Cuda` is what RDMA asks of a GPU's driver. `cuda_driver` asks CUDA; the tests ask
memory of this process.
"""

from typing import Any, NamedTuple, Protocol

__all__ = ["Cuda", "DeviceMemory", "Dmabuf"]


class DeviceMemory:
    """A span of a GPU's memory, which `owner` keeps alive. `ordinal` is the GPU's
    number, as in `cuda:0`.
    """

    __slots__ = ("address", "length", "ordinal", "owner")

    def __init__(self, address: int, length: int, ordinal: int, owner: object) -> None:
        self.address = address
        self.length = length
        self.ordinal = ordinal
        self.owner = owner

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> "DeviceMemory":
        start, stop, step = part.indices(self.length)
        if step != 1:
            raise ValueError("only what lies end to end in a GPU's memory can be cut out of it")
        return DeviceMemory(self.address + start, max(0, stop - start), self.ordinal, self.owner)

    def holds(self, other: "DeviceMemory") -> bool:
        """Whether all of the other lies in it. Addresses differ between GPUs, too
        (unified virtual addressing).
        """
        return self.address <= other.address and other.address + other.length <= self.address + self.length

    @property
    def place(self) -> str:
        """The GPU, for people."""
        return f"cuda:{self.ordinal}"

    def __repr__(self) -> str:
        return f"<{self.length} bytes of {self.place} at 0x{self.address:x}>"


class Dmabuf(NamedTuple):
    """Memory as the kernel hands it from one driver to another: a descriptor, and where
    in it the memory begins.

    Who has it closes the descriptor, when the memory is registered or that has failed:
    the registration keeps what it needs.
    """

    fd: int
    offset: int


class Cuda(Protocol):
    """What RDMA asks of the driver of GPUs. Any thread may ask."""

    def ordinal_at(self, address: int) -> int | None:
        """Return the number of the GPU whose memory is at an address; None if it is no
        GPU's.
        """

    def pci_address(self, ordinal: int) -> str | None:
        """Return where a GPU is on the PCI bus, as `0000:17:00.0`; None if that cannot
        be told.
        """

    def export(self, memory: DeviceMemory) -> Dmabuf:
        """Return the memory as a dmabuf.

        Raises:
            NoRdma: the driver, the GPU or this kind of memory does not allow it.
        """

    def order_copies(self, memory: DeviceMemory) -> None:
        """Ask that copies which CUDA calls synchronous are over when their call
        returns, if that can be asked for.
        """

    def record(self, ordinal: int) -> Any:
        """Return an event that comes when what this thread's current stream of the GPU
        was told so far is done.
        """

    def is_done(self, event: Any) -> bool:
        """Whether waiting for the event would take no time. False if that cannot be
        told.
        """

    def wait(self, event: Any) -> None:
        """Wait for the event. The interpreter's lock is free meanwhile."""

    def flush(self, ordinal: int) -> None:
        """Make what other devices have written to the GPU's memory visible to all that
        the GPU runs.
        """
