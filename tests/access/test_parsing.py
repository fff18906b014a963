"""The tenants file: what it says, and the line of what is wrong with it."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from infinistore.access.identity import DEFAULT_ROLES, Role
from infinistore.access.tenants import Tenant, Tenants, digest_of
from infinistore.access.tenants_file import parse_tenants
from infinistore.errors import ConfigError
from infinistore.tenant_limits import TenantLimits
from tests.examples import examples

ONE, TWO, THREE = (digest_of(f"alice.{number}") for number in range(3))
WHOLE = f"""\
# who may come
groups:
  team: 2GiB
tenants:
  alice:
    tokens:
      - {ONE}   # old
      - {TWO}
    roles: [read, monitor]
    group: team
    reserved_bytes: 512MiB
    max_bytes: 1GiB
    max_keys: 1000
    weight: 3
    requests_per_s: 12.5
    bytes_per_s: 64MiB
  ops:
    group: team
    roles: [admin, monitor]
    operator: true
    require_tls: yes
    certificates: ["DNS:Ops.Example", "URI:spiffe://site/ops"]
    uids: [1000, 1001]
"""


def test_a_file_says_who_the_tenants_are_and_what_they_may_take() -> None:
    found = parse_tenants(WHOLE)
    assert found.groups == {"team": 2 << 30}
    assert found.tenants["alice"] == Tenant(
        TenantLimits("alice", "team", 512 << 20, 1 << 30, 1000, 3, 12.5, 64 << 20),
        digests=(ONE, TWO),
        roles=frozenset((Role.READ, Role.MONITOR)),
    )
    ops = found.tenants["ops"]
    assert ops.operator
    assert ops.require_tls
    assert found.by_certificate == {"DNS:ops.example": "ops", "URI:spiffe://site/ops": "ops"}
    assert found.by_uid == {1000: "ops", 1001: "ops"}


def test_a_tenant_reads_and_writes_unless_its_roles_say_otherwise() -> None:
    (tenant,) = parse_tenants("tenants: {a: {}}").tenants.values()
    assert tenant.roles == DEFAULT_ROLES == {Role.READ, Role.WRITE}
    assert not tenant.operator
    assert not tenant.require_tls
    assert tenant.limits == TenantLimits("a")


def bad(line: str) -> str:
    """A file whose line 7 is this, in the entry of bob."""
    return f"# 1\ntenants:\n  alice:\n    tokens: [{ONE}]\n    uids: [7]\n  bob:\n{line}\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (bad("    rols: [read]"), "tenant bob has no key 'rols'; did you mean roles?"),
        (bad("    roles: [reed]"), "'reed' is no role; did you mean read?; the roles are read, write, monitor, admin"),
        (bad("    roles: read"), "roles must be a list, such as [read, write]"),
        (bad("    max_bytes: many"), "'many' is not a size"),
        (bad("    max_bytes:"), "max_bytes has no value"),
        (bad("    max_bytes: 0"), "max_bytes must be a whole number from 1"),
        (bad("    max_keys: -1"), "max_keys: '-1' must be a whole number"),
        (bad("    requests_per_s: .inf"), "must be a number"),
        (bad("    operator: maybe"), "operator: 'maybe' must be true or false"),
        (bad("    require_tls: 2"), "require_tls: '2' must be true or false"),
        (bad("    group: team"), "group team has no size; add it to `groups:`, such as `team: 4GiB`"),
        (bad("    uids: [root]"), "'root' must be a whole number"),
        (bad("    uids: [65534]"), "is no user of this machine"),
        (bad("    uids: [7]"), "uid 7 belongs to tenant alice (line 5)"),
        (bad("    certificates: [worker.example]"), "must be a name as in certificates, such as DNS:worker.example"),
        (bad("    certificates: ['DNS:*.example']"), "must be a name as in certificates"),
        (bad(f"    tokens: [{ONE}]"), "the same token belongs to tenant alice (line 4)"),
        (bad(f"    tokens: [{ONE[7:]}]"), "must be the hash of a token, sha256: and 64 hex digits"),
        (bad(f"    tokens: [{ONE}, {TWO}, {THREE}]"), "has 3 tokens, and 2 can be live; remove the oldest"),
        (bad("    weight: {}"), "weight must be a word or a number"),
        (bad("    [read]: x"), "a key must be a word"),
        (bad("    roles: [read\n    weight: 1")[:-1], "cannot be read as YAML"),
        (bad("  alice: {}"), "alice is there already, in line 3; keep one of them"),
        (bad("  a.b: {}"), "the name must be 1 to 64 letters"),
    ],
)
def test_an_error_in_line_7_says_line_7_and_what_to_do(text: str, problem: str) -> None:
    if "  bob:\n  a" in text:
        text = text.replace("  bob:\n", "  bob: {}\n")
    with pytest.raises(ConfigError) as refused:
        parse_tenants(text, "tenants.yaml")
    line = 8 if "cannot be read" in problem else 7
    assert str(refused.value).startswith(f"tenants.yaml:{line}: ")
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_token_in_place_of_its_hash_is_refused_and_not_shown() -> None:
    token = "bob.c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2U"
    with pytest.raises(ConfigError, match=r"^t:7: this is a token itself.*take this token as revealed") as refused:
        parse_tenants(bad(f"    tokens: [{token}]"), "t")
    assert token.partition(".")[2] not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "t: is empty"),
        ("# nothing\n", "t: is empty"),
        ("tenants:\n", "t:1: tenants must hold lines"),
        ("groups: {}\n", "t:1: there is no `tenants:`"),
        ("- a\n", "t:1: the file must hold lines"),
        ("tenants: {a: &x {}, b: *x}", "t:1: write it out"),
        ("tenants: " + "[" * 100, "t:1: is nested too deeply"),
        ("tenants: " + "[" * 100_000, "t:1: "),  # whoever is first to count, libyaml or this project
        ("tenants: {}\n---\ntenants: {}\n", "cannot be read as YAML"),
        ("\0", "cannot be read as YAML"),
    ],
)
def test_what_is_no_tenants_file_is_refused_in_one_line(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_tenants(text, "t")
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


@settings(max_examples=examples(40))
@given(st.text() | st.text(alphabet="tenants:{}[]-, \n\"'&*!|>%@#aroles0"))
def test_any_text_is_tenants_or_a_config_error(text: str) -> None:
    try:
        found: Tenants | ConfigError = parse_tenants(text)
    except ConfigError as error:
        found = error
    assert isinstance(found, Tenants) or str(found).startswith("the tenants file")


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,10}", fullmatch=True)
sizes = st.integers(1, 1 << 50)
digests = st.integers(0, 1 << 60).map(lambda number: digest_of(str(number)))


@st.composite
def entries(draw: st.DrawFn) -> dict[str, object]:
    entry: dict[str, object] = {}
    if draw(st.booleans()):
        entry["roles"] = draw(st.lists(st.sampled_from([role.value for role in Role]), max_size=4))
    if draw(st.booleans()):
        entry["max_keys"] = draw(st.integers(1, 10**9))
    if draw(st.booleans()):
        entry["max_bytes"] = draw(sizes)
    if draw(st.booleans()):
        entry["operator"] = draw(st.booleans())
    if draw(st.booleans()):
        entry["require_tls"] = draw(st.booleans())
    entry["tokens"] = draw(st.lists(digests, max_size=2, unique=True))
    entry["uids"] = draw(st.lists(st.integers(0, 60_000), max_size=2, unique=True))
    return entry


@given(st.dictionaries(names, entries(), max_size=5), st.booleans())
def test_what_yaml_writes_is_read_as_it_was_meant_or_names_whom_it_doubles(
    file: dict[str, dict[str, object]], flow: bool
) -> None:
    text = yaml.safe_dump({"tenants": file}, default_flow_style=flow)
    proofs = [proof for entry in file.values() for key in ("tokens", "uids") for proof in entry[key]]  # type: ignore[attr-defined]
    if len(set(proofs)) < len(proofs):
        with pytest.raises(ConfigError, match="belongs to tenant"):
            parse_tenants(text)
        return
    found = parse_tenants(text).tenants
    assert found.keys() == file.keys()
    for name, entry in file.items():
        tenant = found[name]
        assert tenant.limits.max_keys == entry.get("max_keys")
        assert tenant.limits.max_bytes == entry.get("max_bytes")
        assert tenant.operator == entry.get("operator", False)
        assert tenant.require_tls == entry.get("require_tls", False)
        assert list(tenant.digests) == entry["tokens"]
        assert list(tenant.uids) == entry["uids"]
        assert {role.value for role in tenant.roles} == set(entry.get("roles", ["read", "write"]))  # type: ignore[call-overload]


def test_a_thousand_tenants_are_read_and_the_last_line_is_named() -> None:
    entries = (f"  t{n}:\n    tokens: [{digest_of(str(n))}]\n    max_keys: {n + 1}\n" for n in range(1000))
    text = "tenants:\n" + "".join(entries)
    assert len(parse_tenants(text).tenants) == 1000
    with pytest.raises(ConfigError, match=r"^t:3002: t0 is there already, in line 2"):
        parse_tenants(text + "  t0: {}\n", "t")
