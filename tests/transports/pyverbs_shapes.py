"""pyverbs as releases 44 and 59 look from outside: modules, classes, what they are
called with and what they raise.

Recorded from their sources. Every object notes what was done with it, so that a test
can look at the order of things. Nothing here talks to a device.
"""

import errno
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

__all__ = ["PyverbsRDMAError", "made", "pyverbs_44", "pyverbs_59", "recorded"]

Loader = Callable[[str], Any]
recorded: list[str] = []
"""What was closed, in order."""
made: list[Any] = []
"""Queue pairs, completion queues and registered memory, in the order in which they were
made.
"""

ENUMS = {
    "IBV_WR_RDMA_WRITE": 0,
    "IBV_WR_RDMA_READ": 4,
    "IBV_SEND_SIGNALED": 2,
    "IBV_QPT_RC": 2,
    "IBV_ACCESS_LOCAL_WRITE": 1,
    "IBV_ACCESS_REMOTE_WRITE": 2,
    "IBV_ACCESS_REMOTE_READ": 4,
}


class PyverbsError(Exception):
    pass


class PyverbsRDMAError(PyverbsError):
    def __init__(self, message: str, error_code: int = -1) -> None:
        super().__init__(message)
        self.error_code = error_code


class _Closes:
    def close(self) -> None:
        recorded.append(type(self).__name__)


class Context(_Closes):
    def __init__(self, name: str = "") -> None:
        if name == "absent":
            raise PyverbsRDMAError("Failed to open device", errno.ENODEV)
        self.name = name

    def query_device(self) -> Any:
        return SimpleNamespace(max_qp_wr=1 << 20, max_qp_rd_atom=128, max_qp_init_rd_atom=8)

    def query_port(self, number: int) -> Any:
        return SimpleNamespace(max_msg_sz=1 << 30, active_mtu=5)


class PD(_Closes):
    def __init__(self, creator: Context) -> None:
        self.creator = creator


class MR(_Closes):
    def __init__(
        self, pd: PD, length: int = 0, access: int = 0, address: int | None = None, implicit: bool = False
    ) -> None:
        if length > 1 << 40:
            raise PyverbsRDMAError("Failed to register a MR", errno.ENOMEM)
        made.append(self)
        self.access = access
        self.lkey, self.rkey = 7, 8


class DmaBufMR(MR):
    """In 44 to 65 alike: `dmabuf` may be a descriptor, and the memory's addresses begin
    at `offset`.
    """

    def __init__(  # noqa: PLR0917 - as it is there
        self, pd: PD, length: int, access: int, dmabuf: int | None = None, offset: int = 0, gpu: int = 0, gtt: int = 0
    ) -> None:
        if length > 1 << 40:
            raise PyverbsRDMAError("Failed to register a dma-buf MR", errno.EOPNOTSUPP)
        super().__init__(pd, length, access)
        self.dmabuf, self.offset = dmabuf, offset


class CompChannel44(_Closes):
    """It has a descriptor, and does not tell."""

    def __init__(self, context: Context) -> None:
        self._descriptor = os.eventfd(0)

    def get_cq_event(self, expected_cq: Any) -> None:
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:
            raise PyverbsRDMAError("Failed to get CQ event", errno.EAGAIN) from None

    def close(self) -> None:
        super().close()
        os.close(self._descriptor)


class CompChannel59(CompChannel44):
    @property
    def fd(self) -> int:
        return self._descriptor


class CQ(_Closes):
    def __init__(self, creator: Context, cqe: int, cq_context: Any, channel: Any, comp_vector: int) -> None:
        made.append(self)
        self.cqe = cqe
        self.acknowledged = 0
        self.armed = 0
        self.found: list[Any] = []

    def poll(self, num_entries: int = 1) -> tuple[int, list[Any]]:
        found, self.found = self.found[:num_entries], self.found[num_entries:]
        return len(found), found

    def req_notify(self, solicited_only: bool = False) -> None:
        self.armed += 1

    def ack_events(self, num_events: int) -> None:
        self.acknowledged += num_events


class QPCap:
    def __init__(
        self, max_send_wr: int = 1, max_recv_wr: int = 10, max_send_sge: int = 1, max_recv_sge: int = 1
    ) -> None:
        self.max_send_wr = max_send_wr


class QPInitAttr:
    def __init__(
        self,
        *,
        qp_type: int = 0,
        qp_context: Any = None,
        scq: Any = None,
        rcq: Any = None,
        srq: Any = None,
        cap: Any = None,
        sq_sig_all: int = 1,
    ) -> None:
        self.cap, self.qp_type, self.sq_sig_all = cap, qp_type, sq_sig_all


class QPAttr:
    def __init__(self, qp_state: int = 0, cur_qp_state: int = 0, port_num: int = 1, path_mtu: int = 3) -> None:
        self.port_num = port_num


class QP(_Closes):
    refuses = 0

    def __init__(self, creator: PD, init_attr: QPInitAttr, qp_attr: QPAttr | None = None) -> None:
        made.append(self)
        self.wanted = init_attr
        self.qp_num = 17
        self.attributes: Any = None
        self.posted: list[Any] = []

    def to_rts(self, qp_attr: QPAttr) -> None:
        if QP.refuses:
            raise PyverbsRDMAError("Failed to modify QP state to RTR", QP.refuses)
        self.attributes = qp_attr

    def post_send(self, wr: Any, bad_wr: Any = None) -> None:
        if QP.refuses:
            raise PyverbsRDMAError("Failed to post send", QP.refuses)
        self.posted.append(wr)


class SGE:
    def __init__(self, addr: int, length: int, lkey: int) -> None:
        self.addr, self.length, self.lkey = addr, length, lkey


class SendWR:
    def __init__(
        self,
        *,
        wr_id: int = 0,
        opcode: int = 2,
        num_sge: int = 0,
        imm_data: int = 0,
        sg: list[SGE] | None = None,
        send_flags: int = 2,
        next_wr: "SendWR | None" = None,
    ) -> None:
        assert num_sge == 1 and sg is not None
        self.wr_id, self.opcode, self.send_flags = wr_id, opcode, send_flags
        self.sg_list: SGE = SGE(sg[0].addr, sg[0].length, sg[0].lkey)  # a copy, until it is set
        self.next_wr = next_wr
        self.remote = (0, 0)

    def set_wr_rdma(self, rkey: int, addr: int) -> None:
        self.remote = (rkey, addr)

    def chain(self) -> "list[SendWR]":
        """This request and those behind it."""
        return [self, *(self.next_wr.chain() if self.next_wr is not None else [])]


class GID:
    def __init__(self, val: str | None = None) -> None:
        self.gid = val


class GlobalRoute:
    def __init__(
        self, dgid: Any = None, flow_label: int = 0, sgid_index: int = 0, hop_limit: int = 1, traffic_class: int = 0
    ) -> None:
        self.dgid, self.sgid_index, self.hop_limit = dgid.gid, sgid_index, hop_limit


class AHAttr:
    def __init__(
        self,
        *,
        dlid: int = 0,
        sl: int = 0,
        src_path_bits: int = 0,
        static_rate: int = 0,
        is_global: int = 0,
        port_num: int = 1,
        gr: GlobalRoute | None = None,
    ) -> None:
        self.dlid, self.is_global, self.port_num, self.gr = dlid, is_global, port_num, gr


def _loader(enums: str, channel: type[CompChannel44]) -> Loader:
    modules = {
        "pyverbs": SimpleNamespace(),
        f"pyverbs.{enums}": SimpleNamespace(**ENUMS),
        "pyverbs.pyverbs_error": SimpleNamespace(PyverbsError=PyverbsError, PyverbsRDMAError=PyverbsRDMAError),
        "pyverbs.device": SimpleNamespace(Context=Context),
        "pyverbs.pd": SimpleNamespace(PD=PD),
        "pyverbs.cq": SimpleNamespace(CompChannel=channel, CQ=CQ),
        "pyverbs.qp": SimpleNamespace(QPCap=QPCap, QPInitAttr=QPInitAttr, QPAttr=QPAttr, QP=QP),
        "pyverbs.mr": SimpleNamespace(MR=MR, DmaBufMR=DmaBufMR),
        "pyverbs.wr": SimpleNamespace(SGE=SGE, SendWR=SendWR),
        "pyverbs.addr": SimpleNamespace(GID=GID, GlobalRoute=GlobalRoute, AHAttr=AHAttr),
    }

    def load(name: str) -> Any:
        if name not in modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return modules[name]

    return load


pyverbs_44 = _loader("enums", CompChannel44)
pyverbs_59 = _loader("libibverbs_enums", CompChannel59)
