"""Tokens: what they are made of, and what of them is stored."""

import os
from collections.abc import Callable

import pytest

from infinistore.access.tenants import digest_of, looks_like_token, make_token, read_digest, tenant_of


def counting() -> Callable[[int], bytes]:
    return lambda count: bytes(range(count))


def test_a_token_names_its_tenant_and_has_256_random_bits() -> None:
    asked: list[int] = []

    def random_bytes(count: int) -> bytes:
        asked.append(count)
        return os.urandom(count)

    token = make_token("alice", random_bytes)
    assert tenant_of(token) == "alice"
    assert asked == [32]
    assert len(token.partition(".")[2]) == 43  # 256 bits, six to a character
    assert make_token("alice", os.urandom) != token


def test_what_is_stored_is_a_hash_from_which_the_token_does_not_follow() -> None:
    token = make_token("alice", counting())
    digest = digest_of(token)
    assert read_digest(digest) == digest
    assert token.partition(".")[2] not in digest
    assert digest != digest_of(make_token("bob", counting()))  # the same secret, another tenant


@pytest.mark.parametrize(
    "text", ["", "sha256:", "0" * 64, "sha256:" + "0" * 63, "sha256:" + "A" * 64, "sha256:" + "0" * 65]
)
def test_nothing_else_is_a_stored_hash(text: str) -> None:
    assert read_digest(text) is None


def test_a_token_is_told_from_its_hash() -> None:
    assert looks_like_token(make_token("alice", counting()))
    assert not looks_like_token(digest_of("alice.x"))


@pytest.mark.parametrize("name", ["", "a.b", "-a", "a b", "\N{SNOWMAN}", "a" * 65])
def test_no_token_is_made_for_what_is_no_name(name: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        make_token(name, counting())
