"""The store of one tenant: a `StoreCore` of its own, in a pool that others use, too.

Keys, pins, holds and statistics are the tenant's. No call on it tells anything of
another tenant, and a key that another one has is missing here, in the same index.

In addition to what `StoreCore` promises, what the clients of a tenant have leased,
reserved and held together is within `max_pinned_ratio` of the tenant's room.
"""

import random as random_module
from collections.abc import Callable
from typing import Any

import attrs

from infinistore.buggify import Buggify
from infinistore.core.buggified import Parts, parts, tenant_space
from infinistore.core.clients import Client, Hazard
from infinistore.core.journal import Journal
from infinistore.core.limits import CoreLimits
from infinistore.core.sharing import Sharing, TenantPool, TenantSpace
from infinistore.core.store import StoreCore
from infinistore.errors import LimitExceeded
from infinistore.sizes import in_units
from infinistore.statistics import StoreStatistics
from infinistore.tenant_limits import TenantLimits

__all__ = ["TenantStore"]


@attrs.frozen
class _Limits(CoreLimits):
    """The limits of a store, which ask the tenant, too."""

    check_pins: Callable[[int], object] = attrs.field(default=int, eq=False)

    def check_share(self, name: str, pinned_bytes: int, wanted_bytes: int, capacity_bytes: int) -> None:
        super().check_share(name, pinned_bytes, wanted_bytes, capacity_bytes)
        if wanted_bytes:
            self.check_pins(wanted_bytes)

    def check_held(self, held_bytes: int, more_bytes: int, capacity_bytes: int) -> None:
        super().check_held(held_bytes, more_bytes, capacity_bytes)
        self.check_pins(more_bytes)

    def check_protected(self, protected_bytes: int, more_bytes: int, capacity_bytes: int) -> None:
        super().check_protected(protected_bytes, more_bytes, capacity_bytes)
        self.check_pins(more_bytes)


class TenantStore(StoreCore):
    """The store of the tenant that `tenant_limits` names."""

    def __init__(
        self,
        sharing: Sharing,
        tenant_limits: TenantLimits,
        *,
        clock: Callable[[], float],
        limits: CoreLimits,
        random: random_module.Random | None = None,
        buggify: Buggify | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._sharing = sharing
        self._tenant_pool = pool = TenantPool(sharing.pool)
        self._make_space = tenant_space(buggify)
        self.tenant_limits = tenant_limits
        super().__init__(
            pool,
            clock=clock,
            limits=_Limits(**attrs.asdict(limits), check_pins=self._check_pins),
            watermarks=sharing.watermarks,
            random=random,
            buggify=buggify,
            journal=journal,
            make_parts=self._make_parts,
        )
        space = self._tenant_space
        space.index = self._committed.up_to_date
        space.expire_holds = self.expire_holds
        space.blocks_reserved = self._blocks_reserved
        self.set_limits(tenant_limits)

    def set_limits(self, tenant_limits: TenantLimits) -> None:
        """Use other limits from now on, or these in a pool that has changed."""
        self.tenant_limits = self._tenant_space.tenant_limits = tenant_limits
        sharing = self._sharing
        self._tenant_pool.capacity_bytes = sharing.room_bytes(tenant_limits.reserved_bytes, tenant_limits.max_bytes)

    @property
    def space(self) -> TenantSpace:
        """Its space, for those who share the pool."""
        return self._tenant_space

    def resume(self, past: StoreStatistics) -> None:
        """Count on from the figures of an earlier store of this tenant, which had no
        block any more."""
        reads, writes, removals = self._reads, self._writes, self._removals
        reads.hits, reads.hit_bytes, reads.misses = past.hits, past.hit_bytes, past.misses
        writes.puts, writes.put_bytes = past.puts, past.put_bytes
        removals.deleted, removals.expired = past.deleted, past.expired
        removals.checksum_drops = past.checksum_drops
        self._tenant_space.evicted = attrs.asdict(past.evicted)  # type: ignore[assignment]

    @property
    def idle(self) -> bool:
        """Whether it is empty, and nobody uses it, no disk either."""
        return not len(self) and self.journal is None and self.unused

    @property
    def unused(self) -> bool:
        """Whether nobody uses it and it takes nothing of the pool."""
        self.reclaim()
        return not self.clients and not self.pool.used_bytes

    def reclaim(self) -> None:
        """Free what waits to be free."""
        self._tenant_space.reclaim()

    def release_all_holds(self) -> None:
        """End every hold of the tenant."""
        self._holds.release_all()

    def accept_hazards(
        self, client: Client, read_hazards: Callable[[], list[Hazard]], count_unread: Callable[[], int] = lambda: 1
    ) -> None:
        """As for any store."""
        super().accept_hazards(client, read_hazards, count_unread)
        self._sharing.mapping[self._tenant_space] = None

    def close_client(self, client: Client) -> None:
        """As for any store."""
        super().close_client(client)
        if not self._hazard_pins.clients and self._tenant_space in self._sharing.mapping:
            self.reclaim()
            self._sharing.mapping.pop(self._tenant_space, None)

    def _make_parts(self, buggify: Buggify | None) -> Parts:
        return parts(buggify)._replace(space=self._make_tenant_space)

    def _make_tenant_space(self, *arguments: Any, **options: Any) -> TenantSpace:
        self._tenant_space = self._make_space(self._sharing, self.tenant_limits, *arguments, **options)
        return self._tenant_space

    def _blocks_reserved(self) -> int:
        return sum(len(reservation.extents) for client in self.clients for reservation in client.reservations)

    def _check_pins(self, wanted_bytes: int) -> None:
        space = self._tenant_space
        pinned_bytes, room_bytes = space.pinned_bytes, self.pool.capacity_bytes
        if pinned_bytes and pinned_bytes + wanted_bytes > self.max_pinned_bytes:
            raise LimitExceeded(
                f"the connections of tenant {self.tenant_limits.tenant!r} have {in_units(pinned_bytes)} leased, held or"
                f" reserved and ask for {in_units(wanted_bytes)} more, and"
                f" max_pinned_ratio={self.limits.max_pinned_ratio:g} of its {in_units(room_bytes)} bounds all together;"
                " release leases or finish writes first"
            )
        self._sharing.check_pins(space, wanted_bytes)
