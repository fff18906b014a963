"""The errors of tensors, in addition to those of `infinistore.errors`."""

from infinistore.errors import InfiniStoreException, KeyNotFound


class BlocksMissing(KeyNotFound):
    """Some blocks do not exist: those of `keys`.

    The contents of their part of the tensor are undefined.
    """

    def __init__(self, keys: list[str], asked: int) -> None:
        super().__init__(f"{len(keys)} of {asked} blocks are not in the store, first {keys[0][:100]!r}")
        self.keys = keys


class BlockSizeMismatch(InfiniStoreException):
    """A stored block is longer or shorter than the block to read."""


class CudaError(InfiniStoreException):
    """A CUDA call failed. The message contains the call and CUDA's error."""
