"""Blocks by RDMA."""
