"""TLS at the server: strangers, and certificates that change."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel

from infinistore.cluster.membership import Node
from infinistore.cluster_io.probing import instance_asker
from infinistore.errors import ConfigError
from infinistore.protocol.messages import Statistics
from infinistore.server.certificates import Certificates
from infinistore.server.security import Reloads, load_certificates, reload_on_signal
from infinistore.transports.sockets.trio_streams import connect_tcp
from infinistore.transports.tls.trio_stream import TlsStream
from tests.server.http_client import Answer, ask_over
from tests.server.running import Peer, RunningServer, connect_tls, make_config, running_server, until
from tests.transports.certificates import Files, issue


def settings(files: Files) -> dict[str, Any]:
    return {"tls_cert": files.cert, "tls_key": files.key}


async def connect(server: RunningServer, files: Files) -> TlsStream:
    """A client's end of TLS, which has sent nothing yet."""
    return await connect_tls(("127.0.0.1", server.server.addresses.port), files)


def serial_number(stream: TlsStream) -> Any:
    certificate = stream.session.peer_certificate()
    assert certificate is not None
    return certificate["serialNumber"]


async def has_new_certificate(server: RunningServer, files: Files, old: Peer) -> None:
    """The server shows a new client another certificate than an old one, whose session
    goes on.
    """
    new = await server.greet(await connect(server, files))
    assert isinstance(old.stream, TlsStream)
    assert isinstance(new.stream, TlsStream)
    assert serial_number(old.stream) != serial_number(new.stream)
    await old.ask(Statistics())


async def test_a_handshake_that_goes_nowhere_has_a_strangers_place_only(tmp_path: Path) -> None:
    files = issue(tmp_path)
    async with running_server(make_config(**settings(files), max_connections=1)) as server:
        silent = [await connect_tcp("127.0.0.1", server.server.addresses.port) for _ in range(3)]
        for stream in silent:
            await stream.send_all([memoryview(b"\x16\x03\x01")])
        await server.greet(await connect(server, files))
        for stream in silent:
            stream.close()


async def test_a_signal_loads_the_certificate_again_and_open_connections_stay(tmp_path: Path) -> None:
    files = issue(tmp_path)
    async with running_server(make_config(**settings(files))) as server, trio.open_nursery() as nursery:
        certificates = server.server.tls
        assert certificates is not None
        await nursery.start(reload_on_signal, server.server.reloads)
        old = await server.greet(await connect(server, files))
        before = certificates.context
        issue(tmp_path, into=files)
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: certificates.context is not before)
        await has_new_certificate(server, files, old)
        nursery.cancel_scope.cancel()


async def test_the_management_api_loads_the_certificate_again_as_the_signal_does(tmp_path: Path) -> None:
    files, log = issue(tmp_path), tmp_path / "audit"
    async with running_server(make_config(**settings(files), audit_log=str(log))) as server:
        old = await server.greet(await connect(server, files))
        issue(tmp_path, into=files)
        answer = await manage(server, files, "/reload")
        assert (answer.status, answer.json) == (200, {"status": "ok"})
        await has_new_certificate(server, files, old)
        files.key.write_bytes(issue(tmp_path, stem="other").key.read_bytes())
        answer = await manage(server, files, "/reload")
        assert answer.status == 409
        assert "does not fit the key" in answer.json["error"]
        await server.greet(await connect(server, files))
    noted = [one for one in map(json.loads, log.read_text().splitlines()) if one["event"] == "reload"]
    assert [(one["ok"], one["certificate"]) for one in noted] == [(True, str(files.cert)), (False, str(files.cert))]
    assert "does not fit the key" in noted[1]["problem"]


async def manage(server: RunningServer, files: Files, path: str) -> Answer:
    stream = await connect_tls(server.server.addresses.management[0], files)
    try:
        return await ask_over(stream, "POST", path)
    finally:
        stream.close()


async def test_a_pair_that_does_not_fit_changes_nothing_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, other = issue(tmp_path), issue(tmp_path, stem="other")
    certificates = Certificates(make_config(**settings(files)))
    before = certificates.context
    files.key.write_bytes(other.key.read_bytes())
    reloads = Reloads()
    reloads.add(certificates.reload_and_log)
    async with trio.open_nursery() as nursery:
        await nursery.start(reload_on_signal, reloads)
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: caplog.records)
        nursery.cancel_scope.cancel()
    assert caplog.records[0].message == "the certificate stays as it was"
    assert "does not fit the key" in caplog.records[0].__dict__["problem"]
    assert certificates.context is before


@pytest.mark.parametrize(
    ("ends", "problem"),
    [
        (("cert", "other"), "--tls-cert: the certificate in"),
        (("missing", "key"), "--tls-cert: cannot read"),
        (("cert", "missing"), "--tls-key: cannot read"),
        (("cert", "ca"), "must hold a certificate"),
    ],
)
def test_files_that_cannot_be_used_stop_the_start_and_are_named(
    ends: tuple[str, str], problem: str, tmp_path: Path
) -> None:
    files, other = issue(tmp_path), issue(tmp_path, stem="other")
    paths = {"cert": files.cert, "key": files.key, "ca": files.ca, "other": other.key, "missing": tmp_path / "no"}
    with pytest.raises(ConfigError) as refused:
        load_certificates(make_config(tls_cert=paths[ends[0]], tls_key=paths[ends[1]]))
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


def test_settings_that_need_a_certificate_say_so(tmp_path: Path) -> None:
    for key in ("tls_key", "tls_client_ca", "tls_peer_ca"):
        with pytest.raises(ConfigError, match="needs --tls-cert FILE"):
            make_config(**{key: tmp_path})


def test_mutual_tls_is_enough_to_listen_beyond_this_machine(tmp_path: Path) -> None:
    make_config(host="0.0.0.0", tls_cert=tmp_path, tls_client_ca=tmp_path)
    with pytest.raises(ConfigError, match="other machines could read"):
        make_config(host="0.0.0.0", tls_cert=tmp_path)


async def test_the_log_says_why_a_client_was_not_let_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files, mine = issue(tmp_path), issue(tmp_path, "client", ca="clients", stem="client")
    async with running_server(make_config(**settings(files), tls_client_ca=mine.ca)) as server:
        with caplog.at_level("INFO", logger="infinistore"):
            stream = await connect(server, files)
            with pytest.raises(Exception, match="wants a certificate"):
                await Peer(stream).hello()
            stream.close()
            await server.quiet()
    (record,) = [record for record in caplog.records if record.message == "no TLS"]
    assert "the client gave no certificate" in record.__dict__["error"]


def test_authorities_of_nodes_that_cannot_be_used_stop_the_start(tmp_path: Path) -> None:
    files = issue(tmp_path)
    with pytest.raises(ConfigError, match="--tls-peer-ca: "):
        load_certificates(make_config(**settings(files), tls_peer_ca=files.key))


async def test_a_node_trusts_the_authorities_that_it_is_given_for_other_nodes(tmp_path: Path) -> None:
    files = issue(tmp_path)
    asking = load_certificates(make_config(**settings(files), tls_peer_ca=files.ca))
    assert asking is not None
    async with running_server(make_config(**settings(files))) as server:
        node = Node(id="a", address=f"infinistores://127.0.0.1:{server.server.addresses.port}")
        assert await instance_asker("", asking.peer_context())(node) == server.server.telemetry.instance


async def test_authorities_for_other_nodes_are_renewed_without_a_restart(tmp_path: Path) -> None:
    """A node that asks others all its life asks with the newest files."""
    files, other = issue(tmp_path), issue(tmp_path, ca="two", stem="other")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(other.ca.read_bytes())
    asking = load_certificates(make_config(**settings(files), tls_peer_ca=trusted))
    assert asking is not None
    ask = instance_asker("", asking.peer_context)
    async with running_server(make_config(**settings(files))) as server:
        node = Node(id="a", address=f"infinistores://127.0.0.1:{server.server.addresses.port}")
        assert await ask(node) == ""
        trusted.write_bytes(files.ca.read_bytes())
        assert await ask(node) == ""  # nobody has said that they are new
        asking.reload()
        assert await ask(node) == server.server.telemetry.instance
        trusted.write_bytes(files.key.read_bytes())
        before = asking.context
        with pytest.raises(ConfigError, match="--tls-peer-ca: "):
            asking.reload()
        assert asking.context is before  # all are taken, or none
        assert await ask(node) == server.server.telemetry.instance


async def test_a_node_is_asked_who_it_is_over_tls(tmp_path: Path) -> None:
    files = issue(tmp_path)
    certificates = Certificates(make_config(**settings(files), tls_client_ca=files.ca))
    async with running_server(make_config(**settings(files), tls_client_ca=files.ca)) as server:
        node = Node(id="a", address=f"infinistores://127.0.0.1:{server.server.addresses.port}")
        instance = server.server.telemetry.instance
        assert await instance_asker("", certificates.peer_context())(node) == instance
        assert await instance_asker("")(node) == ""  # the system does not know its authority
