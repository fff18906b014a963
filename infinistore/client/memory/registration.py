"""Memory that a caller has registered with a store."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from infinistore.transports.cuda import DeviceMemory

__all__ = ["Registration"]


class Registration:
    """Registered memory, until `close`, the end of a `with` statement, or of the store.

    It is memory of this process, or of a GPU. RDMA moves blocks in it without a copy.
    Without RDMA, it has no effect and no cost. It keeps the memory alive.

    A call that moves bytes from or to this memory while it is closed continues without
    RDMA, or fails. When `close` has returned, no other machine accesses the memory.
    """

    def __init__(self, length: int, unregister: "Callable[[Registration], None] | None" = None) -> None:
        self.length = length
        """Length in bytes."""
        self.registered = False
        """Whether it is registered with an RDMA device; always false without RDMA."""
        self.problem = ""
        """Why the registration failed, if it was tried after `register` had returned.
        """
        self.view = memoryview(b"")
        self.device_memory: DeviceMemory | None = None
        self._unregister = unregister

    def close(self) -> None:
        """Unregister the memory. Idempotent."""
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
