"""Counting instructions with valgrind's callgrind: what a program says to it, and how
it is run.

A program that runs under callgrind starts uncounted, which is several times faster, and
says itself what to count. It says so by a sequence of instructions that does nothing on
a bare processor and that valgrind looks for, the client requests of `valgrind.h`.
Python cannot write that sequence, so it is put into memory as machine code.
"""

import ctypes
import mmap
import re
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from platform import machine

__all__ = ["Counter", "read_counts", "start_counted", "why_not"]

# What valgrind looks for is the four turns, 128 bits in all, and the exchange:  mov rax,rdi  xor edx,edx  rol rdi,3
# rol rdi,13  rol rdi,61  rol rdi,51  xchg rbx,rbx  mov rax,rdx  ret
_REQUEST = bytes.fromhex("4889f8 31d2 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db 4889d0 c3")
_RUNNING_ON_VALGRIND = 0x1001
_ZERO_STATS, _DUMP_STATS_AT, _START_INSTRUMENTATION = (0x43540000 + number for number in (1, 3, 4))


def why_not() -> str:
    """Say why nothing can be counted on this machine; empty if it can."""
    if machine() != "x86_64":
        return f"client requests of valgrind are written for x86_64 here, and this is {machine()}"
    return "" if shutil.which("valgrind") else "valgrind is not installed; on Debian: apt-get install valgrind"


class Counter:
    """For a program that `start_counted` has started: it tells callgrind what to count,
    and under which name.
    """

    def __init__(self) -> None:
        self._code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._code.write(_REQUEST)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._code))
        self._request = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_char_p)(address)
        assert self._ask(_RUNNING_ON_VALGRIND), "this is to be run by valgrind"

    def _ask(self, request: int, argument: int = 0) -> int:
        return int(self._request(struct.pack("6Q", request, argument, 0, 0, 0, 0)))

    def begin(self) -> None:
        """Run slowly from now on: what is run once more is translated now."""
        self._ask(_START_INSTRUMENTATION)

    def reset(self) -> None:
        """Count from here."""
        self._ask(_ZERO_STATS)

    def note(self, name: str) -> None:
        """Count up to here, under a name."""
        text = ctypes.create_string_buffer(name.encode())
        self._ask(_DUMP_STATS_AT, ctypes.addressof(text))


def start_counted(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> "subprocess.Popen[str]":
    """Start a program under callgrind, which leaves its counts in a folder."""
    valgrind = [
        "valgrind",
        "--quiet",
        "--tool=callgrind",
        "--instr-atstart=no",
        f"--callgrind-out-file={folder}/counts",
    ]
    return subprocess.Popen([*valgrind, *command], env=environment, stdout=subprocess.PIPE, text=True)


def read_counts(folder: Path) -> dict[str, list[int]]:
    """Return how many instructions were counted under each name, each time that it was
    noted.
    """
    counts: dict[str, list[int]] = {}
    files = folder.glob("counts.*")
    for file in sorted(files, key=lambda file: int(file.suffix[1:])):
        text = file.read_text(errors="replace")
        name = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE)
        total = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
        if name is not None and total is not None:
            counts.setdefault(name[1], []).append(int(total[1]))
    return counts
