"""`infinistore doctor`: looks at a machine, and says what is good, what could be better, and what would help.

`examine` looks at a `Host` and a `Software`, which are this machine's unless a test describes others; nothing is
changed. Printing is left to the command line.
"""

from collections.abc import Iterator

from infinistore.doctor.findings import Finding, Level, worst
from infinistore.doctor.host import Host, this_host
from infinistore.doctor.kernel import examine_kernel
from infinistore.doctor.memory import examine_memory
from infinistore.doctor.rdma import examine_rdma
from infinistore.doctor.software import Software, examine_software, this_software
from infinistore.transports.rdma_choice import Wanted

__all__ = ["Finding", "Host", "Level", "Software", "Wanted", "examine", "this_host", "this_software", "worst"]


def examine(host: Host, software: Software, wanted: Wanted) -> Iterator[Finding]:
    """Yield all there is to say, topic by topic. `wanted` is the RDMA port that was asked for, if any was."""
    yield from examine_rdma(host, wanted, software.pyverbs)
    yield from examine_memory(host)
    yield from examine_kernel(host)
    yield from examine_software(software)
