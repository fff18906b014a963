"""Devices and queue pairs by pyverbs, as its releases 44 and 59 look
(`pyverbs_shapes`); no device is needed.
"""

import errno
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from ipaddress import IPv4Address
from types import SimpleNamespace
from typing import Any, TypeVar

import attrs
import pytest

from infinistore.errors import TransferFailed
from infinistore.transports.rdma import ibverbs
from infinistore.transports.rdma.choice import ChosenPort
from infinistore.transports.rdma.ibverbs import (
    CHAIN,
    Pyverbs,
    VerbsDevice,
    WorkRequests,
    event_descriptors,
    load_pyverbs,
    timeout_exponent,
)
from infinistore.transports.rdma.verbs import Completion, Endpoint, NoRdma, Operation
from tests.transports import pyverbs_shapes
from tests.transports.pyverbs_shapes import CQ, MR, QP, DmaBufMR, made, pyverbs_44, pyverbs_59, recorded

_T = TypeVar("_T")
GID = "00000000000000000000ffff0a4d0001"
PORT = ChosenPort("rxe0", 1, "Ethernet", 0, GID, 1, "because")
PEER = Endpoint(33, 44, GID, 0, 1024, 4)


@pytest.fixture(params=[pyverbs_44, pyverbs_59], ids=["44", "59"])
def load(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Any]]:
    recorded.clear()
    made.clear()
    yield request.param
    QP.refuses = 0


def closed() -> list[str]:
    return [name.removesuffix("44").removesuffix("59") for name in recorded]


def last(kind: type[_T]) -> _T:
    """What was made last of this class of pyverbs."""
    return next(one for one in reversed(made) if isinstance(one, kind))


def open_port(
    pyverbs: Pyverbs, port: ChosenPort = PORT, descriptors: Callable[[], set[int]] | None = None
) -> VerbsDevice:
    """A device whose completion channels are the faked ones."""
    faked = partial(event_descriptors, "anon_inode:[eventfd]")
    return VerbsDevice(pyverbs, port, lambda: attrs.evolve(port, gid_index=5), descriptors or faked)


@pytest.fixture
def pyverbs(load: Callable[[str], Any]) -> Pyverbs:
    return load_pyverbs(load)


@pytest.fixture
def device(pyverbs: Pyverbs) -> Iterator[VerbsDevice]:
    opened = open_port(pyverbs)
    yield opened
    opened.close()


def test_the_parts_are_found_where_a_release_has_them(load: Callable[[str], Any]) -> None:
    pyverbs = load_pyverbs(load)
    assert pyverbs.enums.IBV_WR_RDMA_READ == 4
    assert pyverbs.qp.QP is QP


def test_without_pyverbs_the_error_names_the_remedy() -> None:
    def load(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    with pytest.raises(NoRdma, match=r"No module named 'pyverbs'.*python3-pyverbs"):
        load_pyverbs(load)


def test_importing_it_leaves_the_log_as_it_was() -> None:
    def load(name: str) -> Any:
        logging.basicConfig(level=logging.DEBUG, force=True)
        return pyverbs_44(name)

    root = logging.getLogger()
    before = list(root.handlers), root.level
    load_pyverbs(load)
    assert (list(root.handlers), root.level) == before


def test_a_channels_descriptor_is_found_and_does_not_block(device: VerbsDevice) -> None:
    queue = device.create_queue(serves=True)
    assert os.readlink(f"/proc/self/fd/{queue.fd}") == "anon_inode:[eventfd]"
    assert not os.get_blocking(queue.fd)
    queue.take_events()  # nothing there
    os.eventfd_write(queue.fd, 1)
    queue.take_events()
    assert last(CQ).acknowledged == 1


def test_a_descriptor_that_cannot_be_told_from_anothers_is_not_taken(pyverbs: Pyverbs) -> None:
    seen: Iterator[set[int]] = iter([set(), {100, 101}])
    device = open_port(pyverbs, descriptors=lambda: next(seen))
    if hasattr(pyverbs.cq.CompChannel, "fd"):
        device.create_queue(serves=True)
    else:
        with pytest.raises(NoRdma, match="at the same moment"):
            device.create_queue(serves=True)
        assert closed() == ["CompChannel"]
    device.close()


def test_everything_is_closed_in_order_and_once(device: VerbsDevice) -> None:
    device.create_queue(serves=True)
    device.register(4096, 100, remote=False)
    device.close()
    device.close()
    assert closed() == ["QP", "CQ", "CompChannel", "MR", "PD", "Context"]


def test_a_queue_pair_closes_before_its_device_and_only_once(device: VerbsDevice) -> None:
    queue = device.create_queue(serves=False)
    queue.close()
    queue.close()
    assert closed() == ["QP", "CQ", "CompChannel"]


def test_what_was_made_of_a_queue_pair_is_closed_when_the_rest_is_refused(
    device: VerbsDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise pyverbs_shapes.PyverbsRDMAError("Failed to create QP", errno.ENOMEM)

    monkeypatch.setattr(QP, "__init__", refuse)
    with pytest.raises(NoRdma, match="rxe0 has no more queue pairs"):
        device.create_queue(serves=True)
    assert closed() == ["CQ", "CompChannel"]


def test_the_port_is_chosen_near_an_address_the_first_time_and_again(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def choose(*wanted: Any, near: Any, peer: Any = None, place: Any = None) -> ChosenPort:
        asked.append((*wanted, near))
        return PORT

    monkeypatch.setattr(ibverbs, "choose_port", choose)
    monkeypatch.setattr(ibverbs, "load_pyverbs", lambda: load_pyverbs(load))
    device = ibverbs.open_device(None, 1, "Ethernet", 3, IPv4Address("10.0.0.7"))
    device.look_again()
    device.close()
    assert asked == [(name, 1, "Ethernet", 3, IPv4Address("10.0.0.7")) for name in (None, "rxe0")]


def test_a_device_that_cannot_be_opened_is_no_rdma(load: Callable[[str], Any]) -> None:
    with pytest.raises(NoRdma, match="absent cannot be opened"):
        VerbsDevice(load_pyverbs(load), attrs.evolve(PORT, device="absent"), lambda: PORT)


def test_memory_that_cannot_be_pinned_is_an_error_that_names_the_limit(device: VerbsDevice) -> None:
    with pytest.raises(NoRdma, match="ulimit -l"):
        device.register(4096, 1 << 41, remote=True)


@pytest.mark.parametrize(
    ("options", "access"),
    [({"remote": False}, 1), ({"remote": True}, 1 | 2 | 4), ({"remote": True, "writable": False}, 4)],
)
def test_memory_is_registered_for_no_more_than_it_is_for(
    device: VerbsDevice, options: dict[str, bool], access: int
) -> None:
    region = device.register(4096, 100, **options)
    assert last(MR).access == access
    assert (region.local_key, region.remote_key) == (7, 8)


def test_a_dmabuf_is_registered_from_an_offset_and_its_addresses_begin_there(device: VerbsDevice) -> None:
    region = device.register_dmabuf(33, 700, 4096)
    memory = last(DmaBufMR)
    assert (type(memory).__name__, memory.dmabuf, memory.offset, memory.access) == ("DmaBufMR", 33, 700, 1 | 2 | 4)
    assert (region.remote_key, region.remote_address) == (8, 700)
    assert device.register(8192, 100, remote=True).remote_address == 8192
    device.close()
    assert closed().count("DmaBufMR") == 1


def test_a_device_that_takes_no_dmabufs_says_so(
    device: VerbsDevice, pyverbs: Pyverbs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoRdma, match="rxe0 does not register a dmabuf: Failed"):
        device.register_dmabuf(33, 0, 1 << 41)
    monkeypatch.delattr(pyverbs.mr, "DmaBufMR")
    with pytest.raises(NoRdma, match="pyverbs knows no dmabuf; 44 or newer does"):
        device.register_dmabuf(33, 0, 4096)


def test_a_queue_pair_is_connected_within_what_both_ends_can_do(device: VerbsDevice) -> None:
    queue = device.create_queue(serves=True)
    assert last(QP).wanted.cap.max_send_wr == device.limits.depth == 4 * CHAIN
    assert last(CQ).cqe > device.limits.depth, "room for a flush of everything"
    queue.connect(PEER, dead_after_s=0.25)
    found = last(QP).attributes
    assert (found.dest_qp_num, found.rq_psn, found.sq_psn) == (33, 44, queue.endpoint.packet)
    assert found.path_mtu == 3, "1024 bytes, the peer's"
    assert found.max_rd_atomic == 4, "the peer's"
    assert found.retry_cnt < 7, "7 may mean for ever"
    assert found.qp_access_flags == 0, "nobody reads or writes here"
    route = found.ah_attr
    assert (route.is_global, route.gr.dgid, route.gr.sgid_index) == (1, "0000:0000:0000:0000:0000:ffff:0a4d:0001", 1)
    client = device.create_queue(serves=False)
    client.connect(PEER, dead_after_s=0.25)
    assert last(QP).attributes.qp_access_flags == 1 | 2 | 4
    assert last(QP).wanted.cap.max_send_wr == 1


def test_infiniband_ports_are_addressed_by_lid(load: Callable[[str], Any]) -> None:
    port = attrs.evolve(PORT, link="InfiniBand", lid=9)
    device = open_port(load_pyverbs(load), port)
    queue = device.create_queue(serves=True)
    assert queue.endpoint.lid == 9
    queue.connect(attrs.evolve(PEER, lid=12), dead_after_s=0.25)
    route = last(QP).attributes.ah_attr
    assert (route.dlid, route.is_global) == (12, 0)
    device.close()


def test_a_gid_that_is_refused_is_chosen_again_for_the_next(device: VerbsDevice) -> None:
    queue = device.create_queue(serves=True)
    QP.refuses = errno.EINVAL
    with pytest.raises(TransferFailed, match=r"rxe0 .* cannot be connected to GID 0000:"):
        queue.connect(PEER, dead_after_s=0.25)
    assert device.port.gid_index == 5


def test_a_batch_is_the_end_of_a_chain_and_asks_for_one_completion(device: VerbsDevice) -> None:
    queue = device.create_queue(serves=True)
    queue.connect(PEER, dead_after_s=1)
    for count in (1, 3, CHAIN, 2):
        pieces = [(100 + i, 7, 900 + i, 8, 10 + i) for i in range(count)]
        queue.post(Operation.READ, pieces, 41 + count)
        chain = last(QP).posted[-1].chain()
        assert [(wr.sg_list.addr, wr.sg_list.lkey, *wr.remote[::-1], wr.sg_list.length) for wr in chain] == pieces
        assert {wr.opcode for wr in chain} == {4}
        assert [wr.send_flags for wr in chain] == [0] * (count - 1) + [2]
        assert chain[-1].wr_id == 41 + count


def test_a_device_that_takes_no_work_fails_the_transfer(device: VerbsDevice) -> None:
    queue = device.create_queue(serves=True)
    QP.refuses = errno.ENOMEM
    with pytest.raises(TransferFailed, match="takes no work"):
        queue.post(Operation.WRITE, [(1, 2, 3, 4, 5)], 1)


def test_completions_are_numbers_and_statuses(device: VerbsDevice) -> None:
    queue = device.create_queue(serves=True)
    last(CQ).found = [SimpleNamespace(wr_id=3, status=0), SimpleNamespace(wr_id=4, status=12)]
    assert queue.poll() == [Completion(3, 0), Completion(4, 12)]
    queue.arm()
    assert last(CQ).armed == 1


def test_a_forked_child_closes_nothing(load: Callable[[str], Any]) -> None:
    device = open_port(load_pyverbs(load))
    queue = device.create_queue(serves=True)
    region = device.register(4096, 100, remote=False)
    device.abandon()
    queue.close()
    region.close()
    device.close()
    assert recorded == []


@pytest.mark.parametrize("seconds", [0.01, 0.1, 0.25, 1, 60])
def test_the_timeout_with_its_retries_is_at_most_what_was_asked_for(seconds: float) -> None:
    nominal = 6 * 4.096e-6 * 2 ** timeout_exponent(seconds)
    assert seconds / 2 < nominal <= seconds


def test_real_work_requests_take_what_is_set() -> None:
    """Without a device: pyverbs' own classes, where they can be imported."""
    try:
        pyverbs = load_pyverbs()
    except NoRdma as error:
        pytest.skip(str(error))
    work = WorkRequests(pyverbs, pyverbs.enums.IBV_WR_RDMA_READ)
    first = work.fill([(4096, 7, 8192, 9, 100), (5000, 7, 9000, 9, 50)], 12)
    assert (first.opcode, first.num_sge, first.send_flags) == (pyverbs.enums.IBV_WR_RDMA_READ, 1, 0)
    assert first is work.requests[-2]
    assert work.requests[-1].wr_id == 12
    assert work.requests[-1].send_flags == pyverbs.enums.IBV_SEND_SIGNALED
    assert (work.spans[-1].addr, work.spans[-1].length, work.spans[-1].lkey) == (5000, 50, 7)
