"""Shards: several server processes that clients use as one server.

`serve_shards` supervises them, in the process that was started. `ShardProcess` is one
of them.
"""

from infinistore.server.shards.shard import ShardProcess
from infinistore.server.shards.supervisor import serve_shards

__all__ = ["ShardProcess", "serve_shards"]
