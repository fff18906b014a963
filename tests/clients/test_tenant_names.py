"""Tenants that a certificate or a user of the machine names, for every kind of client:
nobody else is let in, and what a client says of itself counts for nothing.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from infinistore.access.tenants import digest_of, make_token
from infinistore.errors import AuthenticationFailed, PermissionDenied
from tests import warm
from tests.clients.dresses import opened, serving, url_of
from tests.clients.stores import Loops
from tests.transports.certificates import Files, authority, issue

USER, NOBODY = 4321, 4322
BOB = make_token("bob", os.urandom)
BY_TOKEN = f"""\
groups: {{team: 4MiB}}
tenants:
  bob:
    group: team
    tokens: [{digest_of(BOB)}]
"""
BY_CERTIFICATE = (
    BY_TOKEN
    + """\
  alice:
    group: team
    certificates: ["DNS:worker.example"]
"""
)
BY_USER = (
    BY_TOKEN
    + f"""\
  alice:
    group: team
    uids: [{USER}]
  me:
    group: team
    uids: [{os.getuid()}]
"""
)


def written(folder: Path, text: str) -> Path:
    path = folder / "tenants.yaml"
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody can enter, unlike those of pytest."""
    with TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def identified(loops: Loops, dress: str, url: str, **options: object) -> str:
    """Return who a client is to the server: the refusal of what no tenant here may do
    names it.
    """
    with opened(loops, dress, url, **options) as store:
        store.put("key", b"value")
        with pytest.raises(PermissionDenied) as denied:
            store.purge()
        return str(denied.value).partition("tenant ")[2].partition(" ")[0]


def refusal(loops: Loops, dress: str, url: str, **options: object) -> str:
    with pytest.raises(AuthenticationFailed) as refused, opened(loops, dress, url, deadline_s=60, **options):
        pass
    assert "\n" not in str(refused.value)
    return str(refused.value)


def options_of(files: Files, mine: Files) -> str:
    return f"?ca={files.ca}&cert={mine.cert}&key={mine.key}"


def test_a_certificate_names_the_tenant_whatever_the_client_calls_itself(
    loops: Loops, dress: str, tmp_path: Path
) -> None:
    file, files = written(tmp_path, BY_CERTIFICATE), issue(tmp_path)
    mine = issue(tmp_path, "other.example", "Worker.example", ca="clients", stem="client")
    with serving(loops, files, tenants=file, tls_client_ca=mine.ca) as server:
        url = url_of(server, options_of(files, mine))
        assert identified(loops, dress, url, name="bob") == "alice"
        assert identified(loops, dress, url, token=BOB) == "bob"  # a token that is given decides alone
        assert "is none of this server's" in refusal(loops, dress, url, token="alice.guessed")


def test_a_certificate_of_nobody_is_refused_with_the_names_in_it(loops: Loops, dress: str, tmp_path: Path) -> None:
    """Its common name is a name that it gives itself, and stands for nobody."""
    file, files = written(tmp_path, BY_CERTIFICATE), issue(tmp_path)
    mine = issue(tmp_path, ca="clients", stem="client")
    made = authority("clients").issue_cert("stranger.example", common_name="worker.example")
    mine.cert.write_bytes(b"".join(one.bytes() for one in made.cert_chain_pems))
    mine.key.write_bytes(made.private_key_pem.bytes())
    with serving(loops, files, tenants=file, tls_client_ca=mine.ca) as server:
        text = refusal(loops, dress, url_of(server, options_of(files, mine)), name="alice")
        assert text == (
            "this server has tenants, and the certificate given (DNS:stranger.example) is that of none; "
            "give the token of a tenant"
        )


@pytest.mark.parametrize("scheme", ["unix", "shm"])
def test_the_user_of_a_process_names_the_tenant(loops: Loops, dress: str, scheme: str, tmp_path: Path) -> None:
    file = written(tmp_path, BY_USER)
    with serving(loops, None, tenants=file, unix_socket=str(tmp_path / "s")) as server:
        assert identified(loops, dress, f"{scheme}://{server.unix_path}", name="alice") == "me"
        # Over TCP, nobody says whose process this is.
        assert "nothing says which one this is" in refusal(loops, dress, server.url, name="alice")


AS_ANOTHER_USER = """
import asyncio, os, sys, trio
import infinistore
from infinistore import aio, blocking

url, *uids = sys.argv[1:]
with blocking.open_store("tcp://127.0.0.1:1", lazy=True):
    pass  # what is imported late must be imported by who may read it
os.setgroups([])
uid = int(uids[0])
if os.fork() == 0:
    uid = int(uids[1])
else:
    os.wait()
os.setgid(uid)
os.setuid(uid)

async def trio_client():
    async with infinistore.open_store(url, name="alice") as store:
        await store.purge()

async def asyncio_client():
    async with aio.open_store(url, name="alice") as store:
        await store.purge()

def threads_client():
    with blocking.open_store(url, name="alice") as store:
        store.purge()

for call in (lambda: trio.run(trio_client), lambda: asyncio.run(asyncio_client()), threads_client):
    try:
        call()
    except infinistore.InfiniStoreException as error:
        print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.process
@pytest.mark.skipif("os.getuid() != 0", reason="only root can become another user")
def test_another_user_is_another_tenant_or_nobody(loops: Loops, tmp_path: Path, open_folder: Path) -> None:
    """In all three dresses, of which each calls itself alice."""
    told = [
        f"AuthenticationFailed: this server has tenants, and user {NOBODY} of its machine is none;",
        "PermissionDenied: Purge needs the role admin, and tenant alice has read, write;",
    ]
    file = written(tmp_path, BY_USER)
    with serving(loops, None, tenants=file, unix_socket=str(open_folder / "s"), unix_socket_access="all") as server:
        command = [sys.executable, "-c", AS_ANOTHER_USER, f"unix://{server.unix_path}", str(USER), str(NOBODY)]
        ended = warm.run(command, capture_output=True, text=True, check=False)
    lines = ended.stdout.splitlines()
    assert len(lines) == 6, ended.stderr
    assert all(line.startswith(told[index // 3]) for index, line in enumerate(lines))
