"""Memory that a caller has registered with a store."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from infinistore.transports.device_memory import DeviceMemory

__all__ = ["Registration"]


class Registration:
    """Registered memory, until `close` or the end of a `with` block; the store's end ends it too.

    It is memory of this process, or of a GPU. Blocks that lie in it are moved by RDMA without being copied. Where RDMA
    is not in use, it means nothing and costs nothing. It keeps the memory alive.

    A call that is moving bytes from or to this memory when it is closed goes on without RDMA or fails; when `close`
    returns, no other machine reads or writes there.
    """

    def __init__(self, length: int, unregister: "Callable[[Registration], None] | None" = None) -> None:
        self.length = length
        """How many bytes it has."""
        self.registered = False
        """Whether an RDMA device knows it. Without RDMA it never does."""
        self.problem = ""
        """Why no RDMA device knows it, where that was tried after `register` had returned, and refused."""
        self.view = memoryview(b"")
        self.device_memory: DeviceMemory | None = None
        self._unregister = unregister

    def close(self) -> None:
        """Unregister the memory; idempotent."""
        unregister, self._unregister = self._unregister, None
        if unregister is not None:
            unregister(self)
        self.registered = False
        self.view = memoryview(b"")
        self.device_memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        without = "" if self.registered else f", {self.problem or 'without RDMA'}"
        return f"<Registration of {self.length} bytes{without}>"
