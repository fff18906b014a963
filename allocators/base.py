"""What an allocator is: it decides where blocks live, and touches no memory.

An allocator knows arenas only as an index and a length. The pool maps its extents to bytes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import attrs

__all__ = ["Allocator", "AllocatorStatistics", "Extent"]

Extent: TypeAlias = tuple[int, int, int]
"""Where one block lives: (arena index, offset in bytes, length in bytes as asked for)."""
