"""The SSD tier, without I/O: what is written to disks, read from them and forgotten.

It emits jobs and takes their results (`infinistore.disk.jobs`). Whoever runs them, a
server, an embedded store or a simulated disk in a test, brings files, threads and a
clock. `tiers` is how all stores use it, with or without disks. The rest needs numpy,
the optional extra `disk`, so nothing imports it before a disk is asked for.
"""
