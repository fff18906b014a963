"""`write_blocks` and `read_blocks`: the tensor's bytes, for every dtype and stride;
what cannot be is refused.
"""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import infinistore
from infinistore import aio, blocking
from infinistore.blocking import BlockingStore
from infinistore.errors import KeyNotFound, StoreUnavailable, ValueTooLarge
from infinistore.tensors import BlockSizeMismatch, BlocksMissing, read_blocks, write_blocks
from tests.tables import for_each
from tests.tensors.contents import DTYPES, as_bytes, random_bytes

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def test_blocks_of_a_tensor_come_back_where_they_were(any_store: BlockingStore) -> None:
    tensor = random_bytes(8, 65536)
    blocks = [(f"block {i}", i * 65536) for i in range(8)]
    write_blocks(any_store, blocks, 65536, tensor)
    back = torch.zeros_like(tensor)
    read_blocks(any_store, blocks[3:6], 65536, back)
    assert torch.equal(back[3:6], tensor[3:6])
    assert not back[:3].any() and not back[6:].any()


@for_each(dtype=DTYPES, scattered=[False, True])
def test_tensors_of_every_dtype(store: BlockingStore, dtype: torch.dtype, scattered: bool) -> None:
    store.purge()
    source, target = random_bytes(6, 4, dtype.itemsize), torch.zeros(6, 4, dtype.itemsize, dtype=torch.uint8)
    tensor, back = (made.view(dtype)[..., 0] for made in (source, target))
    expected = as_bytes(source)
    if scattered:  # columns of a matrix: no two neighbours of a block are neighbours in memory
        tensor, back = tensor.T, back.T
        expected = as_bytes(source.transpose(0, 1))
    half = 12 * dtype.itemsize
    write_blocks(store, [("first", 0), ("second", half)], half, tensor)
    assert store.get("first") + store.get("second") == expected
    read_blocks(store, [("first", 0), ("second", half)], half, back)
    assert torch.equal(target, source)


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    """A view of a tensor: sliced, with steps, permuted, somewhere in its storage; of
    some element size.
    """
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    itemsize = draw(st.sampled_from([1, 2, 4, 8, 16]))
    dtype = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.int32, 8: torch.complex64, 16: torch.complex128}
    made = random_bytes(*shape, itemsize, seed=draw(st.integers(0, 3))).view(dtype[itemsize])[..., 0]
    for dimension, count in enumerate(shape):
        start = draw(st.integers(0, count - 1))
        step = draw(st.integers(1, 2))
        made = made[(slice(None),) * dimension + (slice(start, None, step),)]
    return made.permute(draw(st.permutations(range(len(shape)))))


@given(tensor=strided(), data=st.data())
def test_any_blocks_of_any_strides_are_the_bytes_of_the_contiguous_tensor(
    shared_store: BlockingStore, tensor: torch.Tensor, data: st.DataObject
) -> None:
    expected = as_bytes(tensor)
    unit = tensor.element_size()
    size = unit * data.draw(st.integers(1, len(expected) // unit))
    offsets = data.draw(st.lists(st.integers(0, (len(expected) - size) // unit).map(lambda at: at * unit), max_size=4))
    blocks = [(f"block {number}", offset) for number, offset in enumerate(offsets)]
    write_blocks(shared_store, blocks, size, tensor)
    for key, offset in blocks:
        assert shared_store.get(key) == expected[offset : offset + size]

    first = [block for at, block in enumerate(blocks) if all(abs(block[1] - b[1]) >= size for b in blocks[:at])]
    storage = torch.full((tensor.untyped_storage().nbytes(),), 0xA5, dtype=torch.uint8)
    target = torch.empty(0, dtype=tensor.dtype).set_(
        storage.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    untouched = bytearray(as_bytes(target))
    outside = int((storage == 0xA5).sum())
    read_blocks(shared_store, first, size, target)
    for _, offset in first:
        untouched[offset : offset + size] = expected[offset : offset + size]
    assert as_bytes(target) == bytes(untouched)
    assert int((storage == 0xA5).sum()) >= outside - size * len(first)


@pytest.fixture(scope="module")
def shared_store() -> Any:
    """One store for all examples of a property."""
    with blocking.open_store(pool_bytes=4 << 20, minimal_allocate_bytes=64) as opened:
        yield opened


@given(offset=st.integers(-20, 60), size=st.integers(-2, 60), start=st.integers(0, 40))
def test_a_block_is_inside_the_tensor_or_refused(
    shared_store: BlockingStore, offset: int, size: int, start: int
) -> None:
    """Even where the storage goes on: the tensor is a window of it."""
    tensor = random_bytes(60)[start : start + 20]
    length = len(tensor)
    if size > 0 and 0 <= offset <= length - size:
        write_blocks(shared_store, [("key", offset)], size, tensor)
        assert shared_store.get("key") == bytes(tensor[offset : offset + size].numpy())
    else:
        shared_store.purge()
        for call in (write_blocks, read_blocks):
            with pytest.raises(ValueError, match=r"bytes|above 0"):
                call(shared_store, [("key", offset)], size, tensor)
        assert not shared_store.exists("key")


def test_nothing_to_write_or_read_is_nothing(any_store: BlockingStore) -> None:
    write_blocks(any_store, [], 4, torch.zeros(4))
    read_blocks(any_store, [], 4, torch.zeros(4))
    write_blocks(any_store, [], 4, torch.zeros(0))


def test_a_part_of_a_batch_that_is_scattered_makes_no_difference(store: BlockingStore) -> None:
    tensor = random_bytes(4, 6, 8)[:, :4]  # rows of 32 bytes in one piece, and a gap after each
    blocks = [("inside", 32), ("across", 80)]
    write_blocks(store, blocks, 32, tensor)
    assert store.get("inside") == as_bytes(tensor)[32:64]
    assert store.get("across") == as_bytes(tensor)[80:112]


def test_tensors_made_in_inference_mode(store: BlockingStore) -> None:
    with torch.inference_mode():
        tensor, target = torch.arange(12.0).view(3, 4), torch.zeros(4, 3)
    write_blocks(store, [("key", 0)], 48, tensor.T)
    read_blocks(store, [("key", 0)], 48, target)
    assert torch.equal(target, tensor.T)
    read_blocks(store, [("key", 0)], 48, tensor.T)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")])
def test_what_surrounds_a_call_makes_no_difference(store: BlockingStore, around: Any, scattered: bool) -> None:
    tensor, target = random_bytes(4, 100), torch.zeros(4, 100, dtype=torch.uint8)
    if scattered:
        tensor, target = tensor.T, target.T
    blocks = [("a", 100), ("b", 300)]
    with around():
        write_blocks(store, blocks, 100, tensor)
        read_blocks(store, blocks, 100, target)
    assert as_bytes(target) == bytes(100) + as_bytes(tensor)[100:200] + bytes(100) + as_bytes(tensor)[300:]


async def test_with_trio_it_is_awaited() -> None:
    tensor, back = random_bytes(3, 100), torch.zeros(3, 100, dtype=torch.uint8)
    async with infinistore.open_store(pool_bytes=1 << 20) as store:
        await write_blocks(store, [("a", 0), ("b", 200)], 100, tensor)
        await read_blocks(store, [("a", 0), ("b", 200)], 100, back)
        assert torch.equal(back[[0, 2]], tensor[[0, 2]])
        await read_blocks(store, [("a", 0)], 100, back.T)
        with pytest.raises(BlocksMissing, match="1 of 2"):
            await read_blocks(store, [("a", 0), ("none", 100)], 100, back)


def test_with_asyncio_it_is_awaited() -> None:
    async def main() -> None:
        tensor, back = random_bytes(3, 100), torch.zeros(3, 100, dtype=torch.uint8)
        async with aio.open_store(pool_bytes=1 << 20) as store:
            await write_blocks(store, [("a", 0), ("b", 200)], 100, tensor.T)
            await read_blocks(store, [("a", 0), ("b", 200)], 100, back.T)
            assert (
                as_bytes(back.T)[:100] + as_bytes(back.T)[200:] == as_bytes(tensor.T)[:100] + as_bytes(tensor.T)[200:]
            )

    asyncio.run(main())


# What cannot be


def test_missing_blocks_are_named(any_store: BlockingStore) -> None:
    write_blocks(any_store, [("there", 0)], 4, torch.zeros(1))
    with pytest.raises(BlocksMissing, match=r"2 of 3 blocks are not in the store, first 'gone'") as caught:
        read_blocks(any_store, [("gone", 0), ("there", 4), ("away", 8)], 4, torch.zeros(3))
    assert caught.value.keys == ["gone", "away"]
    assert isinstance(caught.value, KeyNotFound)


@pytest.mark.parametrize("length", [3, 5])
@pytest.mark.parametrize("scattered", [False, True])
def test_a_block_of_another_length_is_an_error(any_store: BlockingStore, length: int, scattered: bool) -> None:
    any_store.put("key", bytes(length))
    target = torch.ones(2, 8, dtype=torch.uint8)
    with pytest.raises(BlockSizeMismatch, match=f"{length} bytes"):
        read_blocks(any_store, [("key", 0)], 4, target.T if scattered else target)


REFUSED = {
    "list": ([1, 2], TypeError, "give a PyTorch tensor, not list"),
    "array": (np.zeros(4), TypeError, "give a PyTorch tensor, not ndarray"),
    "gradient": (torch.zeros(4, requires_grad=True), ValueError, r"detach\(\)"),
    "meta": (torch.zeros(4, device="meta"), ValueError, "no memory"),
    "sparse": (torch.eye(4).to_sparse(), ValueError, r"to_dense\(\)"),
    "conjugate": (torch.zeros(4, dtype=torch.complex64).conj(), ValueError, r"resolve_conj\(\)"),
    "negative": (torch.zeros(4, dtype=torch.complex64).conj().imag, ValueError, r"resolve_neg\(\)"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("call", [write_blocks, read_blocks])
def test_what_has_no_plain_bytes_is_refused_with_the_remedy(store: BlockingStore, call: Any, what: str) -> None:
    tensor, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        call(store, [("key", 0)], 4, tensor)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_quantised_tensor_is_refused(store: BlockingStore) -> None:
    with pytest.raises(ValueError, match=r"int_repr\(\)"):
        write_blocks(store, [("key", 0)], 4, torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8))


def test_a_tensor_inside_a_transformation_is_refused(store: BlockingStore) -> None:
    def write(tensor: torch.Tensor) -> torch.Tensor:
        write_blocks(store, [("key", 0)], 4, tensor)
        return tensor

    with pytest.raises(ValueError, match="no memory"):
        torch.func.vmap(write)(torch.zeros(2, 4))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_is_refused(store: BlockingStore, layout: torch.layout) -> None:
    tensor = torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], layout=layout)
    with pytest.raises(ValueError, match=r"unbind\(\)"):
        write_blocks(store, [("key", 0)], 4, tensor)


def test_a_fake_tensor_is_refused(store: BlockingStore) -> None:
    with FakeTensorMode():
        tensor = torch.zeros(4)
    with pytest.raises(ValueError, match="no memory"):
        write_blocks(store, [("key", 0)], 4, tensor)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA can be used here")
@pytest.mark.parametrize("call", [write_blocks, read_blocks])
def test_a_cuda_tensor_without_cuda_is_one_clear_error(store: BlockingStore, call: Any) -> None:
    with FakeTensorMode():
        tensor = torch.zeros(4, device="cuda")
    with pytest.raises(ValueError, match=r"on cuda:0, and PyTorch finds no usable CUDA here.*tensor\.cpu\(\)"):
        call(store, [("key", 0)], 4, tensor)


@pytest.mark.parametrize(
    ("blocks", "size", "error", "message"),
    [
        ([("a", 0), ("a", 4)], 4, ValueError, "twice"),
        ([("", 0)], 4, ValueError, "empty"),
        ([(1, 0)], 4, TypeError, "key 0 is int"),
        ([("a", 1.5)], 4, TypeError, "an offset is a whole number of bytes, not float"),
        ([("a", 0)], "4", TypeError, "block_size_bytes is a whole number of bytes, not str"),
        (["ab", "c"], 4, TypeError, "pairs"),
        ([("a", 0), "b"], 4, TypeError, "pairs"),
        ([("a",)], 4, TypeError, "pairs"),
    ],
)
def test_wrong_blocks_are_refused(
    store: BlockingStore, blocks: Any, size: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        write_blocks(store, blocks, size, torch.zeros(16))
    assert store.keys() == []


def test_offsets_within_an_element_need_a_contiguous_tensor(store: BlockingStore) -> None:
    tensor = torch.arange(16.0).view(4, 4)
    write_blocks(store, [("key", 1)], 6, tensor)
    assert store.get("key") == as_bytes(tensor)[1:7]
    with pytest.raises(ValueError, match=r"4-byte elements; or pass tensor\.contiguous\(\)"):
        write_blocks(store, [("key", 1)], 6, tensor.T)


def test_blocks_that_would_be_read_into_the_same_place_are_refused(store: BlockingStore) -> None:
    with pytest.raises(ValueError, match="overlap"):
        read_blocks(store, [("a", 0), ("b", 3)], 4, torch.zeros(4))
    with pytest.raises(ValueError, match="share their memory"):
        read_blocks(store, [("a", 0)], 4, torch.zeros(1, 4).expand(4, 4))
    with pytest.raises(ValueError, match="share their memory"):
        read_blocks(store, [("a", 0)], 4, torch.zeros(8).unfold(0, 4, 1))
    write_blocks(store, [("a", 0), ("b", 3)], 4, torch.zeros(4))
    write_blocks(store, [("c", 0)], 64, torch.ones(1, 4).expand(4, 4))
    assert store.get("c") == np.ones(16, np.float32).tobytes()


def test_a_store_that_is_none_is_refused() -> None:
    for call in (write_blocks, read_blocks):
        with pytest.raises(TypeError, match="open_store"):
            call("tcp://127.0.0.1", [("a", 0)], 4, torch.zeros(4))  # type: ignore[call-overload]


def test_errors_of_the_store_are_the_stores(store: BlockingStore) -> None:
    with pytest.raises(ValueTooLarge):
        write_blocks(store, [("a", 0)], 20 << 20, torch.zeros(20 << 20, dtype=torch.uint8))
    with blocking.open_store(pool_bytes=1 << 20) as closed:
        pass
    with pytest.raises(StoreUnavailable):
        write_blocks(closed, [("a", 0)], 4, torch.zeros(4))
