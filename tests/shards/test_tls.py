"""A server with shards over TLS: all of it has one certificate, also after it was
renewed.
"""

import os
import signal
import ssl
from collections.abc import Iterator

import attrs
import pytest

from infinistore import blocking
from tests.asking import until
from tests.cluster_client.clusters import PATIENT
from tests.transports.certificates import Files, issue

from .conftest import HOST, NAMES, RunningShards, running_shards

pytestmark = pytest.mark.process
KEYS = [f"key {number}" for number in range(64)]


@attrs.define
class Encrypted:
    """A server with two shards, and the files of its certificate."""

    server: RunningShards
    files: Files

    def shown(self) -> list[str]:
        """The certificates that the shards and the management API show."""
        places = [(HOST, shard["port"]) for shard in self.server.shards()]
        places.append(("127.0.0.1", int(self.server.management.rpartition(":")[2])))
        return list(map(ssl.get_server_certificate, places))

    @property
    def on_disk(self) -> str:
        """The certificate in the file, which may have its authority after it."""
        end = "-----END CERTIFICATE-----\n"
        return self.files.cert.read_text().partition(end)[0] + end


@pytest.fixture(scope="module")
def encrypted(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encrypted]:
    files = issue(tmp_path_factory.mktemp("tls"), *NAMES)
    with running_shards(environment, "--tls-cert", str(files.cert), "--tls-key", str(files.key)) as server:
        server.ca = files.ca
        yield Encrypted(server, files)


def test_a_signal_renews_the_certificate_of_all_shards_and_clients_go_on(encrypted: Encrypted) -> None:
    assert encrypted.shown() == [encrypted.on_disk] * 3
    url = f"infinistores://{HOST}:{encrypted.server.port}?ca={encrypted.files.ca}&transport=inline"
    with blocking.open_store(url, **PATIENT) as store:
        store.put_many(dict.fromkeys(KEYS, b"value"))
        before = encrypted.on_disk
        issue(encrypted.files.cert.parent, *NAMES, into=encrypted.files)
        assert encrypted.on_disk != before
        encrypted.server.process.send_signal(signal.SIGHUP)
        until(lambda: encrypted.shown() == [encrypted.on_disk] * 3)
        assert store.get_many(KEYS) == [bytearray(b"value")] * len(KEYS)
    with blocking.open_store(url, **PATIENT) as store:
        assert all(store.exists_many(KEYS))


def test_a_pair_that_does_not_fit_changes_nothing_in_any_shard(encrypted: Encrypted) -> None:
    before, key = encrypted.on_disk, encrypted.files.key.read_bytes()
    encrypted.files.key.write_bytes(issue(encrypted.files.cert.parent, stem="other").key.read_bytes())
    status, said = encrypted.server.ask("/reload", "POST")
    assert status == 409
    assert said.count(b"does not fit the key") == 1
    assert encrypted.shown() == [before] * 3
    encrypted.files.key.write_bytes(key)
    assert encrypted.server.told("/reload", "POST") == {"status": "ok"}


def test_a_shard_that_is_started_again_has_the_certificate_of_now(encrypted: Encrypted) -> None:
    issue(encrypted.files.cert.parent, *NAMES, into=encrypted.files)
    assert encrypted.server.ask("/reload", "POST")[0] == 200
    shard = encrypted.server.shards()[1]
    os.kill(shard["pid"], signal.SIGKILL)
    encrypted.server.wait_for_restart(1, shard["restarts"] + 1)
    assert encrypted.shown() == [encrypted.on_disk] * 3
