"""A scenario: everything that is chosen before a run, from one seed."""

import random

import attrs

from infinistore.server.budgets import BODY_BUDGET_BYTES
from tests.simulation.clusters import ClusterSettings
from tests.simulation.disks import DiskSettings
from tests.simulation.faults import BuggifySettings, FaultSettings
from tests.simulation.host import SOCKET, SharingSettings
from tests.simulation.network import NetworkSettings
from tests.simulation.nodes import ServerSettings
from tests.simulation.registered import EtcdSettings
from tests.simulation.tenants import TenantSettings
from tests.simulation.workload import DISK_METHODS, METHODS, RETENTION_METHODS, WorkloadSettings

__all__ = ["Scenario"]

_KIB = 1024
_KINDS = (
    *("plain", "crowded", "plain", "disks", "crowded", "cluster"),
    *("plain", "crowded", "disks", "cluster", "plain", "crowded"),
)
"""What kinds of scenarios seeds have, in turn."""
_TENANTS_AT = 10
"""Where the plain one of these is that has tenants every other time."""
_CLUSTER_WITH_TENANTS_AT = 5
"""Where the cluster is that has tenants one time in four, and no etcd then."""
_MANY_KEYS = 24
"""More than fit into the smallest pools and disks."""


@attrs.frozen(kw_only=True)
class Scenario:
    """What a run consists of. `attrs.evolve` makes smaller ones of it."""

    seed: int
    clients: int
    workload: WorkloadSettings
    network: NetworkSettings
    server: ServerSettings
    faults: FaultSettings
    buggify: BuggifySettings
    deadline_s: float
    """How long a call of a client may take."""
    max_connections: int = 8
    """How many connections a client has for blocks."""
    sharing: SharingSettings = attrs.field(factory=SharingSettings)
    disks: DiskSettings = attrs.field(factory=DiskSettings)
    cluster: ClusterSettings = attrs.field(factory=ClusterSettings)
    etcd: EtcdSettings = attrs.field(factory=EtcdSettings)
    tenants: TenantSettings = attrs.field(factory=TenantSettings)
    readers: int = 0
    """How many of the clients, the first ones, write nothing."""
    trusting: int = 0
    """How many of the clients, the last ones, write and check no checksums."""
    client_clock_rates: tuple[float, ...] = (1.0,)
    """How many seconds pass on the clock of each client in one second; in turn."""
    client_restart_chance: float = 0.0
    """That a client ends in the middle of a call and starts again, for each of its
    lives.
    """

    @property
    def has_retention(self) -> bool:
        """Whether keys end at a time, or are pinned."""
        return bool(self.workload.ttl_chance or RETENTION_METHODS.keys() & set(self.workload.methods))

    @classmethod
    def from_seed(cls, seed: int) -> "Scenario":
        """Choose a scenario."""
        kind = _KINDS[seed % len(_KINDS)]
        scenario = cls.crowded(seed) if kind == "crowded" else cls.plain(seed)
        if kind == "disks":
            scenario = scenario.with_disks()
        if kind == "cluster":
            scenario = scenario.with_cluster()
            if seed // len(_KINDS) % 2:
                scenario = scenario.with_etcd()
        if seed % len(_KINDS) == _TENANTS_AT and seed // len(_KINDS) % 2:
            scenario = scenario.with_tenants()
        if seed % len(_KINDS) == _CLUSTER_WITH_TENANTS_AT and seed // len(_KINDS) % 4 == 0:
            scenario = scenario.with_tenants_in_cluster()
        if kind != "crowded":
            scenario = scenario.with_retention()
        chance = random.Random(f"{seed}/trust")
        return attrs.evolve(scenario, trusting=chance.choice([0, 0, 0, 1, scenario.clients]))

    @classmethod
    def plain(cls, seed: int) -> "Scenario":
        """Choose a scenario with any methods, any faults and any settings."""
        chance = random.Random(f"{seed}/scenario")
        sharing = SharingSettings.choose(random.Random(f"{seed}/sharing"))
        clocks = random.Random(f"{seed}/clocks")
        return cls(
            seed=seed,
            clients=chance.choice([1, 2, 2, 3, 4]),
            workload=_workload(chance),
            network=_network(chance),
            server=attrs.evolve(_server(chance), unix_socket=SOCKET if sharing.clients else "off"),
            sharing=sharing,
            faults=FaultSettings.choose(chance),
            deadline_s=chance.choice([0.05, 0.3, 1.0, 5.0, 30.0]),
            max_connections=chance.choice([1, 2, 8]),
            client_clock_rates=tuple(clocks.choices([1.0, 0.9, 1.5], [2, 1, 1], k=2)),
            client_restart_chance=chance.choice([0.0, 0.0, 0.5]),
            buggify=BuggifySettings.choose(chance),
        )

    def shortened(self, operations: int) -> "Scenario":
        """Return the same with so many calls of each task at most."""
        operations = min(operations, self.workload.operations)
        return attrs.evolve(self, workload=attrs.evolve(self.workload, operations=operations))

    def with_retention(self) -> "Scenario":
        """Return the same, in half of the seeds with keys that end or are pinned."""
        chance = random.Random(f"{self.seed}/retention")
        if chance.random() < 0.5:
            return self
        methods = [*(method for method in RETENTION_METHODS if chance.random() < 0.6), "unpin"]
        workload = attrs.evolve(
            self.workload,
            methods=(*self.workload.methods, *dict.fromkeys(methods)),
            ttl_chance=chance.choice([0.0, 0.2, 0.6]),
            most_ttl_s=chance.choice([0.05, 0.5, 5.0]),
        )
        server = attrs.evolve(self.server, max_protected_ratio=chance.choice([0.25, 1.0, 1.0]))
        return attrs.evolve(self, workload=workload, server=server)

    def with_tenants(self) -> "Scenario":
        """Return the same with tenants, who share a pool over the network alone."""
        tenants = TenantSettings.choose(random.Random(f"{self.seed}/tenants"))
        return attrs.evolve(
            self,
            tenants=tenants,
            clients=max(self.clients, tenants.tenants),
            server=attrs.evolve(self.server, unix_socket="off", grows_to_bytes=None, expects_hazards=False),
            sharing=SharingSettings(),
        )

    def with_tenants_in_cluster(self) -> "Scenario":
        """Return the same cluster with tenants. In half of them nothing goes wrong but
        what happens to tenants, so that no node is ever lost.
        """
        scenario = self.with_tenants()
        scenario = attrs.evolve(scenario, tenants=attrs.evolve(scenario.tenants, has_rates=False))
        if random.Random(f"{self.seed}/tenants in a cluster").random() < 0.5:
            return scenario
        return attrs.evolve(
            scenario,
            faults=FaultSettings(),
            buggify=BuggifySettings(),
            network=attrs.evolve(scenario.network, most_delay_s=0.002),
            cluster=attrs.evolve(scenario.cluster, stops=0, lookup_deadline_s=0.4),
            deadline_s=5.0,
        )

    def with_disks(self) -> "Scenario":
        """Return the same with disks below the server, and calls that use them."""
        chance = random.Random(f"{self.seed}/disks")
        methods = [method for method in DISK_METHODS if chance.random() < 0.8]
        keys = chance.choice([self.workload.keys, _MANY_KEYS])
        return attrs.evolve(
            self,
            disks=DiskSettings.choose(chance),
            workload=attrs.evolve(self.workload, keys=keys, methods=(*self.workload.methods, *methods)),
        )

    def with_cluster(self) -> "Scenario":
        """Return the same with several servers, and nothing that clients share with
        them.
        """
        chance = random.Random(f"{self.seed}/cluster")
        return attrs.evolve(
            self,
            cluster=ClusterSettings.choose(chance),
            workload=attrs.evolve(
                self.workload, keys=chance.choice([2, 5, 12]), groups=chance.choice([0, 1, 3]), tasks=1
            ),
            server=attrs.evolve(self.server, unix_socket="off"),
            sharing=SharingSettings(),
        )

    def with_etcd(self) -> "Scenario":
        """Return the same cluster with nodes that register in etcd. In half of them,
        only that goes wrong which has to do with etcd.
        """
        chance = random.Random(f"{self.seed}/etcd")
        scenario = attrs.evolve(
            self,
            etcd=EtcdSettings.choose(chance),
            cluster=attrs.evolve(self.cluster, changes=0, stops=0),
            workload=attrs.evolve(self.workload, most_pause_s=chance.choice([0.5, 2.0])),
        )
        if chance.random() < 0.5:
            return scenario
        return attrs.evolve(
            scenario,
            faults=FaultSettings(),
            buggify=BuggifySettings(),
            network=attrs.evolve(scenario.network, most_delay_s=0.002),
            cluster=attrs.evolve(scenario.cluster, lookup_deadline_s=0.4),
            deadline_s=5.0,
        )

    @classmethod
    def crowded(cls, seed: int) -> "Scenario":
        """Choose a scenario in which processes meet in shared memory all the time, and
        nothing else goes wrong. Most pools have space for one block or two, and there
        are about as many keys: so every put has a block evicted and uses its space at
        once, while others read what they know of it, without a request. In the others,
        what is replaced may wait.
        """
        chance = random.Random(f"{seed}/crowded")
        clients = chance.choice([2, 2, 3])
        unit_kib, keys = chance.choice([(64, 1), (64, 1), (64, 2), (32, 2), (16, 1), (16, 2)])
        methods = ["put"] + ["delete"] * chance.choice([0, 0, 0, 1])
        methods += ["lease"] * chance.choice([0, 0, 1]) + ["get"] * chance.choice([1, 3, 6])
        return cls(
            seed=seed,
            clients=clients,
            readers=chance.choice([0, 0, 0, 1]),
            workload=WorkloadSettings(
                operations=120,
                tasks=chance.choice([1, 2]),
                keys=keys,
                value_bytes=(40, 400),
                methods=tuple(methods),
                most_pause_s=chance.choice([0.0, 0.002, 0.002, 0.005]),
                most_lease_s=0.002,
            ),
            network=NetworkSettings(),
            server=ServerSettings(
                pool_bytes=64 * _KIB,
                unit_bytes=unit_kib * _KIB,
                low=1.0,
                high=1.0,
                max_pinned_ratio=1.0,
                unix_socket=SOCKET,
            ),
            sharing=SharingSettings(
                clients=clients,
                stop_chances=chance.choice([(0.1,), (0.1,), (0.2,)]),
                server_steps=chance.choice([1, 1, 5]),
                copy_steps=chance.choice([3, 10, 10]),
            ),
            faults=FaultSettings(),
            deadline_s=30.0,
            buggify=BuggifySettings(),
        )


def _workload(chance: random.Random) -> WorkloadSettings:
    methods = [method for method in METHODS if chance.random() < 0.75]
    if not {"put", "put_many", "reserve"} & set(methods):
        methods.append("put")
    if not {"get", "get_many", "lease"} & set(methods):
        methods.append("get_many")
    sizes = chance.choice([(40,), (40, 700, 3000), (1000, 5000, 12_000), (40, 2000, 30_000)])
    return WorkloadSettings(
        operations=chance.choice([40, 80, 120]),
        tasks=chance.choice([1, 1, 2, 3]),
        keys=chance.choice([1, 2, 3, 5, 12]),
        value_bytes=sizes,
        methods=tuple(methods),
        most_pause_s=chance.choice([0.0, 0.002, 0.05]),
        cancel_chance=chance.choice([0.0, 0.0, 0.05, 0.2]),
        most_hold_s=chance.choice([0.3, 2.0, 30.0]),
    )


def _network(chance: random.Random) -> NetworkSettings:
    return NetworkSettings(
        most_delay_s=chance.choice([0.0002, 0.002, 0.02]),
        buffers=chance.choice([(700,), (700, 2000, 8192, 65536), (8192,), (65536,)]),
        checkpoint_chance=chance.choice([0.0, 0.1, 0.5]),
    )


def _server(chance: random.Random) -> ServerSettings:
    pool_bytes = chance.choice([64, 64, 96, 256, 1024]) * _KIB
    low, high = chance.choice([(0.8, 0.95), (0.3, 0.6), (1.0, 1.0)])
    return ServerSettings(
        pool_bytes=pool_bytes,
        unit_bytes=chance.choice([64, 1024, 4096]),
        allocator=chance.choice(["bitmap", "slab"]),
        low=low,
        high=high,
        max_pinned_ratio=chance.choice([0.5, 0.5, 1.0]),
        max_held_ratio=chance.choice([0.25, 0.6, 1.0]),
        max_batch_keys=chance.choice([2, 8192, 8192]),
        max_batch_bytes=chance.choice([64 * _KIB, 1024 * _KIB]),
        drain_timeout_s=chance.choice([0.1, 2.0, 10.0]),
        body_budget_bytes=chance.choice([100, BODY_BUDGET_BYTES]),
        read_ahead_bytes=chance.choice([64, 64 * _KIB]),
        expects_hazards=chance.random() < 0.5,
        periodic_evict=chance.random() < 0.2,
        grows_to_bytes=chance.choice([None, pool_bytes + 64 * _KIB, pool_bytes + 64 * _KIB, 4 * pool_bytes]),
        clock_rate=chance.choice([1.0, 1.0, 0.9, 1.5]),
        clock_offset_s=chance.choice([0.0, 1e6]),
    )
