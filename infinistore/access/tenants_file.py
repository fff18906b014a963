"""Reads the text of a tenants file, and names the line of whatever is wrong with it;
and changes such a text, and leaves the rest as it was written, comments included.

It is YAML: `tenants:` with one entry for each tenant, and `groups:` with the size of
each trust group. docs/tenants.md has the keys. A value that may be a secret is never
repeated in an error. Every change is verified: what comes out must be the tenants that
were meant. A file that is written in an unusual way is refused rather than spoiled.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import attrs

from infinistore.access.identity import Role
from infinistore.access.tenants import MOST_TOKENS, Tenant, Tenants, looks_like_token, read_digest
from infinistore.errors import ConfigError
from infinistore.settings import FALSE_WORDS, TRUE_WORDS, near
from infinistore.sizes import parse_size
from infinistore.tenant_limits import DEFAULT_GROUP, TenantLimits, check_tenant_name

MOST_BYTES: Final = 16 * 1024 * 1024
"""The longest tenants file."""
_MOST_DEPTH: Final = 16
Node: TypeAlias = Any
"""A `yaml.Node`: yaml is imported late, and its stubs do not tell its kinds apart."""
_LINE_BREAK: Final = re.compile("\n|\r(?!\n)|\x85|\u2028|\u2029")
"""Where YAML begins a line. `\\r\\n` is one break; its `\\r` stays with the line."""
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
    return _File(name).tenants(_read_tree(text, name))


def _read_tree(text: str, name: str, *, exact: bool = False) -> Node | None:
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


EMPTY_FILE: Final = """\
# The tenants of an InfiniStore server: docs/tenants.md. Only hashes of tokens are here.
tenants: {}
"""


def add_tenant(text: str, name: str, tenant: str, digest: str, *, keys: Mapping[str, str], note: str) -> str:
    """Return the text with one more tenant. `keys` are the lines of its entry, besides
    `tokens`, `digest` is empty for no token, and `note` becomes a comment behind it.

    Raises:
        ConfigError: there is such a tenant, a key cannot be used, or the file cannot be
            edited.
    """
    before = parse_tenants(text, name)
    if tenant in before.tenants:
        raise ConfigError(f"{name}: there is a tenant {tenant}; `infinistore tenant rotate {tenant}` gives it a token")
    lines = _Lines(text, name)
    key, entries = lines.tenants
    indent = " " * (entries.value[0][0].start_mark.column if entries.value else key.start_mark.column + 2)
    added = [f"{indent}{tenant}:", *_token_lines(indent + "  ", [(digest, note)] if digest else [])]
    added += [f"{indent}  {one}: {value}" for one, value in keys.items()]
    if entries.value:
        lines.insert_after(entries, added)
    else:
        lines.replace(key.start_mark.line, _last_line(entries), [f"{' ' * key.start_mark.column}tenants:", *added])
    after = parse_tenants(lines.text, name)
    return lines.verified(before, {**before.tenants, tenant: after.tenants.get(tenant)})


def replace_tokens(text: str, name: str, tenant: str, digests: Sequence[str], note: str = "") -> str:
    """Return the text with these tokens for a tenant, the oldest first. `note` becomes
    a comment behind those that are new.

    Raises:
        ConfigError: there is no such tenant, or the file cannot be edited.
    """
    assert len(digests) <= MOST_TOKENS
    before = parse_tenants(text, name)
    lines = _Lines(text, name)
    key, entry = lines.entry(tenant)
    tokens = next((pair for pair in entry.value if pair[0].value == "tokens"), None)
    indent = " " * (entry.value[0][0].start_mark.column if entry.value else key.start_mark.column + 2)
    notes = {} if tokens is None else {item.value: lines.comment_behind(item) for item in tokens[1].value}
    written = _token_lines(indent, [(digest, notes.get(digest, note)) for digest in digests])
    if tokens is not None:
        lines.replace(tokens[0].start_mark.line, _last_line(tokens[1]), written)
    elif entry.value:
        first = entry.value[0][0].start_mark.line
        lines.replace(first, first - 1, written)
    else:
        lines.replace(key.start_mark.line, _last_line(entry), [f"{' ' * key.start_mark.column}{tenant}:", *written])
    changed = attrs.evolve(before.tenants[tenant], digests=tuple(digests))
    return lines.verified(before, {**before.tenants, tenant: changed})


def remove_tenant(text: str, name: str, tenant: str) -> str:
    """Return the text without a tenant.

    Raises:
        ConfigError: there is no such tenant, or the file cannot be edited.
    """
    before = parse_tenants(text, name)
    lines = _Lines(text, name)
    key, entry = lines.entry(tenant)
    lines.replace(key.start_mark.line, _last_line(entry), [])
    left = {one: found for one, found in before.tenants.items() if one != tenant}
    if not left:
        whole, _ = lines.tenants
        lines.replace(whole.start_mark.line, whole.start_mark.line, [f"{' ' * whole.start_mark.column}tenants: {{}}"])
    return lines.verified(before, left)


class _Lines:
    """The lines of a file, and its nodes, which say where things are in them."""

    def __init__(self, text: str, name: str) -> None:
        self._name = name
        self._lines = _LINE_BREAK.split(text)
        self._root = _read_tree(text, name, exact=True)

    @property
    def text(self) -> str:
        """The text as it is by now."""
        return "\n".join(self._lines)

    @property
    def tenants(self) -> tuple[Node, Node]:
        """The key `tenants`, and what it holds."""
        assert self._root is not None
        key, found = next(pair for pair in self._root.value if pair[0].value == "tenants")
        return self._in_lines(key, found)

    def entry(self, tenant: str) -> tuple[Node, Node]:
        """The id of a tenant, and what it has.

        Raises:
            ConfigError: there is no such tenant, or the file cannot be edited.
        """
        for key, entry in self.tenants[1].value:
            if key.value == tenant:
                return self._in_lines(key, entry)
        raise ConfigError(f"{self._name}: there is no tenant {tenant}; `infinistore tenant list` shows those that are")

    def insert_after(self, node: Node, lines: Sequence[str]) -> None:
        """Insert lines behind the last one of a node."""
        at = _last_line(node) + 1
        self._lines[at:at] = lines

    def replace(self, first: int, last: int, lines: Sequence[str]) -> None:
        """Replace the lines from one to another, both included."""
        self._lines[first : last + 1] = lines

    def comment_behind(self, item: Node) -> str:
        """The comment behind an item, without its mark; empty if there is none."""
        rest = self._lines[item.end_mark.line][item.end_mark.column :]
        _, mark, comment = rest.partition("#")
        return comment.strip() if mark else ""

    def verified(self, before: Tenants, meant: Mapping[str, Tenant | None]) -> str:
        """Return the text, if it says what was meant.

        Raises:
            ConfigError: it does not.
        """
        try:
            after = parse_tenants(self.text, self._name)
        except ConfigError:
            raise self._by_hand() from None
        if after.tenants != dict(meant) or after.groups != before.groups:
            raise self._by_hand()
        return self.text

    def _in_lines(self, key: Node, found: Node) -> tuple[Node, Node]:
        """Return these if each thing in them has a line of its own."""
        if found.value and found.flow_style:
            raise self._by_hand()
        return key, found

    def _by_hand(self) -> ConfigError:
        return ConfigError(
            f"{self._name}: is not written as this command can edit it, one key a line and indented; write it so, or "
            "edit it by hand"
        )


def _token_lines(indent: str, tokens: Sequence[tuple[str, str]]) -> list[str]:
    if not tokens:
        return [f"{indent}tokens: []"]
    return [f"{indent}tokens:", *(f"{indent}  - {digest}{'  # ' + note if note else ''}" for digest, note in tokens)]


def _last_line(node: Node) -> int:
    """Return the number of the last line of a node. A block ends, for the parser, only
    where the next thing begins.
    """
    if node.id == "scalar" or node.flow_style or not node.value:
        return int(node.end_mark.line)
    last = node.value[-1]
    return _last_line(last[1] if isinstance(last, tuple) else last)
