"""Real servers that are killed, stopped and started again, while every kind of client
goes on with one store.
"""

import re
import signal
import threading
from typing import Any

import attrs
import pytest

from infinistore import blocking
from infinistore.aio import AsyncStore
from infinistore.client.extension import Environment
from infinistore.client.options import StoreUrl
from infinistore.errors import DeadlineExceeded, StoreUnavailable
from infinistore.transports.sockets.blocking_streams import BlockingSocketStream, connect_tcp
from tests.bad_days.clients import KINDS, run_with_store
from tests.bad_days.operations import OLD, OPERATIONS, outcome, works_again
from tests.bad_days.servers import ServerProcess
from tests.bad_days.striking import UNKNOWN

pytestmark = [pytest.mark.usefixtures("quick_breaker"), pytest.mark.process]
MORE_THAN_SOCKETS_HOLD = 12 * 1024 * 1024


@pytest.mark.parametrize("kind", ["trio", "blocking", "asyncio"])
def test_a_killed_server_is_unavailable_and_found_again_when_it_is_back(kind: str, mortal: ServerProcess) -> None:
    async def body(store: AsyncStore) -> None:
        await store.put_many(OLD)
        assert await store.get("k0") == OLD["k0"]
        mortal.kill()
        for operation in OPERATIONS:
            if operation.name == "release_hold":  # a hold of nobody is none
                continue
            result, error = await outcome(operation.call(store, ""))
            assert isinstance(error, StoreUnavailable), f"{operation}: {result!r}, {error!r}"
        mortal.start()
        await works_again(store)
        assert await store.get_many(list(OLD)) == [None] * len(OLD)  # another server, at the same place
        await store.put_many(OLD)
        assert await store.get("k1") == OLD["k1"]
        # Nothing was asked of the idle connection in the meantime: it is found to be
        # dead before it is used.
        mortal.restart()
        await store.put("k0", b"new")
        assert await store.get("k0") == b"new"

    run_with_store(kind, mortal.url, body)


def test_a_dead_server_is_left_alone_until_a_probe_is_due(
    mortal: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinistore.client.connection.circuit_breaker.FIRST_PAUSE_S", 1000.0)
    connects = 0

    def counted(address: StoreUrl, deadline: float) -> BlockingSocketStream:
        nonlocal connects
        connects += 1
        return connect_tcp(address.host, address.port, deadline)

    with blocking.open_store(mortal.url, environment=Environment(connect=counted)) as store:
        connects = 0
        mortal.kill()
        for _ in range(100):
            with pytest.raises(StoreUnavailable):
                store.exists("k0")
        assert connects == 5
        with pytest.raises(StoreUnavailable, match=r"cannot connect .* refused.*\(not tried again for another \d+"):
            store.exists("k0")


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_server_costs_the_deadline_in_send_and_receive_and_goes_on_afterwards(
    kind: str, mortal: ServerProcess
) -> None:
    large = bytes(MORE_THAN_SOCKETS_HOLD)

    async def body(store: AsyncStore) -> None:
        await store.put("k0", b"old")
        inner: Any = store
        calls = getattr(inner, "wrapped", inner).calls
        patient = calls.options
        late: Exception | None = None
        while not re.search(f"no answer from tcp://.*{UNKNOWN}", str(late)):  # there may be no time to send
            await works_again(store)
            mortal.send_signal(signal.SIGSTOP)
            try:
                calls.options = attrs.evolve(patient, deadline_s=0.5)  # real time: the server is stopped
                # On a connection that is there: nothing but the send has to wait.
                _, late = await outcome(store.put("k0", large))
                assert isinstance(late, DeadlineExceeded)
                calls.options = attrs.evolve(patient, deadline_s=0.1)  # real time: the server is stopped
                for call in (lambda: store.get("k0"), lambda: store.exists("k0"), lambda: store.put("k0", large)):
                    while "came free" in str(error := (await outcome(call()))[1]):
                        pass  # the time was over before it began
                    assert isinstance(error, DeadlineExceeded)
                    assert re.search(r"no (answer from|connection to) tcp://", str(error))
            finally:
                mortal.send_signal(signal.SIGCONT)
                calls.options = patient
        await works_again(store)
        # A put whose end is not known was carried out, or was not.
        assert await store.get("k0") in (b"old", large)

    run_with_store(kind, mortal.url, body)


def test_threads_that_share_a_store_all_live_through_a_restart(mortal: ServerProcess) -> None:
    """Each call returns a value that was put, says that it is missing, or raises one
    typed error; all go on after.
    """
    values = {f"key {number}": bytes([number]) * 10_000 for number in range(4)}
    wrong: list[object] = []
    back = threading.Event()

    with blocking.open_store(mortal.url) as store:

        def use(key: str) -> None:
            good = 0
            while good < 20:
                was_back = back.is_set()
                try:
                    store.put(key, values[key])
                    value = store.get_many([key])[0]
                except StoreUnavailable:
                    continue
                if value not in (None, values[key]):
                    wrong.append(value)
                good += was_back

        threads = [threading.Thread(target=use, args=(key,)) for key in values]
        for thread in threads:
            thread.start()
        mortal.restart()
        back.set()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert [store.get(key) for key in values] == [*values.values()]
