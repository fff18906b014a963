"""Who somebody is: what proves it, what does not, and what a reload changes."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.access.identity import DEFAULT_IDENTITY, Credentials, Identity, Proof, Role
from infinistore.access.policy import OneTenant, TenantPolicy
from infinistore.access.tenants import Tenant, Tenants, digest_of, make_token
from infinistore.errors import AuthenticationFailed, PermissionDenied
from infinistore.tenant_limits import TenantLimits

ALICE, ALICE_NEW, BOB = (make_token(name, os.urandom) for name in ("alice", "alice", "bob"))


def tenants(*several: Tenant) -> Tenants:
    return Tenants({tenant.id: tenant for tenant in several})


def alice(*tokens: str, **more: object) -> Tenant:
    return Tenant(TenantLimits("alice"), tuple(map(digest_of, tokens)), **more)  # type: ignore[arg-type]


def bob(*tokens: str, **more: object) -> Tenant:
    return Tenant(TenantLimits("bob"), tuple(map(digest_of, tokens)), **more)  # type: ignore[arg-type]


def why_not(policy: TenantPolicy, presented: Credentials) -> str:
    with pytest.raises(AuthenticationFailed) as refused:
        policy.identify(presented)
    return str(refused.value)


def test_a_token_says_which_tenant_this_is() -> None:
    policy = TenantPolicy(tenants(alice(ALICE), bob(BOB, roles=frozenset((Role.READ,)))))
    assert policy.identify(Credentials(ALICE)).tenant == "alice"
    found = policy.identify(Credentials(BOB))
    assert (found.tenant, found.roles, found.proof) == ("bob", frozenset((Role.READ,)), Proof.TOKEN)


def test_both_live_tokens_are_good_and_no_other() -> None:
    policy = TenantPolicy(tenants(alice(ALICE, ALICE_NEW)))
    assert policy.identify(Credentials(ALICE)).tenant == policy.identify(Credentials(ALICE_NEW)).tenant == "alice"
    why_not(policy, Credentials(make_token("alice", os.urandom)))


def test_a_secret_is_no_other_tenants() -> None:
    """A tenant cannot present its own secret under a neighbour's name."""
    policy = TenantPolicy(tenants(alice(ALICE), bob(BOB)))
    why_not(policy, Credentials("alice." + BOB.partition(".")[2]))


def test_a_stranger_cannot_tell_a_wrong_secret_from_a_tenant_that_does_not_exist() -> None:
    policy = TenantPolicy(tenants(alice(ALICE)))
    answers = {
        why_not(policy, Credentials(token))
        for token in (
            "alice.wrong",
            "nobody.wrong",
            "alice",
            ".",
            "x",
            ALICE + "x",
            ALICE[:-1],
            digest_of(ALICE),
            "\udcff",
        )
    }
    assert len(answers) == 1


def test_a_stored_hash_opens_nothing() -> None:
    """Who reads the tenants file cannot come as one of its tenants."""
    policy = TenantPolicy(tenants(alice(ALICE)))
    for text in (digest_of(ALICE), "alice." + digest_of(ALICE), digest_of(ALICE).removeprefix("sha256:")):
        why_not(policy, Credentials(text))


def test_a_certificate_or_a_user_says_it_too_but_a_token_decides_alone() -> None:
    policy = TenantPolicy(tenants(alice(ALICE, certificates=("DNS:a.example",)), bob(uids=(1000,))))
    assert policy.looks_beyond_token
    assert policy.identify(Credentials(certificate=("DNS:x", "DNS:a.example"))).proof is Proof.CERTIFICATE
    assert policy.identify(Credentials(uid=1000)).tenant == "bob"
    assert policy.identify(Credentials(ALICE, uid=1000)).tenant == "alice"
    why_not(policy, Credentials("alice.wrong", certificate=("DNS:a.example",), uid=1000))
    assert "certificate given (DNS:x) is that of none" in why_not(policy, Credentials(certificate=("DNS:x",), uid=1001))
    assert "user 1001 of its machine is none" in why_not(policy, Credentials(uid=1001))
    assert "nothing says which one" in why_not(policy, Credentials())


def test_a_certificate_of_two_tenants_proves_neither() -> None:
    policy = TenantPolicy(tenants(alice(certificates=("DNS:a",)), bob(certificates=("DNS:b",))))
    assert "2 tenants" in why_not(policy, Credentials(certificate=("DNS:a", "DNS:b")))
    assert not TenantPolicy(tenants(alice(ALICE))).looks_beyond_token


def test_without_tenants_there_is_one_with_all_roles() -> None:
    assert OneTenant().identify(Credentials("whatever")) is DEFAULT_IDENTITY
    assert OneTenant("token").identify(Credentials("token")).roles == frozenset(Role)
    with pytest.raises(AuthenticationFailed, match="wants a token, and none"):
        OneTenant("token").identify(Credentials())
    with pytest.raises(AuthenticationFailed, match="is wrong"):
        OneTenant("token").identify(Credentials("\udcff"))


def test_what_was_proven_holds_until_its_proof_is_gone() -> None:
    policy = TenantPolicy(tenants(alice(ALICE, ALICE_NEW, certificates=("DNS:a",)), bob(BOB, uids=(7,))))
    old, new = policy.identify(Credentials(ALICE)), policy.identify(Credentials(ALICE_NEW))
    shown, other = policy.identify(Credentials(certificate=("DNS:a",))), policy.identify(Credentials(uid=7))
    changes = policy.replace(tenants(alice(ALICE_NEW, roles=frozenset((Role.READ,)))))
    assert (changes.added, changes.removed, changes.changed) == ((), ("bob",), ("alice",))
    assert policy.renew(old) is None
    assert policy.renew(shown) is None
    assert policy.renew(other) is None
    renewed = policy.renew(new)
    assert renewed is not None
    assert renewed.roles == {Role.READ}


def test_a_missing_role_is_named_with_the_remedy() -> None:
    identity = TenantPolicy(tenants(alice(ALICE))).identify(Credentials(ALICE))
    identity.check(Role.READ, "Get")
    with pytest.raises(PermissionDenied) as refused:
        identity.check(Role.ADMIN, "Purge")
    assert str(refused.value) == (
        "Purge needs the role admin, and tenant alice has read, write; the operator of the server adds it to roles in "
        "the tenants file"
    )


def test_no_secret_is_shown() -> None:
    shown = repr(Credentials(ALICE)) + repr(TenantPolicy(tenants(alice(ALICE))).identify(Credentials(ALICE)))
    assert ALICE not in shown + repr(OneTenant(ALICE))


names = st.sampled_from(["a", "b", "c"])
secrets = st.sampled_from(["1", "2", "3"])


@st.composite
def several(draw: st.DrawFn) -> Tenants:
    """Tenants of which no two have a proof in common."""
    made = {}
    free_names, free_uids = ["DNS:x", "DNS:y", "DNS:z"], [1, 2, 3]
    for name in draw(st.sets(names)):
        tokens = draw(st.lists(secrets, max_size=2, unique=True))
        certificates = [free_names.pop()] if draw(st.booleans()) else []
        uids = [free_uids.pop()] if draw(st.booleans()) else []
        roles = draw(st.frozensets(st.sampled_from(list(Role))))
        digests = tuple(digest_of(f"{name}.{token}") for token in tokens)
        proofs = tuple(certificates), tuple(uids)
        made[name] = Tenant(TenantLimits(name), digests, roles, False, *proofs, require_tls=draw(st.booleans()))
    return Tenants(made)


presented = st.builds(
    Credentials,
    token=st.builds("{}.{}".format, names, secrets) | st.just(""),
    certificate=st.lists(st.sampled_from(["DNS:x", "DNS:y", "DNS:z", "DNS:w"]), max_size=3).map(tuple),
    uid=st.none() | st.integers(0, 4),
    private=st.booleans(),
)


def model(found: Tenants, given_: Credentials) -> str | None:
    """Who the rules of docs/tenants.md let in: nothing here is optimized."""
    owner = owner_of(found, given_)
    return None if owner and found.tenants[owner].require_tls and not given_.private else owner


def owner_of(found: Tenants, given_: Credentials) -> str | None:
    if given_.token:
        owners = [one.id for one in found.tenants.values() if digest_of(given_.token) in one.digests]
        return owners[0] if owners else None
    by_name = {one.id for one in found.tenants.values() if set(one.certificates) & set(given_.certificate)}
    if by_name:
        return by_name.pop() if len(by_name) == 1 else None
    owners = [one.id for one in found.tenants.values() if given_.uid in one.uids]
    return owners[0] if owners else None


def identified(policy: TenantPolicy, given_: Credentials) -> Identity | None:
    try:
        return policy.identify(given_)
    except (AuthenticationFailed, PermissionDenied):
        return None


@given(several(), presented)
def test_who_somebody_is_follows_the_rules(found: Tenants, given_: Credentials) -> None:
    identity = identified(TenantPolicy(found), given_)
    assert (identity and identity.tenant) == model(found, given_)
    if identity is not None:
        assert identity.roles == found.tenants[identity.tenant].roles


@given(several(), several(), presented)
def test_a_session_outlives_a_reload_exactly_if_it_could_come_again_with_its_proof(
    before: Tenants, after: Tenants, given_: Credentials
) -> None:
    policy = TenantPolicy(before)
    identity = identified(policy, given_)
    policy.replace(after)
    if identity is None:
        return
    private = given_.private
    shown = {
        Proof.TOKEN: Credentials(given_.token, private=private),
        Proof.CERTIFICATE: Credentials(certificate=(identity.evidence,), private=private),
        Proof.UNIX_USER: Credentials(uid=given_.uid, private=private),
    }
    again = identified(policy, shown[identity.proof])
    if again is not None and again.tenant != identity.tenant:
        again = None  # what proved one tenant proves another now
    assert policy.renew(identity) == again
