"""`KeptError`: it says what the error said, in the same class, and keeps nothing of
where it was.
"""

import errno
import traceback
from typing import Any
from weakref import ref

import pytest

from infinistore import errors
from infinistore.kept_errors import KeptError
from infinistore.tensors import BlocksMissing


class Told(Exception):
    """An error whose constructor makes the message."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} was told")
        self.what = what


class Counted(Exception):
    """An error whose constructor takes what is not in its arguments."""

    def __init__(self, name: str, *, count: int) -> None:
        super().__init__(f"{name}: {count}")
        self.count = count


def undecodable() -> UnicodeDecodeError:
    with pytest.raises(UnicodeDecodeError) as caught:
        b"\xff".decode()
    return caught.value


ERRORS = [
    *(
        kind("what is wrong")
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ),
    BlocksMissing(["a", "b"], 3),
    KeyError("key"),
    FileNotFoundError(errno.ENOENT, "No such file or directory", "/nowhere"),
    undecodable(),
    Told("nothing"),
    Counted("blocks", count=7),
    KeyboardInterrupt(),
]


def attributes(error: BaseException) -> dict[str, Any]:
    return {name: value for name, value in vars(error).items() if name != "__notes__"}


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_it_says_the_same_however_often_it_is_raised(error: BaseException) -> None:
    kept = KeptError(error)
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            raise kept.again()
        assert type(caught.value) is type(error)
        assert (str(caught.value), repr(caught.value)) == (str(error), repr(error))
        assert caught.value.args == error.args and attributes(caught.value) == attributes(error)


def test_it_has_no_traceback_no_cause_and_no_context() -> None:
    def fail() -> None:
        try:
            raise OSError("the reason")
        except OSError as reason:
            raise errors.StoreUnavailable("gone") from reason

    with pytest.raises(errors.StoreUnavailable) as caught:
        fail()
    again = KeptError(caught.value).again()
    assert (again.__traceback__, again.__cause__, again.__context__) == (None, None, None)


def test_raising_it_adds_nothing_to_it() -> None:
    class Tensor:
        pass

    def forward(kept: KeptError) -> "ref[Tensor]":
        tensor = Tensor()
        with pytest.raises(errors.StoreUnavailable):
            raise kept.again()
        return ref(tensor)

    kept = KeptError(errors.StoreUnavailable("gone"))
    assert forward(kept)() is None


def test_it_tells_where_it_was_raised_first() -> None:
    def put_blocks() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        put_blocks()
    again = KeptError(KeptError(caught.value).again()).again()
    again.add_note("of mine")
    text = "".join(traceback.format_exception(again))
    assert text.count("raised first in put_blocks, ") == 1 and __file__ in text
    assert getattr(KeptError(caught.value).again(), "__notes__", []) != getattr(again, "__notes__", [])


def test_a_group_is_kept_with_what_is_in_it() -> None:
    def fail() -> None:
        raise OSError("one")

    with pytest.raises(OSError, match="one") as caught:
        fail()
    again = KeptError(ExceptionGroup("several", [caught.value, ExceptionGroup("more", [Told("two")])])).again()
    assert repr(again) == "ExceptionGroup('several', [OSError('one'), ExceptionGroup('more', [Told('two was told')])])"
    assert isinstance(again, ExceptionGroup) and again.exceptions[0].__traceback__ is None
