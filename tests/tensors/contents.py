"""What is in the tensors of these tests: elements of any type, random bytes."""

import warnings

import torch

__all__ = ["DTYPES", "as_bytes", "random_bytes"]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some types are experimental, and say so
    DTYPES = sorted(
        {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and "q" not in str(dtype)}, key=str
    )


def random_bytes(*shape: int, seed: int = 1) -> torch.Tensor:
    """A uint8 tensor of random bytes."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements in logical order, found another way than the
    package does: by copying.
    """
    return bytes(tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy())
