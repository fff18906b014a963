"""What can be stored and read into: every buffer, byte for byte; what is no buffer is
refused by name.
"""

import array
import ctypes
import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as st_numpy

from infinistore.client.memory.buffers import plain_bytes, readable, writable

NUMPY_DTYPES = [
    *"?bBhHiIlLqQefdgFDG",
    "S5",
    "U3",
    "V7",
    "M8[ns]",
    "m8[s]",
    ">i4",
    ">f8",
    [("key", "<i4"), ("value", "<f8", (2,))],
]


def type_name(data: object) -> str:
    return type(data).__name__


@pytest.mark.parametrize(
    "data",
    [
        b"abc",
        bytearray(b"abc"),
        memoryview(b"abc"),
        memoryview(b"xabcx")[1:4],
        array.array("B", b"abc"),
        (ctypes.c_ubyte * 3)(*b"abc"),
        np.frombuffer(b"abc", np.uint8),
    ],
    ids=type_name,
)
def test_any_buffer_is_seen_as_its_bytes(data: Any) -> None:
    view = readable(data)
    assert bytes(view) == b"abc"
    assert (view.format, view.ndim) == ("B", 1)


def test_a_batch_of_plain_bytes_is_seen_as_each_of_them_is() -> None:
    plain: list[Any] = [
        b"abc",
        bytearray(b"de"),
        memoryview(b"xfgx")[1:3],
        array.array("B", b"h"),
        np.frombuffer(b"ij", np.uint8),
    ]
    assert plain_bytes(plain) == [readable(data) for data in plain] == [b"abc", b"de", b"fg", b"h", b"ij"]
    odd: Any
    for odd in (b"", memoryview(b"abcd")[::2], array.array("i", [1]), np.zeros((2, 2), np.uint8), np.zeros(()), "text"):
        assert plain_bytes([*plain, odd]) is None
    gone = memoryview(b"abc")
    gone.release()
    assert plain_bytes([*plain, gone]) is None


def test_a_mapping_can_be_stored_and_read_into() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        view = writable(memory)
        view[:3] = b"abc"
        assert bytes(readable(memory)[:3]) == b"abc"
        view.release()


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 2)], ids=str)
def test_numpy_arrays_of_every_type(dtype: Any, shape: tuple[int, ...]) -> None:
    made = np.zeros(shape, dtype=dtype)
    data = bytes(range(made.nbytes))
    values = np.frombuffer(data, dtype=dtype).reshape(shape)
    assert bytes(readable(values)) == data
    writable(made)[:] = data
    assert made.tobytes() == data


@given(st_numpy.arrays(st_numpy.scalar_dtypes(), st_numpy.array_shapes(min_dims=0, max_dims=3, max_side=4)))
def test_numpy_arrays_of_any_shape(values: "np.ndarray[Any, Any]") -> None:
    expected = values.tobytes()
    if expected:
        assert bytes(readable(values)) == expected


def test_a_slice_that_is_contiguous_is_its_own_bytes_only() -> None:
    assert bytes(readable(np.arange(12, dtype=np.uint8).reshape(3, 4)[1:])) == bytes(range(4, 12))


@pytest.mark.parametrize(
    "data",
    [
        np.zeros((4, 4)).T[1:],
        np.zeros((4, 4), order="F"),
        np.zeros(8)[::2],
        np.zeros((4, 4), "M8[s]").T[1:],
        memoryview(bytes(8))[::2],
    ],
    ids=lambda data: f"{type(data).__name__} {getattr(data, 'shape', '')}",
)
@pytest.mark.parametrize("use", [readable, writable])
def test_what_is_not_contiguous_is_refused_with_the_remedy(data: Any, use: Any) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        use(data)


@pytest.mark.parametrize("data", [np.array([object()]), np.array([(1, object())], dtype="i4,O")], ids=["O", "record"])
@pytest.mark.parametrize("use", [readable, writable])
def test_arrays_of_objects_are_refused(data: Any, use: Any) -> None:
    """Their bytes are addresses, which mean nothing later, and to write any would
    crash.
    """
    with pytest.raises(TypeError, match="object"):
        use(data)


@pytest.mark.parametrize("data", ["text", 5, None, [1, 2], object(), {"a": 1}, 1.5, (b"a",)], ids=type_name)
@pytest.mark.parametrize("use", [readable, writable])
def test_what_has_no_bytes_is_refused_by_the_name_of_its_type(data: Any, use: Any) -> None:
    with pytest.raises(TypeError, match=type(data).__name__):
        use(data)


def test_memory_that_is_gone_is_refused() -> None:
    released = memoryview(b"abc")
    released.release()
    closed = mmap.mmap(-1, mmap.PAGESIZE)
    closed.close()
    for data in (released, closed):
        with pytest.raises(ValueError, match=r"released|closed"):
            readable(data)


@pytest.mark.parametrize("data", [b"", bytearray(), np.zeros(0), np.zeros((3, 0)), memoryview(b"")], ids=type_name)
def test_nothing_cannot_be_stored(data: Any) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        readable(data)


def test_nothing_can_be_read_into() -> None:
    for buffer in (bytearray(), np.zeros(0)):
        assert len(writable(buffer)) == 0


def test_what_cannot_be_written_is_no_place_to_read_into() -> None:
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    for buffer in (b"abc", memoryview(bytearray(3)).toreadonly(), frozen):
        with pytest.raises(TypeError, match="read-only"):
            writable(buffer)
