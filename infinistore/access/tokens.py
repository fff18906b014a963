"""Tokens of tenants: `ID.SECRET`, where SECRET has 256 random bits.

A server stores only the SHA-256 of a token. That suffices because nobody can guess 256
random bits: a slow hash, as for passwords, would cost every connection and add nothing.
"""

import base64
import hashlib
import re
from collections.abc import Callable
from typing import Final

from infinistore.tenant_limits import check_tenant_name

__all__ = ["DIGEST_PREFIX", "SUCCESSOR", "digest_of", "looks_like_token", "make_token", "read_digest", "tenant_of"]

SECRET_BYTES: Final = 32
DIGEST_PREFIX: Final = "sha256:"
"""What a stored hash begins with."""
SUCCESSOR: Final = ".take-over"
"""What a process presents that takes the server's place: no token of a tenant, which
has a name. It proves nothing; the user of the process has to be the server's."""
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]{20,}")


def make_token(tenant: str, random_bytes: Callable[[int], bytes]) -> str:
    """Return a new token of a tenant. `random_bytes` returns so many unpredictable
    bytes (`os.urandom`).

    Raises:
        ValueError: this cannot be the name of a tenant.
    """
    check_tenant_name(tenant)
    secret = base64.urlsafe_b64encode(random_bytes(SECRET_BYTES)).rstrip(b"=").decode()
    return f"{tenant}.{secret}"


def tenant_of(token: str) -> str:
    """Return the tenant that a token says it is of; empty if it names none."""
    name, dot, _ = token.partition(".")
    return name if dot else ""


def digest_of(token: str) -> str:
    """Return the hash under which a token is stored: `sha256:` and 64 hex digits."""
    return DIGEST_PREFIX + hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def read_digest(text: str) -> str | None:
    """Return a stored hash as `digest_of` writes it; None if this is none."""
    return text if _DIGEST.fullmatch(text) else None


def looks_like_token(text: str) -> bool:
    """Whether somebody may have written a token where its hash belongs."""
    return bool(_TOKEN.fullmatch(text))
