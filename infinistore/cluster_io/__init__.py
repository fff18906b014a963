"""Runs memberships: sockets to etcd, files that change, and the one thread in which
clients hear of both. What follows from what they say is `infinistore.cluster`.
"""
