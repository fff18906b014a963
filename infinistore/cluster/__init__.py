"""What a cluster is: its nodes, who owns which key, and how one hears of changes.

No I/O: no sockets, files, threads or clocks. `infinistore.cluster_io` brings them.
"""
