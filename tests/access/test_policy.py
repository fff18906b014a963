"""Who somebody is: what proves it, what does not, and what a reload changes."""

import os

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.access.audit import Audit
from infinistore.access.identity import DEFAULT_IDENTITY, Credentials, Identity, Proof, Role
from infinistore.access.policy import OneTenant, TenantPolicy
from infinistore.access.tenants import SUCCESSOR, Tenant, Tenants, digest_of, make_token
from infinistore.errors import AuthenticationFailed, PermissionDenied
from infinistore.tenant_limits import TenantLimits

ALICE = make_token("alice", os.urandom)


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
    (answer,) = answers
    assert "none of this server's" in answer


def test_a_stored_hash_opens_nothing() -> None:
    """Who reads the tenants file cannot come as one of its tenants."""
    policy = TenantPolicy(tenants(alice(ALICE)))
    for text in (digest_of(ALICE), "alice." + digest_of(ALICE), digest_of(ALICE).removeprefix("sha256:")):
        why_not(policy, Credentials(text))


def test_who_is_nobody_is_told_what_was_seen_of_him() -> None:
    policy = TenantPolicy(tenants(alice(certificates=("DNS:a",)), bob(certificates=("DNS:b",))))
    assert "2 tenants" in why_not(policy, Credentials(certificate=("DNS:a", "DNS:b")))
    shown = why_not(policy, Credentials(certificate=("DNS:x", "DNS:y"), uid=1001))
    assert "certificate given (DNS:x, DNS:y) is that of none" in shown
    assert "user 1001 of its machine is none" in why_not(policy, Credentials(uid=1001))
    assert "nothing says which one" in why_not(policy, Credentials())
    assert "as that user" in why_not(policy, Credentials(SUCCESSOR))


def test_who_must_come_over_tls_is_told_how() -> None:
    policy = TenantPolicy(tenants(alice(ALICE, require_tls=True)))
    with pytest.raises(PermissionDenied) as refused:
        policy.identify(Credentials(ALICE))
    assert str(refused.value) == (
        "tenant alice must come over TLS (require_tls in the tenants file), and this connection has none: connect with "
        "infinistores://HOST:PORT?ca=FILE, for which the server needs --tls-cert, or on its machine by its Unix socket"
    )


def test_certificates_and_users_are_looked_at_where_they_name_a_tenant() -> None:
    assert not TenantPolicy(tenants(alice(ALICE))).looks_beyond_token
    assert TenantPolicy(tenants(alice(certificates=("DNS:a",)))).looks_beyond_token
    assert TenantPolicy(tenants(alice(uids=(7,)))).looks_beyond_token


def test_who_came_is_noted_where_it_was_asked_for() -> None:
    audit = Audit()
    assert TenantPolicy(tenants(), audit).audit is audit
    assert isinstance(TenantPolicy(tenants()).audit, Audit)


def test_without_tenants_there_is_one_with_all_roles() -> None:
    assert OneTenant().identify(Credentials("whatever")) is DEFAULT_IDENTITY
    assert OneTenant("token").identify(Credentials("token")) == attrs.evolve(DEFAULT_IDENTITY, proof=Proof.TOKEN)
    with pytest.raises(AuthenticationFailed, match=r"^this server wants a token, and none was given; the right"):
        OneTenant("token").identify(Credentials())
    with pytest.raises(AuthenticationFailed, match=r"^the token given is wrong; the right"):
        OneTenant("token").identify(Credentials("\udcff"))


def test_what_was_proven_holds_until_its_proof_is_gone() -> None:
    before = tenants(alice(ALICE, certificates=("DNS:a",), require_tls=True), bob(uids=(7,)))
    policy = TenantPolicy(before)
    shown = (Credentials(ALICE, private=True), Credentials(certificate=("DNS:a",), private=True), Credentials(uid=7))
    found = [policy.identify(one) for one in shown]
    policy.replace(before)
    assert [policy.renew(one) for one in found] == found
    changes = policy.replace(tenants(alice(), bob(require_tls=True, uids=(7,))))
    assert (changes.added, changes.removed, changes.changed) == ((), (), ("alice", "bob"))
    assert [policy.renew(one) for one in found] == [None] * 3
    policy.replace(tenants(bob(uids=(8,))))
    assert [policy.renew(one) for one in found] == [None] * 3


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


names = st.sampled_from(["a", "b"])
secrets = st.sampled_from(["1", "2", "3"])
mostly = st.sampled_from([True, True, False])
named = st.sampled_from(["DNS:x", "DNS:y", "DNS:z"])


@st.composite
def several(draw: st.DrawFn) -> Tenants:
    """Tenants of which no two have a proof in common."""
    made = {}
    free_names, free_uids = ["DNS:x", "DNS:y"], [1, 2]
    for name in draw(st.sets(names)):
        tokens = draw(st.lists(secrets, max_size=2, unique=True))
        certificates = (free_names.pop(),) if draw(mostly) else ()
        uids = (free_uids.pop(),) if draw(mostly) else ()
        roles = draw(st.frozensets(st.sampled_from(list(Role))))
        digests = tuple(digest_of(f"{name}.{token}") for token in tokens)
        operator, require_tls = draw(st.booleans()), draw(st.sampled_from([False, False, True]))
        limits = TenantLimits(name)
        made[name] = Tenant(limits, digests, roles, operator, certificates, uids, require_tls=require_tls)
    return Tenants(made)


tokens = st.builds("{}.{}".format, names, secrets) | st.just(SUCCESSOR)
uids = st.none() | st.integers(0, 3)
presented = st.one_of(
    st.builds(Credentials, token=tokens, uid=uids, private=st.booleans()),
    st.builds(Credentials, certificate=st.tuples(named), private=st.booleans()),
    st.builds(Credentials, uid=uids, private=st.booleans()),
    st.builds(
        Credentials,
        token=tokens | st.just(""),
        certificate=st.lists(named, max_size=3).map(tuple),
        uid=uids,
        private=st.booleans(),
    ),
)


@st.composite
def credentials_for(draw: st.DrawFn, found: Tenants, own_uid: int | None) -> Credentials:
    """What one of these tenants or a successor has, or anything."""
    private, all_ = draw(st.booleans()), found.tenants.values()
    known = {digest for one in all_ for digest in one.digests}
    written = [f"{one.id}.{secret}" for one in all_ for secret in "123"]
    good = [
        [Credentials(token, private=private) for token in written if digest_of(token) in known],
        [Credentials(certificate=one.certificates, private=private) for one in all_ if one.certificates],
        [Credentials(uid=uid, private=private) for one in all_ for uid in one.uids],
        [Credentials(SUCCESSOR, uid=own_uid, private=private)],
    ]
    chosen: Credentials = draw(st.one_of(presented, *(st.sampled_from(kind) for kind in good if kind)))
    return chosen


def model(found: Tenants, own_uid: int | None, given_: Credentials) -> Identity | None:
    """Who the rules of docs/tenants.md let in: nothing here is optimized."""
    if given_.token == SUCCESSOR:
        known = given_.uid is not None and given_.uid == own_uid
        nobody = TenantLimits("default")
        return Identity("default", frozenset(), nobody, Proof.SUCCESSOR, private=given_.private) if known else None
    all_, digest, uid = found.tenants.values(), digest_of(given_.token), given_.uid
    by_token = {one.id: (Proof.TOKEN, digest) for one in all_ if digest in one.digests}
    by_name = {
        one.id: (Proof.CERTIFICATE, name) for one in all_ for name in one.certificates if name in given_.certificate
    }
    by_user = {one.id: (Proof.UNIX_USER, str(uid)) for one in all_ if uid in one.uids}
    owners = by_token if given_.token else by_name or by_user
    if len(owners) != 1:
        return None
    ((name, (proof, evidence)),) = owners.items()
    one = found.tenants[name]
    if one.require_tls and not given_.private:
        return None
    return Identity(name, one.roles, one.limits, proof, one.operator, evidence, one.require_tls, given_.private)


def identified(policy: TenantPolicy, given_: Credentials) -> Identity | None:
    try:
        return policy.identify(given_)
    except (AuthenticationFailed, PermissionDenied):
        return None


@given(several(), uids, st.data())
def test_who_somebody_is_follows_the_rules(found: Tenants, own_uid: int | None, data: st.DataObject) -> None:
    given_ = data.draw(credentials_for(found, own_uid))
    assert identified(TenantPolicy(found, own_uid=own_uid), given_) == model(found, own_uid, given_)


@given(several(), uids, st.data())
def test_a_session_outlives_a_reload_exactly_if_it_could_come_again_with_its_proof(
    before: Tenants, own_uid: int | None, data: st.DataObject
) -> None:
    given_ = data.draw(credentials_for(before, own_uid))
    after = data.draw(st.just(before) | several())
    policy = TenantPolicy(before, own_uid=own_uid)
    identity = identified(policy, given_)
    told: list[Tenants] = []
    policy.on_change.append(told.append)
    changes = policy.replace(after)
    assert told == [after]
    old, new = before.tenants, after.tenants
    assert changes.added == tuple(sorted(name for name in new if name not in old))
    assert changes.removed == tuple(sorted(name for name in old if name not in new))
    assert changes.changed == tuple(sorted(name for name in new if name in old and new[name] != old[name]))
    if identity is None:
        return
    private = given_.private
    shown = {
        Proof.TOKEN: Credentials(given_.token, private=private),
        Proof.CERTIFICATE: Credentials(certificate=(identity.evidence,), private=private),
        Proof.UNIX_USER: Credentials(uid=given_.uid, private=private),
        Proof.SUCCESSOR: given_,
    }
    again = identified(policy, shown[identity.proof])
    if again is not None and again.tenant != identity.tenant:
        again = None  # what proved one tenant proves another now
    assert policy.renew(identity) == again
