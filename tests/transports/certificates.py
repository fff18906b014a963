"""Certificates for tests of TLS, each made for one of them: right ones, and wrong ones
of every kind.
"""

import datetime
import functools
from pathlib import Path

import attrs
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

__all__ = ["Files", "authority", "issue", "issue_loosely"]


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


def issue_loosely(folder: Path, name: str) -> Files:
    """Write a certificate that does not name the key of its authority, which
    RFC 5280 does not allow.
    """
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer, subject = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, one)]) for one in ("loose", name))
    found = (
        _builder(issuer, issuer, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    made = (
        _builder(issuer, subject, key)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    files = Files(folder / "loose.pem", folder / "loose.key", folder / "loose-ca.pem")
    files.cert.write_bytes(made.public_bytes(Encoding.PEM))
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    files.ca.write_bytes(found.public_bytes(Encoding.PEM))
    return files


def _builder(issuer: x509.Name, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    day = datetime.timedelta(days=1)
    now = datetime.datetime.now(datetime.UTC)
    number = x509.random_serial_number()
    return x509.CertificateBuilder(issuer, subject, key.public_key(), number, now - day, now + day)
