"""RDMA devices by pyverbs, the Python binding of rdma-core."""
