"""Changes the text of a tenants file, and leaves the rest of it as it was written,
comments included.

Every change is verified: what comes out must be the tenants that were meant. A file
that is written in an unusual way is refused rather than spoiled.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from infinistore.access.parsing import Node, parse_tenants, read_tree
from infinistore.access.tenants import MOST_TOKENS, Tenant, Tenants
from infinistore.errors import ConfigError

__all__ = ["EMPTY_FILE", "add_tenant", "remove_tenant", "replace_tokens"]

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
        self._lines = text.split("\n")
        self._root = read_tree(text, name, exact=True)

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
