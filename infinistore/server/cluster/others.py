"""A cluster as a node sees it that passes its blocks on: without those that drain."""

from collections.abc import Callable

import attrs

from infinistore.cluster.membership import Listener, NodeState, StaticMembership, View
from infinistore.cluster_io.memberships import RunningMembership

__all__ = ["Others"]


class Others:
    """The nodes of a membership that do not drain, without one. It belongs to whoever
    made that membership, who ends it.
    """

    def __init__(self, membership: StaticMembership | RunningMembership, node_id: str) -> None:
        self._membership = membership
        self._node_id = node_id
        self._of = self._view = View(-1)

    @property
    def view(self) -> View:
        """The newest view; the same object until there is another one."""
        whole = self._membership.view
        if whole is not self._of:
            staying = tuple(
                node for node in whole.nodes if node.state is not NodeState.DRAINING and node.id != self._node_id
            )
            self._of, self._view = whole, attrs.evolve(whole, nodes=staying)
        return self._view

    @property
    def age_s(self) -> float:
        """For how long nothing has confirmed the view."""
        return self._membership.age_s

    def wait_known(self, timeout_s: float) -> None:
        """Wait until there is a view."""
        self._membership.wait_known(timeout_s)

    def add_listener(self, listener: Listener) -> Callable[[], None]:
        """Have a listener called with each new view."""
        return self._membership.add_listener(lambda view: listener(self.view))

    def close(self) -> None:
        """There is nothing to end."""
