"""A wall clock that can be set, for single programs, by libfaketime: the machine's own
is left alone. Programs of Go, such as etcd, do not notice. A client cannot have one:
with libfaketime 0.9.10, `time.sleep` fails.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["WallClock"]

_LIBRARIES: Final = "*/faketime/libfaketimeMT.so.1"


class WallClock:
    """The wall clock of the programs that are started with `environment`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._library = next(Path("/usr/lib").glob(_LIBRARIES), None)
        self._set(0)

    @property
    def exists(self) -> bool:
        """Whether libfaketime is there."""
        return self._library is not None

    @property
    def environment(self) -> Mapping[str, str]:
        """What a program needs that has this clock; empty without libfaketime."""
        if self._library is None:
            return {}
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    @contextmanager
    def wrong_by(self, seconds: int) -> Iterator[None]:
        """Until the block is left, the clock is wrong."""
        self._set(seconds)
        try:
            yield
        finally:
            self._set(0)

    def _set(self, seconds: int) -> None:
        other = self._file.with_suffix(".new")
        other.write_text(f"{seconds:+}s\n")
        other.rename(self._file)
