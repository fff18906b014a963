"""Reads the text of a tenants file, and names the line of whatever is wrong with it.

It is YAML: `tenants:` with one entry for each tenant, and `groups:` with the size of
each trust group. docs/tenants.md has the keys. A value that may be a secret is never
repeated in an error.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from infinistore.access.identity import Role
from infinistore.access.tenants import MOST_TOKENS, Tenant, Tenants, looks_like_token, read_digest
from infinistore.errors import ConfigError
from infinistore.settings import FALSE_WORDS, TRUE_WORDS, near
from infinistore.sizes import parse_size
from infinistore.tenant_limits import DEFAULT_GROUP, TenantLimits, check_tenant_name

__all__ = ["MOST_BYTES", "parse_tenants", "read_tree"]

MOST_BYTES: Final = 16 * 1024 * 1024
"""The longest tenants file."""
_MOST_DEPTH: Final = 16
Node: TypeAlias = Any
"""A `yaml.Node`: yaml is imported late, and its stubs do not tell its kinds apart."""
_NOBODY: Final = 65534  # everybody whom a container does not know
_LARGEST_UID: Final = 2**32 - 2
_NAME_IN_CERTIFICATE: Final = re.compile(r"(DNS|URI|email):([^\s*]{1,255})")
_WHAT_CERTIFICATES_ARE: Final = (
    "must be a name as in certificates, such as DNS:worker.example or URI:spiffe://site/worker"
)


def parse_tenants(text: str, name: str = "the tenants file") -> Tenants:
    """Return the tenants that a file describes; `name` is what errors call the file.

    Raises:
        ConfigError: it cannot be used. The error begins with the name and the line.
    """
    return _File(name).tenants(read_tree(text, name))


def read_tree(text: str, name: str, *, exact: bool = False) -> Node | None:
    """Return the nodes of a YAML document; with `exact`, with the places where each
    begins and ends in the text, which takes longer.

    Raises:
        ConfigError: this is no YAML, or more nested than a tenants file is.
    """
    import yaml  # late: most servers have no tenants

    if len(text) > MOST_BYTES:
        raise ConfigError(f"{name}: is longer than {MOST_BYTES >> 20} MiB; no tenants file is")
    loader: Any = yaml.SafeLoader if exact else getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_shape(yaml.parse(text, loader), name)
        return yaml.compose(text, loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f":{mark.line + 1}"
        problem = getattr(error, "problem", None) or "it has characters that no text has"
        raise ConfigError(f"{name}{line}: cannot be read as YAML: {problem}") from None
    except ConfigError:
        raise
    except (ValueError, OverflowError, RecursionError):  # of the scanner, for odd directives and escapes
        raise ConfigError(f"{name}: cannot be read as YAML") from None


def _check_shape(events: Iterable[Any], name: str) -> None:
    """Refuse what would take long to compose: a tenants file is flat."""
    from yaml import AliasEvent, CollectionEndEvent, CollectionStartEvent

    depth = 0
    for event in events:
        line = event.start_mark.line + 1
        if isinstance(event, AliasEvent):
            raise ConfigError(f"{name}:{line}: write it out; a tenants file has no aliases (*)")
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > _MOST_DEPTH:
            raise ConfigError(f"{name}:{line}: is nested too deeply for a tenants file")


class _Refused(Exception):
    """What is wrong, at a node."""

    def __init__(self, node: Node, problem: str) -> None:
        super().__init__(problem)
        self.line: int = node.start_mark.line + 1


class _File:
    def __init__(self, name: str) -> None:
        self._name = name

    def tenants(self, root: Node | None) -> Tenants:
        if root is None:
            raise ConfigError(f"{self._name}: is empty; add a tenant with `infinistore tenant add ID`")
        try:
            return _tenants(root)
        except _Refused as error:
            raise ConfigError(f"{self._name}:{error.line}: {error}") from None


def _tenants(root: Node) -> Tenants:
    parts = _mapping(root, "the file", ("tenants", "groups"))
    if "tenants" not in parts:
        raise _Refused(root, "there is no `tenants:`; add a tenant with `infinistore tenant add ID`")
    groups = {}
    if "groups" in parts:
        for key, value in _pairs(parts["groups"], "groups"):
            name = _named(key)
            groups[name] = _read(value, f"the size of group {name}", _size)
    found: dict[str, Tenant] = {}
    proofs: dict[object, tuple[str, int]] = {}
    for key, value in _pairs(parts["tenants"], "tenants"):
        tenant = _tenant(_named(key), key, value, groups)
        for proof, node in _proofs(tenant, value):
            if proof in proofs:
                other, line = proofs[proof]
                raise _Refused(
                    node, f"{_shown(proof)} belongs to tenant {other} (line {line}); it can prove one tenant"
                )
            proofs[proof] = tenant.id, node.start_mark.line + 1
        found[tenant.id] = tenant
    return Tenants(found, groups)


def _tenant(name: str, key: Node, node: Node, groups: Mapping[str, int]) -> Tenant:
    given = _mapping(node, f"tenant {name}", (*_READERS, *_LIMITS))
    limits = {one: _read(given[one], one, reader) for one, reader in _LIMITS.items() if one in given}
    try:
        checked = TenantLimits(name, **limits)
    except ValueError as error:
        blamed = next((one for one in limits if str(error).startswith(one)), None)
        raise _Refused(key if blamed is None else given[blamed], str(error)) from None
    if checked.group not in (groups or (DEFAULT_GROUP,)):
        hint = near(checked.group, groups)
        problem = f"there is no group {checked.group}{hint}" if hint else f"group {checked.group} has no size"
        raise _Refused(given.get("group", key), f"{problem}; add it to `groups:`, such as `{checked.group}: 4GiB`")
    return Tenant(
        checked, **{_READERS[one][0]: _READERS[one][1](value, one) for one, value in given.items() if one in _READERS}
    )


def _proofs(tenant: Tenant, node: Node) -> Iterator[tuple[object, Node]]:
    """Yield what proves a tenant, and where it says so."""
    given = {key.value: value for key, value in node.value} if node.value else {}
    for key, values in (("tokens", tenant.digests), ("certificates", tenant.certificates), ("uids", tenant.uids)):
        if values:
            yield from zip(values, given[key].value, strict=True)


def _shown(proof: object) -> str:
    return (
        "the same token"
        if str(proof).startswith("sha256:")
        else f"uid {proof}"
        if isinstance(proof, int)
        else f"{proof}"
    )


def _roles(node: Node, key: str) -> frozenset[Role]:
    names = [role.value for role in Role]

    def read(written: str) -> Role:
        if written not in names:
            raise ValueError(f"is no role{near(written, names)}; the roles are {', '.join(names)}")
        return Role(written)

    return frozenset(_read(one, "", read) for one in _items(node, key))


def _tokens(node: Node, key: str) -> tuple[str, ...]:
    found = []
    for one in _items(node, key):
        written = _scalar(one, "a token")
        digest = read_digest(written)
        if digest is None and looks_like_token(written):
            raise _Refused(
                one,
                "this is a token itself, and its place is with its client; write its hash "
                "(`infinistore tenant rotate` does), and take this token as revealed",
            )
        if digest is None:
            raise _Refused(
                one, "must be the hash of a token, sha256: and 64 hex digits; `infinistore tenant rotate` writes it"
            )
        found.append(digest)
    if len(found) > MOST_TOKENS:
        raise _Refused(
            node, f"has {len(found)} tokens, and {MOST_TOKENS} can be live; remove the oldest, which come first"
        )
    return tuple(found)


def _certificates(node: Node, key: str) -> tuple[str, ...]:
    def read(written: str) -> str:
        match = _NAME_IN_CERTIFICATE.fullmatch(written)
        if match is None:
            raise ValueError(_WHAT_CERTIFICATES_ARE)
        kind, name = match.groups()
        return f"{kind}:{name.lower()}" if kind == "DNS" else written

    return tuple(_read(one, "", read) for one in _items(node, key))


def _uids(node: Node, key: str) -> tuple[int, ...]:
    def read(written: str) -> int:
        number = _whole(written)
        if not 0 <= number <= _LARGEST_UID or number == _NOBODY:
            raise ValueError("is no user of this machine; write a number as `id -u` prints it")
        return number

    return tuple(_read(one, "", read) for one in _items(node, key))


def _switch(written: str) -> bool:
    if written.lower() not in (*TRUE_WORDS, *FALSE_WORDS):
        raise ValueError("must be true or false")
    return written.lower() in TRUE_WORDS


def _flag(node: Node, key: str) -> bool:
    return bool(_read(node, key, _switch))


def _whole(written: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", written):
        raise ValueError("must be a whole number")
    return int(written)


def _number(written: str) -> float:
    if not re.fullmatch(r"[0-9]{1,19}(\.[0-9]{1,9})?", written):
        raise ValueError("must be a number")
    return float(written)


def _size(written: str) -> int:
    return parse_size(written)


_LIMITS: Final[Mapping[str, Callable[[str], Any]]] = {
    "group": str,
    "reserved_bytes": _size,
    "max_bytes": _size,
    "max_keys": _whole,
    "disk_max_bytes": _size,
    "weight": _whole,
    "requests_per_s": _number,
    "bytes_per_s": _size,
    "max_connections": _whole,
}
_READERS: Final[Mapping[str, tuple[str, Callable[[Node, str], Any]]]] = {
    "tokens": ("digests", _tokens),
    "roles": ("roles", _roles),
    "operator": ("operator", _flag),
    "certificates": ("certificates", _certificates),
    "uids": ("uids", _uids),
    "require_tls": ("require_tls", _flag),
}
"""The keys of a tenant that are no limits: the attribute of each, and what reads it."""


def _named(key: Node) -> str:
    written = _scalar(key, "a name")
    try:
        check_tenant_name(written)
    except ValueError as error:
        raise _Refused(key, f"the name {error}") from None
    return written


def _mapping(node: Node, what: str, known: Iterable[str]) -> dict[str, Node]:
    """Return the values of a mapping that has only these keys, each once."""
    names = list(known)
    found = {}
    for key, value in _pairs(node, what):
        name = _scalar(key, "a key")
        if name not in names:
            raise _Refused(key, f"{what} has no key {name[:50]!r}{near(name, names)}")
        found[name] = value
    return found


def _pairs(node: Node, what: str) -> Iterator[tuple[Node, Node]]:
    if node.id != "mapping":
        raise _Refused(node, f"{what} must hold lines of the form `name: value`")
    lines: dict[str, int] = {}
    for key, value in node.value:
        name = _scalar(key, "a key")
        if name in lines:
            raise _Refused(key, f"{name[:50]} is there already, in line {lines[name]}; keep one of them")
        lines[name] = key.start_mark.line + 1
        yield key, value


def _items(node: Node, key: str) -> list[Node]:
    if node.id != "sequence":
        raise _Refused(node, f"{key} must be a list, such as [{_EXAMPLES[key]}]")
    return list(node.value)


_EXAMPLES: Final = {
    "tokens": "sha256:0123…",
    "roles": "read, write",
    "certificates": "DNS:worker.example",
    "uids": "1000",
}


def _scalar(node: Node, what: str) -> str:
    if node.id != "scalar":
        raise _Refused(node, f"{what} must be a word or a number, not a list or a mapping")
    written: str = node.value
    return written


def _read(node: Node, what: str, reader: Callable[[str], Any]) -> Any:
    written = _scalar(node, what or "an item")
    if not written:
        raise _Refused(node, f"{what or 'an item'} has no value; write one, or remove the line")
    try:
        return reader(written)
    except ValueError as error:
        raise _Refused(node, f"{what + ': ' if what else ''}{written[:50]!r} {error}") from None
