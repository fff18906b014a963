"""Tensors as data: stored and read into byte for byte; what is not its own bytes is
refused with the remedy.
"""

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from infinistore.client.memory.buffers import readable, writable

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some types are experimental, and say so
    TORCH_DTYPES = sorted(
        {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and "q" not in str(dtype)}, key=str
    )


def test_a_tensor_is_seen_as_its_bytes() -> None:
    view = readable(torch.tensor([97, 98, 99], dtype=torch.uint8))
    assert bytes(view) == b"abc"
    assert (view.format, view.ndim) == ("B", 1)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 2)], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tensors_of_every_type(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    made = torch.empty(shape, dtype=dtype)
    view = writable(made)
    assert len(view) == made.numel() * made.element_size()
    view[:] = bytes(range(len(view)))
    # The same memory, seen again through torch.
    assert bytes(readable(made.clone() if dtype.itemsize > 1 else made)) == bytes(range(len(view)))


def test_a_tensor_that_requires_its_gradient_is_stored_as_its_values() -> None:
    tensor = torch.tensor([1.0, 2.0], requires_grad=True)
    assert bytes(readable(tensor)) == np.array([1.0, 2.0], np.float32).tobytes()
    assert tensor.requires_grad
    parameter = torch.nn.Parameter(torch.zeros(2))
    writable(parameter)[:] = np.array([3.0, 4.0], np.float32).tobytes()
    assert parameter.tolist() == [3.0, 4.0]


def test_a_slice_that_is_contiguous_is_its_own_bytes_only() -> None:
    tensor = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    assert bytes(readable(tensor[1])) == bytes([4, 5, 6, 7])


@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(4, 4).T,
        torch.zeros(8)[::2],
        torch.zeros(1).expand(3),
        torch.zeros(3, dtype=torch.complex64).conj().imag,
        torch.eye(3).to_sparse(),
    ],
    ids=["transposed", "every other", "expanded", "imaginary part", "sparse"],
)
@pytest.mark.parametrize("use", [readable, writable])
def test_a_tensor_that_is_not_contiguous_is_refused_with_the_remedy(data: torch.Tensor, use: Any) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        use(data)


@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(3, device="meta"),
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.zeros(3, dtype=torch.complex64).conj().imag.reshape(1, 3)[:, :1],
    ],
    ids=["no memory", "conjugate", "negative"],
)
@pytest.mark.parametrize("use", [readable, writable])
def test_tensors_whose_bytes_are_not_their_values_are_refused(data: torch.Tensor, use: Any) -> None:
    with pytest.raises(ValueError, match=r"move it to the CPU|resolve"):
        use(data)


def test_an_empty_tensor_cannot_be_stored_and_nothing_can_be_read_into_it() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        readable(torch.zeros(0))
    assert len(writable(torch.zeros(0))) == 0
