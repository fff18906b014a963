"""RDMA: the server reads and writes the client's registered memory."""
