"""Which bytes of a tensor a block is: checked offsets, and their memory.

An offset counts bytes of the tensor's elements in logical order, as in
`tensor.contiguous()`; in a contiguous tensor it is the distance from the first byte. So
a block has the same values whatever the strides are, and only the tensor's own elements
are read or written. A contiguous block is used in place. If one block is not
contiguous, one call gathers all blocks into a contiguous tensor, or scatters them from
one.

PyTorch is not imported before the caller passes a tensor.
"""

import math
import operator
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from infinistore.keys import check_distinct, check_keys

if TYPE_CHECKING:
    import torch

Blocks: TypeAlias = Sequence[tuple[str, int]]
"""Pairs of a key and the offset of its block in the tensor, in bytes."""

_INTEGER_OF_BYTES = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


@attrs.frozen(eq=False)
class TensorBlocks:
    """Blocks of one tensor, each of `block_bytes` bytes.

    `starts` are the offsets of the blocks in the tensor's storage, in bytes; None if a
    block is not contiguous. `offsets` are those in logical order.
    """

    tensor: "torch.Tensor"
    keys: list[str]
    offsets: list[int]
    block_bytes: int
    starts: list[int] | None

    @property
    def total_bytes(self) -> int:
        """The bytes of all blocks together."""
        return len(self.keys) * self.block_bytes

    def gather(self) -> "torch.Tensor":
        """Copy the blocks into a new contiguous tensor on the same device.

        It is of uint8, with one row for each block.
        """
        import torch

        with torch.inference_mode():
            elements, index = self._rows()
            return elements[index].contiguous().view(-1).view(torch.uint8).view(len(self.keys), self.block_bytes)

    def new_rows(self) -> "torch.Tensor":
        """Return an uninitialised tensor like that of `gather`, on the same device."""
        import torch

        with torch.inference_mode():
            return torch.empty((len(self.keys), self.block_bytes), dtype=torch.uint8, device=self.tensor.device)

    def scatter(self, rows: "torch.Tensor") -> None:
        """Copy a contiguous tensor like that of `gather` into the blocks."""
        import torch

        with torch.inference_mode():  # or a tensor that was made in it could not be written
            elements, index = self._rows()
            elements[index] = rows.view(-1).view(elements.dtype).view(-1, *elements.shape[len(index) :])

    def _rows(self) -> "tuple[torch.Tensor, tuple[torch.Tensor, ...]]":
        """Return the tensor as integers, and which of its rows the blocks consist of.

        A row spans the last dimensions, as many as still divide every offset and the
        block: fewer rows are copied faster.
        """
        import torch

        elements = self.tensor.view(getattr(torch, _INTEGER_OF_BYTES[self.tensor.element_size()]))
        if not elements.dim():
            elements = elements.view(1)
        shape = elements.shape
        common = math.gcd(self.block_bytes, *self.offsets)
        row_bytes = elements.element_size()
        leading = len(shape)
        while leading > 1 and common % (row_bytes * shape[leading - 1]) == 0:
            leading -= 1
            row_bytes *= shape[leading]
        first = torch.tensor(self.offsets, dtype=torch.int64, device=elements.device) // row_bytes
        rows = (first[:, None] + torch.arange(self.block_bytes // row_bytes, device=elements.device)).view(-1)
        return elements, torch.unravel_index(rows, shape[:leading])


def blocks_to_write(tensor: Any, blocks: Blocks, block_size_bytes: int) -> TensorBlocks:
    """Check blocks to store.

    Raises:
        TypeError: not a tensor, not keys, or not whole numbers.
        ValueError: a block outside the tensor, a duplicate key, or a tensor whose
            memory does not hold its values.
    """
    checked = _check(tensor, blocks, block_size_bytes)
    check_distinct(checked.keys)
    return checked


def blocks_to_read(tensor: Any, blocks: Blocks, block_size_bytes: int) -> TensorBlocks:
    """Check blocks to read into. Raises as `blocks_to_write`.

    Also raises `ValueError` if two blocks overlap.
    """
    checked = _check(tensor, blocks, block_size_bytes)
    if _may_overlap_itself(checked.tensor):
        raise ValueError("elements of this tensor share their memory (it was expanded); read into a tensor of its own")
    ordered = sorted(checked.offsets)
    for before, after in pairwise(ordered):
        if after - before < block_size_bytes:
            raise ValueError(
                f"the blocks at bytes {before} and {after} overlap: each has {block_size_bytes} bytes; keep offsets"
                " that far apart"
            )
    return checked


def bytes_of_storage(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the storage of a tensor of any dtype as uint8: the same memory, flat."""
    import torch

    storage = tensor.untyped_storage()
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(storage, 0, (storage.nbytes(),), (1,))


def _check(tensor: Any, blocks: Blocks, block_bytes: int) -> TensorBlocks:
    checked = _check_tensor(tensor)
    size = _whole_number("block_size_bytes", block_bytes)
    if size < 1:
        raise ValueError(f"block_size_bytes must be above 0, not {size}")
    keys, offsets = _columns(blocks)
    check_keys(keys)
    length = checked.nbytes
    if offsets and (min(offsets) < 0 or max(offsets) + size > length):
        key, offset = next(pair for pair in zip(keys, offsets, strict=True) if not 0 <= pair[1] <= length - size)
        raise ValueError(
            f"the block {key[:100]!r} would be bytes {offset} to {offset + size} of a tensor of {length} bytes; offsets"
            " and the block size are in bytes, not in elements"
        )
    starts = _starts(checked, offsets, size)
    if starts is None and math.gcd(size, *offsets) % checked.element_size():
        raise ValueError(
            f"the tensor is not contiguous, so offsets and block size must be multiples of its {checked.element_size()}"
            "-byte elements; or pass tensor.contiguous()"
        )
    return TensorBlocks(checked, keys, offsets, size, starts)


def _check_tensor(tensor: Any) -> "torch.Tensor":
    if "torch" not in sys.modules or not isinstance(tensor, sys.modules["torch"].Tensor):
        raise TypeError(
            f"give a PyTorch tensor, not {type(tensor).__name__}; for other buffers there are put_many and"
            " get_many_into of the store"
        )
    import torch

    if tensor.is_nested:
        raise ValueError("a nested tensor has no one shape; pass the tensors of tensor.unbind() one by one")
    if tensor.layout is not torch.strided:
        raise ValueError(f"a tensor of layout {tensor.layout} has no blocks of bytes; pass tensor.to_dense()")
    if tensor.is_quantized:
        raise ValueError("a quantised tensor keeps its scales beside its bytes; pass tensor.int_repr()")
    if not tensor.is_cpu:
        _check_device(tensor)
    if not _has_memory(tensor):
        raise ValueError("the tensor has no memory of its own (a meta or fake tensor); pass a real one")
    if tensor.requires_grad:
        raise ValueError("the tensor requires its gradient; pass tensor.detach(), or compute under torch.no_grad()")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            "the tensor is a lazy conjugate or negative: its memory does not hold its values; pass"
            " tensor.resolve_conj().resolve_neg()"
        )
    checked: torch.Tensor = tensor
    return checked


def _check_device(tensor: "torch.Tensor") -> None:
    kind = tensor.device.type
    if kind == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError(
                f"the tensor is on {tensor.device}, and PyTorch finds no usable CUDA here (torch.cuda.is_available() is"
                " False): install a CUDA build of PyTorch and its driver, or pass tensor.cpu()"
            )
    elif kind not in ("cpu", "meta"):
        raise ValueError(
            f"the tensor is on {tensor.device}; blocks are moved from and to CPU and CUDA: pass tensor.cpu()"
        )


def _has_memory(tensor: "torch.Tensor") -> bool:
    import torch

    try:
        # A fake tensor, which has a type of its own, says that it is on a device, but
        # its storage is not.
        if type(tensor) is not torch.Tensor and tensor.untyped_storage().device != tensor.device:
            return False
        return bool(tensor.data_ptr() or not tensor.numel())
    except (NotImplementedError, RuntimeError):  # a wrapper without storage: inside torch.func or torch.compile
        return False


def _columns(blocks: Blocks) -> tuple[list[str], list[int]]:
    pairs = list(blocks)
    if not pairs:
        return [], []
    try:
        keys, offsets = zip(*pairs, strict=True)
    except (TypeError, ValueError):
        raise TypeError("give blocks as pairs (key, offset in bytes)") from None
    try:
        return list(keys), list(map(operator.index, offsets))
    except TypeError:
        return list(keys), [_whole_number("an offset", offset) for offset in offsets]  # which raises, and says why


def _whole_number(what: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is a whole number of bytes, not {type(value).__name__}") from None


def _starts(tensor: "torch.Tensor", offsets: list[int], size: int) -> list[int] | None:
    """Return where the blocks start in the storage; None if one is not contiguous."""
    first = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.is_contiguous():
        return [first + offset for offset in offsets] if first else offsets
    spans = _spans(tensor)
    run_bytes = tensor.element_size()
    if spans and spans[-1][1] == 1:
        run_bytes *= spans.pop()[0]
    starts: list[int] = []
    for offset in offsets:
        run, start = divmod(offset, run_bytes)
        if start + size > run_bytes:
            return None
        elements = 0
        for count, stride in reversed(spans):
            run, at = divmod(run, count)
            elements += at * stride
        starts.append(first + elements * tensor.element_size() + start)
    return starts


def _spans(tensor: "torch.Tensor") -> list[tuple[int, int]]:
    """Return length and stride of the dimensions, adjacent ones merged, in elements."""
    spans: list[tuple[int, int]] = []
    for count, stride in zip(map(int, tensor.shape), map(int, tensor.stride()), strict=True):
        if count == 1:
            continue
        if spans and spans[-1][1] == stride * count:
            spans[-1] = (spans[-1][0] * count, stride)
        else:
            spans.append((count, stride))
    return spans


def _may_overlap_itself(tensor: "torch.Tensor") -> bool:
    if tensor.is_contiguous():
        return False
    reach = 0
    for count, stride in sorted(_spans(tensor), key=operator.itemgetter(1)):
        if stride <= reach:
            return True
        reach += (count - 1) * stride
    return False
