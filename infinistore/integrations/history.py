"""Which messages of a conversation to keep when it outgrows the model.

A store finds a prompt by its beginning. A client that drops the oldest message at each
turn changes the beginning at each turn, and then nothing after it is found. It is
better to drop much at once, and to leave the rest alone until the limit is reached
again.
"""

from collections import deque
from collections.abc import Collection, Sequence

__all__ = ["cut"]


def cut(
    lengths: Sequence[int], limit: int, *, keep: float = 0.75, always: Collection[int] = (0,), stub: int = 0
) -> list[int]:
    """Return the indices of the messages to send, in order.

    Whenever the messages have more than `limit` tokens together, the oldest are dropped
    until `keep * limit` are left or fewer. `lengths` are those of the whole
    conversation each time, of dropped messages, too: from them alone it follows where
    it was cut before, so nothing has to be remembered between turns. The length of a
    message must never change, but the newest may grow: a question by its answer.

    Args:
        lengths: The tokens of each message, the oldest first. Count messages that are
            of no use without each other, such as a call and its result, as one.
        limit: The tokens that a prompt may have: those of the model without the room
            for its answer.
        keep: The part of `limit` that a cut leaves, above 0 and at most 1.
        always: The indices of messages that are never dropped. The first message is
            the only one unless others are given. The newest message is never dropped.
        stub: The tokens that the caller sends in place of a dropped message.

    Raises:
        ValueError: An argument is out of range; or what may not be dropped has more
            than `limit` tokens.
    """
    if limit < 1 or stub < 0 or not 0 < keep <= 1:
        raise ValueError(f"limit={limit} must be positive, stub={stub} at least 0, and keep={keep} in (0, 1]")
    if min(lengths, default=0) < 0:
        raise ValueError("a message cannot have fewer than 0 tokens")
    if min(always, default=0) < 0:
        raise ValueError("always takes indices from 0")
    pinned = frozenset(always)
    dropped: set[int] = set()
    droppable: deque[int] = deque()
    total = 0
    for newest, length in enumerate(lengths):
        total += length
        if total > limit:
            while droppable and total > keep * limit:
                oldest = droppable.popleft()
                dropped.add(oldest)
                total += stub - lengths[oldest]
        if newest not in pinned and length > stub:
            droppable.append(newest)
    if total > limit:
        raise ValueError(
            f"the messages that are always kept and the newest have {total} tokens, and the limit is {limit}:"
            " shorten them, or pass fewer in always"
        )
    return [number for number in range(len(lengths)) if number not in dropped]
