"""The errors of tensors, beside those of `infinistore.errors`."""

from infinistore.errors import InfiniStoreException, KeyNotFound

__all__ = ["BlockSizeMismatch", "BlocksMissing", "CudaError"]


class BlocksMissing(KeyNotFound):
    """Some blocks are not in the store. `keys` says which; what is in their part of the tensor is undefined."""

    def __init__(self, keys: list[str], asked: int) -> None:
        super().__init__(f"{len(keys)} of {asked} blocks are not in the store, first {keys[0][:100]!r}")
        self.keys = keys


class BlockSizeMismatch(InfiniStoreException):
    """A stored block has another length than the block it was to be read into."""


class CudaError(InfiniStoreException):
    """A call to CUDA failed. The message names the call and what CUDA said."""
