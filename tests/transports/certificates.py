"""Certificates for tests of TLS, each made for one of them: right ones, and wrong ones
of every kind.
"""

import datetime
import functools
from pathlib import Path

import attrs
import trustme

__all__ = ["Files", "authority", "issue"]


@attrs.frozen
class Files:
    """Where a certificate, its key and its authority are."""

    cert: Path
    key: Path
    ca: Path


@functools.cache
def authority(name: str = "one") -> trustme.CA:
    """An authority, the same for the same name."""
    return trustme.CA(organization_name=name)


def issue(
    folder: Path, *names: str, ca: str = "one", expired: bool = False, stem: str = "server", into: Files | None = None
) -> Files:
    """Write a certificate for these names, or over the files that are there."""
    found = authority(ca)
    hour = datetime.timedelta(hours=1)
    now = datetime.datetime.now(datetime.UTC)
    made = found.issue_cert(*(names or ("127.0.0.1", "localhost")), not_after=now - hour if expired else None)
    files = into or Files(folder / f"{stem}.pem", folder / f"{stem}.key", folder / f"{stem}-ca.pem")
    files.cert.write_bytes(b"".join(one.bytes() for one in made.cert_chain_pems))
    files.key.write_bytes(made.private_key_pem.bytes())
    found.cert_pem.write_to_path(str(files.ca))
    return files
