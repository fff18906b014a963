"""`infinistore doctor`: checks a machine, and suggests remedies.

`examine` checks a `Host` and a `Software`: this machine's, or those of a test. It
changes nothing. The command line prints the findings.
"""

import sys
from collections.abc import Iterator

from infinistore.doctor.findings import Finding, Host, Level, this_host, warning, worst
from infinistore.doctor.machine import examine_disk, examine_kernel, examine_memory, examine_numa
from infinistore.doctor.rdma import examine_rdma
from infinistore.doctor.software import Software, examine_software, this_software
from infinistore.transports.rdma.choice import Wanted

__all__ = [
    "Finding",
    "Host",
    "Level",
    "Software",
    "Wanted",
    "examine",
    "examine_disk",
    "this_host",
    "this_software",
    "worst",
]


def examine(host: Host, software: Software, wanted: Wanted) -> Iterator[Finding]:
    """Yield all findings, topic by topic; `wanted` is the requested RDMA port."""
    if sys.platform == "linux":
        yield from examine_rdma(host, wanted, software.pyverbs)
        yield from examine_memory(host)
        yield from examine_numa(host)
        yield from examine_kernel(host)
    else:
        remedy = "run it there; clients over TCP and embedded stores work here"
        yield warning("system", "kernel", f"{sys.platform}: a server needs Linux", remedy)
    yield from examine_software(software)
