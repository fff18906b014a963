"""Which servers of a cluster have what a test stored, and what is left without one of
them.
"""

from tests.cluster_client.clusters import Cluster

__all__ = ["Owners"]


class Owners:
    """The servers of parts that are stored one after another: `note` each of them.

    Only keys that contain `mark` count.
    """

    def __init__(self, cluster: Cluster, mark: str = "") -> None:
        self._members = cluster.members
        self._mark = mark
        self._noted = [self._keys(number) for number in range(len(self._members))]
        self._owners: list[int] = []

    def note(self) -> set[str]:
        """Return the keys that were stored since the last call: one server has all of
        them.
        """
        have = [self._keys(number) for number in range(len(self._members))]
        new = [keys - noted for keys, noted in zip(have, self._noted, strict=True)]
        self._noted = have
        (owner,) = (number for number, keys in enumerate(new) if keys)
        self._owners.append(owner)
        return new[owner]

    def stop_one(self) -> list[int]:
        """Stop a server that has parts, but not the first if others have any; return
        which parts it had.
        """
        lost = next((owner for owner in self._owners if owner != self._owners[0]), self._owners[0])
        self._members[lost].stop()
        return [part for part, owner in enumerate(self._owners) if owner == lost]

    def _keys(self, number: int) -> set[str]:
        have = self._members[number].keys()
        return {key for key in have if self._mark in key}
