"""The pools of all groups, as one process hands them to another, which has tenants and
groups of its own.

A group goes on with the memory of the group of its name, if those who may have mapped
it may have it now. Each tenant goes on with its blocks, in its group. Nobody else gets
them: a tenant that is not in the file any more, or is in another group now, loses them,
and what its clients still use stays in quarantine.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from infinistore.core.arena import Arena
from infinistore.core.clients import Client
from infinistore.core.group_states import GroupLayout, GroupStates, TenantState, encode_groups
from infinistore.core.hand_over import Adopted
from infinistore.core.journal import Journal
from infinistore.core.store import StoreCore
from infinistore.core.tenant_store import TenantStore
from infinistore.core.tenants import Tenants
from infinistore.server.take_over.exporting import Ended, StandIn, Taken, watched_of
from infinistore.tenant_limits import TenantLimits

__all__ = ["HandedGroups"]


class _Group(Protocol):
    """A trust group."""

    @property
    def tenants(self) -> Tenants: ...
    @property
    def mapped(self) -> bool: ...


class _Groups(Protocol):
    """The groups of a server."""

    whole: StoreCore

    def groups(self) -> Mapping[str, _Group]:
        """Return them, by name."""

    def writers(self, group: str) -> list[str] | None:
        """Return the tenants whose clients may have mapped the pool of a group to
        write; None: anybody."""

    def look_who_left(self) -> None:
        """Hear that somebody uses less of what a tenant has."""


class HandedGroups:
    """The groups of `tenancy`; see `Whole`. Those in `kept` have the memory of the
    earlier server. `make_journal` returns the journal of a tenant that has disks."""

    def __init__(
        self,
        tenancy: _Groups,
        kept: Sequence[str] = (),
        make_journal: Callable[[TenantLimits], Journal | None] = lambda limits: None,
    ) -> None:
        self._tenancy = tenancy
        self._groups = tenancy.groups()
        self._kept = kept
        self._make_journal = make_journal
        self._to_verify: list[TenantStore] = []

    def __len__(self) -> int:
        return len(self._tenancy.whole)

    @property
    def arenas(self) -> Sequence[Arena]:
        """Those of one group after the other."""
        return [arena for group in self._groups.values() for arena in group.tenants.pool.arenas]

    def describe(self) -> list[bytes]:
        """What each group has, and who may have mapped it."""
        return encode_groups(GroupStates(self._layouts(), []))

    def export(self, instance: str, ended: Sequence[Ended]) -> tuple[list[Ended], list[bytes]]:
        """See `Whole`."""
        left = {one.client: one for one in ended if one.client is not None}
        watched: list[Ended] = []
        tenants: list[TenantState] = []
        for name, group in self._groups.items():
            for tenant, store in group.tenants.all_stores().items():
                mine = [left.pop(client) for client in list(left) if client in store.clients]
                of_tenant, pins = watched_of(store, mine)
                watched += of_tenant
                tenants.append(TenantState(name, tenant, store.hand_over.export(instance, pins)))
        quiet = [one for one in ended if one.client is None or one.client in left]
        states = GroupStates(self._layouts(), tenants, len(quiet))
        return [*watched, *quiet], encode_groups(states)

    def adopt(self, state: GroupStates) -> Taken:
        """See `Whole`."""
        adopted: dict[tuple[str, str], Adopted] = {}
        for name in self._kept:
            states = {one.tenant: one.state for one in state.tenants if one.group == name}
            found = self._groups[name].tenants.adopt(states, self._make_journal)
            adopted |= {(name, tenant): one for tenant, one in found.items()}
        streams: list[list[StandIn]] = []
        own: list[StandIn] = []
        for one in state.tenants:
            of_tenant = adopted.get((one.group, one.tenant))
            if of_tenant is None:  # nobody uses that memory here
                streams += [[] for _ in one.state.pins[:-1]]
                continue
            store = self._groups[one.group].tenants.all_stores()[one.tenant]
            self._to_verify.append(store)
            *clients, of_process = [self._stand_in(client, store) for client in of_tenant.stand_ins]
            streams += [[client] for client in clients]
            own.append(of_process)
        kept = sum(one.kept for one in adopted.values())
        stand_ins = [*streams, *([] for _ in range(state.quiet)), own]
        return Taken(kept, sum(len(one.state.keys) for one in state.tenants) - kept, stand_ins)

    def verify_some(self, most_bytes: int) -> bool:
        """See `Whole`."""
        while self._to_verify:
            if self._to_verify[-1].hand_over.verify_some(most_bytes):
                return True
            self._to_verify.pop()
        return False

    @property
    def checksum_drops(self) -> int:
        """See `Whole`."""
        return self._tenancy.whole.statistics().checksum_drops

    def _layouts(self) -> list[GroupLayout]:
        return [self._layout(name, group) for name, group in self._groups.items()]

    def _layout(self, name: str, group: _Group) -> GroupLayout:
        arenas = [arena.length for arena in group.tenants.pool.arenas]
        return GroupLayout(name, arenas, group.mapped, self._tenancy.writers(name))

    def _stand_in(self, client: Client, store: StoreCore) -> StandIn:
        return StandIn(client, store, self._tenancy.look_who_left)
