"""The drain that an operator may ask of one node, as that node sees it in etcd."""

from collections.abc import Callable, Mapping

import attrs

from infinistore.cluster.documents import Drain, read_drain, write_drain
from infinistore.cluster.etcd.gateway import Item, Outcome, Request, delete, put, transaction, unless_changed
from infinistore.cluster.etcd.layout import Layout

__all__ = ["RequestedDrain"]


class RequestedDrain:
    """What is asked of a node, and what the node says of it."""

    def __init__(self, layout: Layout, node_id: str, on_change: Callable[[bool], None]) -> None:
        """`on_change` is called with True when a drain is to begin, and with False when
        none is wanted any more.
        """
        self._item = Item(layout.drain(node_id))
        self._on_change = on_change
        self.progress = Drain()
        """How far the node is, whether etcd has been told or not."""

    @property
    def wanted(self) -> bool:
        """Whether the node is to drain, or has drained."""
        return self._item.mod_revision > 0

    @property
    def over(self) -> bool:
        """Whether etcd says that the node has drained."""
        return self.is_over(self._item)

    @staticmethod
    def is_over(item: Item | None) -> bool:
        """Whether an item is that of a drain which is done."""
        return item is not None and item.mod_revision > 0 and read_drain(item.value).done

    @property
    def key(self) -> str:
        """Its key in etcd."""
        return self._item.key

    @property
    def has_news(self) -> bool:
        """Whether etcd is to be told how far the node is."""
        return self.wanted and not self.over and write_drain(self.progress) != self._item.value

    def found(self, items: Mapping[str, Item]) -> bool:
        """Take what etcd lists. Returns whether the drain that was wanted is wanted no
        longer.
        """
        former, self._item = self._item, items.get(self.key, Item(self.key))
        if self._item.create_revision == former.create_revision:
            return False
        self.progress = Drain()
        if former.mod_revision:
            self._on_change(False)
        if self.wanted and not self.over:
            self._on_change(True)
        return former.mod_revision > 0

    def told(self, node: Item) -> Request:
        """Return the request that says how far the node is. With the last word, what
        stands of the node is deleted.
        """
        then = [put(self.key, write_drain(self.progress))]
        compare = [unless_changed(self._item)]
        if self.progress.done:
            then.append(delete(node.key))
            compare.append(unless_changed(node))
        return transaction(compare, then, self.key)

    def was_told(self, outcome: Outcome, progress: Drain) -> None:
        """Take what became of that request, which has said this."""
        if outcome.succeeded:
            self._item = attrs.evolve(self._item, value=write_drain(progress), mod_revision=outcome.revision)
