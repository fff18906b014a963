"""The client's half of each way for blocks: `base.py` says what a mover is; inline,
shared memory and RDMA are movers.
"""
