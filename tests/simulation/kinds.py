"""Seeds of all kinds of scenarios, for tests of what holds for each."""

__all__ = ["KINDS"]

KINDS = (0, 1, 2, 3, 5, 17, 46)
"""With points of the product that happen seldom, with shared memory, with disks, with a
cluster, with one that registers in etcd, and with tenants; with keys that end."""
