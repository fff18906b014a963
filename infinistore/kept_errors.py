"""Storable errors, to be raised later, in another thread, or more than once.

An exception has a traceback with the frames that it passed through. A frame refers to
its callers' frames, and all of them to their local variables: tensors, views of the
pool. Each raise of the same exception adds more frames, which live as long as the
exception. A variable of the raising frame is enough to keep it: both then wait for the
garbage collector.

Therefore nothing in this package stores an exception or raises one that anything else
refers to. An error is stored as a `KeptError`; `raise kept.again()` raises a new
exception each time.
"""

import copy


class KeptError:
    """An error's class, arguments, attributes and notes, without traceback and cause.

    A note, which Python prints below a traceback, says where it was first raised.
    """

    __slots__ = ("_error",)

    def __init__(self, error: BaseException) -> None:
        self._error = _copied(error)
        if (traceback := error.__traceback__) is not None:
            while traceback.tb_next is not None:
                traceback = traceback.tb_next
            code = traceback.tb_frame.f_code
            self._error.add_note(f"raised first in {code.co_name}, {code.co_filename}:{traceback.tb_lineno}")

    def __repr__(self) -> str:
        return f"KeptError({self._error!r})"

    @property
    def kind(self) -> type[BaseException]:
        """The class of the error."""
        return type(self._error)

    def again(self) -> BaseException:
        """Return a new, equal exception, to be raised at once."""
        return _copied(self._error)


def _copied(error: BaseException) -> BaseException:
    if isinstance(error, BaseExceptionGroup):
        return error.derive([_copied(one) for one in error.exceptions])
    try:
        made = copy.copy(error)
    except Exception:  # noqa: BLE001 - its constructor takes something else than what the error has as arguments
        made = type(error).__new__(type(error))
        made.__dict__.update(error.__dict__)
    made.args = error.args  # a constructor that makes its message of them has made one of that message
    if notes := getattr(error, "__notes__", None):
        made.__notes__ = list(notes)
    return made
