"""The one thread in which the clients of a process hear of their clusters."""

import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

import pytest

from infinistore.cluster.locate import ClusterUrl, parse_cluster_url
from infinistore.cluster.membership import View
from infinistore.cluster_io.thread import open_membership
from infinistore.errors import ConfigError, StoreUnavailable
from tests.bad_days.full_backlog import full


def write(path: Path, *names: str) -> ClusterUrl:
    text = json.dumps({"nodes": [{"id": name, "address": f"{name}:1"} for name in names]})
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)
    return parse_cluster_url(f"infinistore+file://{path}")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "cluster membership"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    for thread in threads():
        thread.join(60)
    assert threads() == []


def test_memberships_share_a_thread_that_ends_with_the_last_of_them(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.json", "a"), write(tmp_path / "b.json", "b")
    first, second, third = open_membership(a), open_membership(a), open_membership(b)
    for membership in (first, second, third):
        membership.wait_known(60)
    (thread,) = threads()
    assert thread.daemon
    assert [membership.view.nodes[0].id for membership in (first, second, third)] == ["a", "a", "b"]

    first.close()
    first.close()
    news: SimpleQueue[View] = SimpleQueue()
    second.add_listener(news.put)
    write(tmp_path / "a.json", "c")
    assert news.get(timeout=60).nodes[0].id == "c"
    assert 0 <= second.age_s < 60

    second.close()
    third.close()
    thread.join(60)
    fourth = open_membership(a)
    fourth.wait_known(60)
    assert fourth.view.nodes[0].id == "c"
    fourth.close()


def test_a_listener_hears_nothing_after_its_membership_is_closed(tmp_path: Path) -> None:
    url = write(tmp_path / "a.json", "a")
    first, second = open_membership(url), open_membership(url)
    first.wait_known(60)
    heard: list[View] = []
    news: SimpleQueue[View] = SimpleQueue()
    first.add_listener(heard.append)
    removed = second.add_listener(heard.append)
    second.add_listener(news.put)
    removed()
    first.close()
    write(tmp_path / "a.json", "b")
    news.get(timeout=60)
    assert heard == []
    second.close()


def test_a_folder_that_is_removed_after_the_membership_was_closed_is_not_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which of the two wakes the thread first is chance, so it is tried again."""
    heard, removed = threading.Semaphore(0), threading.Semaphore(0)

    def stand_still(_: View) -> None:
        heard.release()
        removed.acquire()

    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        url = write(folder / "a.json", "a")
        membership = open_membership(url)
        membership.wait_known(60)
        (thread,) = threads()
        membership.add_listener(stand_still)
        write(folder / "a.json", "b")
        heard.acquire()
        membership.close()
        shutil.rmtree(folder)
        removed.release()
        thread.join(60)
    assert caplog.messages == []


def test_waiting_for_a_view_that_does_not_come_says_why(tmp_path: Path) -> None:
    membership = open_membership(parse_cluster_url(f"infinistore+file://{tmp_path}/none.json"))
    assert (membership.view, membership.age_s) == (View(-1), float("inf"))
    with pytest.raises(
        StoreUnavailable, match=r"no view of the cluster within 0\.2 s: .*none\.json cannot be read: No such"
    ):
        membership.wait_known(0.2)
    membership.close()


@pytest.mark.parametrize("members", [1, 2])
def test_an_etcd_that_takes_no_connection_is_named_when_the_time_is_over(members: int) -> None:
    """Whoever connects gets no answer at all: the first packets are lost."""
    with ExitStack() as stack:
        ports = []
        for _ in range(members):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            stack.enter_context(full(listener, listener.getsockname()))
            ports.append(f"127.0.0.1:{listener.getsockname()[1]}")
        membership = open_membership(parse_cluster_url(f"infinistore+etcd://{','.join(ports)}/test"))
        told = rf"no view of the cluster within 0\.2 s: no answer from etcd at {', '.join(ports)}$"
        with pytest.raises(StoreUnavailable, match=told):
            membership.wait_known(0.2)
        membership.close()


def test_a_file_that_a_url_names_is_looked_at_when_it_is_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="etcd_password_file: cannot read the password file"):
        open_membership(parse_cluster_url(f"infinistore+etcd://h/c?etcd_user=u&etcd_password_file={tmp_path}/none"))
    with pytest.raises(ConfigError, match=r"cannot use .*none for TLS to etcd: No such file"):
        open_membership(parse_cluster_url(f"infinistore+etcd://h/c?etcd_tls=on&etcd_ca_file={tmp_path}/none"))


def test_a_static_list_needs_no_thread() -> None:
    membership = open_membership(parse_cluster_url("infinistore+static://a,b"))
    assert len(membership.view.nodes) == 2
    assert threads() == []
    membership.close()


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_opens_memberships_of_its_own(tmp_path: Path) -> None:
    url = write(tmp_path / "a.json", "a")
    membership = open_membership(url)
    membership.wait_known(60)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            membership.close()  # the parent's: nothing happens
            own = open_membership(url)
            own.wait_known(60)
            status = 0 if own.view.nodes[0].id == "a" else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    news: SimpleQueue[View] = SimpleQueue()
    membership.add_listener(news.put)
    write(tmp_path / "a.json", "b")
    assert news.get(timeout=60).nodes[0].id == "b"
    membership.close()
