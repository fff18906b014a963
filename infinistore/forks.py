"""What becomes of open stores in a forked child: nothing that could harm the parent.

A child has copies of the parent's descriptors, in the middle of the parent's
conversations, and does not have the memory of embedded stores. So in the child every
store that was open lets go of what it has, and raises `StoreUnavailable` from then on.
"""

import os
from typing import Protocol
from weakref import WeakSet

__all__ = ["FORKED", "Forkable", "let_go_in_child"]

FORKED = "this store was opened before a fork and lives on in the parent; open another one in the child"


class Forkable(Protocol):
    """Something that must not be used by a forked child."""

    def let_go(self) -> None:
        """In the child: close the descriptors, leave memory and locks alone, and refuse
        everything from now on.
        """


# The interpreter has one list of fork hooks, which cannot be taken out again: so there
# is one hook, with a weak list.
_open: "WeakSet[Forkable]" = WeakSet()


def let_go_in_child(store: Forkable) -> None:
    """Have `store.let_go` called in every child that is forked while the store
    lives.
    """
    _open.add(store)


def _after_fork_in_child() -> None:
    for store in list(_open):
        store.let_go()


os.register_at_fork(after_in_child=_after_fork_in_child)
