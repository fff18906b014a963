"""TLS in every dress: what it carries, and what is said when there is none."""

import os
import re
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import infinistore
from infinistore import blocking
from infinistore.blocking import BlockingStore
from infinistore.cli.options import Target, unix_url
from infinistore.errors import ConfigError, DeadlineExceeded, StoreUnavailable, TlsFailed
from tests.clients.dresses import DRESSES, opened, serving, url_of
from tests.clients.stores import Loops, differing
from tests.server.running import MIB
from tests.transports.certificates import issue

by_one_dress = pytest.mark.parametrize("dress", differing(DRESSES))
"""For what the files say, which no dress reads by itself."""


def read(store: BlockingStore, keys: Iterable[str]) -> dict[str, bytes]:
    return {key: bytes(value) for key, value in zip(keys, store.get_many(list(keys)), strict=True) if value is not None}


def refusal(loops: Loops, dress: str, url: str, **options: Any) -> str:
    """What a client is told that is not let in, with a deadline that nobody waits
    for.
    """
    with pytest.raises(TlsFailed) as refused, opened(loops, dress, url, deadline_s=60, **options):
        pass
    text = str(refused.value)
    assert "\n" not in text
    return text


def test_blocks_of_any_length_travel_both_ways(loops: Loops, dress: str, tmp_path: Path) -> None:
    files = issue(tmp_path)
    blocks = {f"block-{size}": os.urandom(size) for size in (1, 100, 16384, 16385, 100_000, 3 * MIB)}
    blocks |= {f"small-{index}": os.urandom(64) for index in range(3000)}  # many share a record
    with serving(loops, files) as server, opened(loops, dress, url_of(server, f"?ca={files.ca}")) as store:
        store.put_many(blocks)
        assert read(store, blocks) == blocks
        target = bytearray(3 * MIB)
        store.get_into(f"block-{3 * MIB}", target)
        assert target == blocks[f"block-{3 * MIB}"]
        assert store.stats().transport == "tls"


@by_one_dress
def test_a_context_says_the_same_as_files(loops: Loops, dress: str, tmp_path: Path) -> None:
    files = issue(tmp_path)
    context = ssl.create_default_context(cafile=str(files.ca))
    with serving(loops, files) as server, opened(loops, dress, server.url, tls=context) as store:
        store.put("key", b"value")
        assert store.get("key") == b"value"


def test_a_server_that_asks_for_certificates_lets_in_who_has_one(loops: Loops, dress: str, tmp_path: Path) -> None:
    files = issue(tmp_path)
    mine = issue(tmp_path, "client", ca="clients", stem="client")
    options = f"?ca={files.ca}&cert={mine.cert}&key={mine.key}"
    with serving(loops, files, tls_client_ca=mine.ca) as server:
        with opened(loops, dress, url_of(server, options)) as store:
            store.put("key", b"value")
        assert "wants a certificate of the client; give cert=FILE and key=FILE" in refusal(
            loops, dress, url_of(server, f"?ca={files.ca}")
        )
        other = issue(tmp_path, "client", ca="others", stem="other")
        options = f"?ca={files.ca}&cert={other.cert}&key={other.key}"
        assert "no authority in --tls-client-ca has signed it" in refusal(loops, dress, url_of(server, options))


@by_one_dress
def test_a_client_whose_certificate_has_expired_is_told_so_and_the_log_has_it(
    loops: Loops, dress: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = issue(tmp_path)
    mine = issue(tmp_path, "client", ca="clients", stem="client", expired=True)
    options = f"?ca={files.ca}&cert={mine.cert}&key={mine.key}"
    with serving(loops, files, tls_client_ca=mine.ca) as server, caplog.at_level("INFO", logger="infinistore"):
        assert "refused this client's certificate, which has expired; give a new one" in refusal(
            loops, dress, url_of(server, options)
        )
        issue(tmp_path, "client", ca="clients", into=mine)
        with opened(loops, dress, url_of(server, options)) as store:
            store.put("key", b"value")
    said = [vars(record)["error"] for record in caplog.records if record.message == "no TLS"]
    assert said
    assert set(said) == {"the client's certificate was refused: certificate has expired; see --tls-client-ca"}


def test_a_certificate_of_a_stranger_is_refused(loops: Loops, dress: str, tmp_path: Path) -> None:
    files = issue(tmp_path)
    wrong = issue(tmp_path, ca="wrong", stem="wrong")
    with serving(loops, files) as server:
        text = refusal(loops, dress, url_of(server, f"?ca={wrong.ca}"))
        assert "is signed by no authority that this client trusts" in text
        assert "ca=FILE" in refusal(loops, dress, url_of(server))  # the system's authorities


@pytest.mark.parametrize(
    ("name", "expired", "problem"),
    [
        ("127.0.0.1", True, "has expired; the server needs a new one"),
        ("elsewhere.example", False, r"is for another name.*127\.0\.0\.1"),
    ],
)
def test_a_certificate_that_is_not_good_is_refused(
    loops: Loops, name: str, expired: bool, problem: str, tmp_path: Path
) -> None:
    files = issue(tmp_path, name, expired=expired)
    with serving(loops, files) as server:
        assert re.search(problem, refusal(loops, "threads", url_of(server, f"?ca={files.ca}")))


def test_a_name_is_checked_as_a_name(loops: Loops, tmp_path: Path) -> None:
    files = issue(tmp_path, "localhost")
    with serving(loops, files) as server:
        with opened(loops, "threads", url_of(server, f"?ca={files.ca}", host="localhost")) as store:
            store.put("key", b"value")
        assert "is for another name" in refusal(loops, "threads", url_of(server, f"?ca={files.ca}"))


def test_a_plain_client_learns_that_the_port_speaks_tls(loops: Loops, dress: str, tmp_path: Path) -> None:
    with serving(loops, issue(tmp_path)) as server:
        text = refusal(loops, dress, server.url)
        assert text == "this port speaks TLS, and the client does not; connect with infinistores://HOST:PORT?ca=FILE"


def test_a_client_with_tls_learns_that_the_port_is_plain(
    loops: Loops, dress: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = issue(tmp_path)
    with serving(loops, None) as server, caplog.at_level("INFO", logger="infinistore"):
        text = refusal(loops, dress, url_of(server, f"?ca={files.ca}"))
        assert text.endswith("does not speak TLS; use infinistore://, or start the server with --tls-cert")


def test_the_token_is_asked_for_inside_of_tls(loops: Loops, tmp_path: Path) -> None:
    files = issue(tmp_path)
    token_file = tmp_path / "token"
    token_file.write_text("secret")
    token_file.chmod(0o600)
    with serving(loops, files, token_file=token_file) as server:
        with (
            pytest.raises(infinistore.AuthenticationFailed),
            opened(loops, "threads", url_of(server, f"?ca={files.ca}")),
        ):
            pass
        url = url_of(server, f"?ca={files.ca}&token_file={token_file}")
        with opened(loops, "threads", url) as store:
            store.put("key", b"value")


@by_one_dress
def test_clients_on_the_host_share_memory_as_ever(loops: Loops, dress: str, tmp_path: Path) -> None:
    files = issue(tmp_path)
    with serving(loops, files, unix_socket=str(tmp_path / "store.sock")) as server:
        with opened(loops, dress, url_of(server, f"?ca={files.ca}"), inline_bytes=0) as store:
            store.put("key", b"value")
            assert store.get("key") == b"value"
            assert store.stats().transport == "shm"
        with opened(loops, dress, f"unix://{server.unix_path}") as store:
            assert store.get("key") == b"value"


@pytest.mark.parametrize("where", ["URL", "tls"])
def test_every_node_of_a_cluster_is_reached_by_tls(loops: Loops, dress: str, where: str, tmp_path: Path) -> None:
    files = issue(tmp_path)
    with serving(loops, files) as one, serving(loops, files) as two:
        nodes = ",".join(f"127.0.0.1:{server.server.addresses.port}" for server in (one, two))
        blocks = {f"key-{index}": os.urandom(1000) for index in range(50)}
        url, options = f"infinistores+static://{nodes}?ca={files.ca}", {}
        if where == "tls":
            url = f"infinistore+static://{nodes}"
            options = {"tls": ssl.create_default_context(cafile=str(files.ca))}
        with opened(loops, dress, url, **options) as store:
            store.put_many(blocks)
            assert read(store, blocks) == blocks
        assert len(one.core) + len(two.core) == 50
        assert min(len(one.core), len(two.core)) > 0


@pytest.mark.parametrize(
    ("url", "options", "problem"),
    [
        ("unix:///tmp/x.sock?ca=/a", {}, "a Unix socket has no TLS"),
        ("infinistores://h?key=/k", {}, "key is that of cert, which is missing"),
        ("infinistores://h?ca=/no/such/file", {}, "cannot read /no/such/file: No such file or directory"),
        ("infinistores://h?transport=rdma", {}, "RDMA does not encrypt blocks"),
        ("rdma://h", {"tls": "context"}, "RDMA does not encrypt blocks"),
        ("infinistores://h?device=mlx5_0", {}, "RDMA does not encrypt blocks"),
        ("tcp://h?ca=/a", {"tls": "context"}, "give either tls or ca"),
        ("tcp://h", {"tls": True}, "must be an ssl.SSLContext for a client"),
        ("tcp://h", {"tls": "server"}, "must be an ssl.SSLContext for a client"),
    ],
)
def test_what_contradicts_itself_is_refused_at_once(url: str, options: dict[str, Any], problem: str) -> None:
    made: dict[Any, Callable[[], Any]] = {
        "context": ssl.create_default_context,
        "server": lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
    }
    options = {name: made[value]() if value in made else value for name, value in options.items()}
    with pytest.raises(ConfigError) as refused, blocking.open_store(url, lazy=True, **options):
        pass
    assert problem in str(refused.value)


def test_rdma_is_allowed_with_tls_when_the_caller_says_so() -> None:
    context = ssl.create_default_context()
    given: dict[str, Any] = {"tls": context, "unencrypted_rdma": True, "device": "none", "deadline_s": 0.1}
    with (
        blocking.open_store("rdma://127.0.0.1:1", lazy=True, **given) as store,
        pytest.raises((StoreUnavailable, DeadlineExceeded)),
    ):
        store.exists("key")


def test_a_pair_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    mine, other = issue(tmp_path, "client"), issue(tmp_path, "client", stem="other")
    url = f"infinistores://127.0.0.1:1?cert={mine.cert}&key={other.key}"
    with pytest.raises(ConfigError) as refused, blocking.open_store(url, lazy=True):
        pass
    assert f"cert: the certificate in {mine.cert} does not fit the key in {other.key}" in str(refused.value)


def test_an_authority_is_no_key(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing")
    for option, problem in (("ca", "must hold the certificates of authorities"), ("cert", "must hold a certificate")):
        with (
            pytest.raises(ConfigError) as refused,
            blocking.open_store(f"infinistores://h?{option}={empty}", lazy=True),
        ):
            pass
        assert problem in str(refused.value)


@pytest.mark.process
def test_who_asks_for_no_tls_does_not_load_it() -> None:
    program = """
import sys
from infinistore.blocking import open_store
with open_store("tcp://127.0.0.1:1", lazy=True):
    print([name for name in sys.modules if name.startswith("infinistore.transports.tls")])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("auto", "infinistores://h:1?ca=/a"),
        ("tcp", "infinistores://h:1?ca=/a&transport=inline"),
        ("shm", "infinistores://h:1?ca=/a&transport=shm"),
        ("rdma", "infinistores://h:1?ca=/a&transport=rdma"),
    ],
)
def test_no_path_of_the_command_line_leaves_tls(path: str, expected: str) -> None:
    """Over tcp:// the token would go in the clear."""
    assert Target("infinistores://h:1?ca=/a", None, None, 0).over(path).url == expected


def test_the_unix_socket_of_a_server_with_tls_is_reached_without() -> None:
    assert "ca=" not in Target("infinistores://h:1?ca=/a&name=x", None, None, 0).over("unix").url
    assert unix_url("/s", "ca=/a&deadline_s=5&cert=/c&key=/k") == "unix:///s?deadline_s=5"
    assert unix_url("/s", "ca=/a") == "unix:///s"
