"""Files of a disk that does not answer, until it is told to."""

import threading
from collections.abc import Sequence

from infinistore.disk_io.files import DiskFiles

__all__ = ["HangingFiles"]


class HangingFiles(DiskFiles):
    """Its reads wait until `answer` is set; `asked` counts those that began."""

    def __init__(self, *arguments: object, **settings: object) -> None:
        super().__init__(*arguments, **settings)  # type: ignore[arg-type]
        self.answer = threading.Event()
        self.asked = threading.Semaphore(0)

    def read(self, file: str, offset: int, vectors: Sequence[memoryview]) -> int:
        """Read, when the disk answers."""
        self.asked.release()
        assert self.answer.wait(60)
        return super().read(file, offset, vectors)
