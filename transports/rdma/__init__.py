"""RDMA: `devices.py` and `choice.py` find a port, `verbs.py` is the interface to a
device, `ibverbs.py` its implementation, `plan.py` and `requester.py` move bytes.
"""
