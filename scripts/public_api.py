"""Generate docs/public-api.md from the source, so that nothing has to be installed."""

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import attrs

from marks import between_marks

__all__ = ["public_api"]

PAGE = "docs/public-api.md"
MODULES = {
    "infinistore": "python",
    "infinistore.client": "python",
    "infinistore.aio": "python",
    "infinistore.blocking": "python",
    "infinistore.tensors": "tensors",
    "infinistore.server": "server",
    "infinistore.allocators": "extension",
    "infinistore.allocators.contract": "extension",
    "infinistore.eviction": "extension",
    "infinistore.eviction.contract": "extension",
    "infinistore.transports": "extension",
    "infinistore.mover_contract": "extension",
    "infinistore.scheduling": "extension",
    "infinistore.integrations.lmcache": "integrations",
    "infinistore.integrations.lmcache_l2": "integrations",
    "infinistore.integrations.sglang": "integrations",
    "infinistore.integrations.history": "integrations",
    "infinistore.integrations.rotary": "integrations",
    "infinistore.integrations.transformers": "integrations",
    "infinistore.integrations.vllm": "integrations",
    "infinistore.statistics": "statistics",
    "infinistore.client.extension": "extension",
}
"""What these have in `__all__` is public; the page of `docs/reference` with most of it."""
_WIDTH = 88


@attrs.frozen
class Module:
    """A module's dotted name and its source."""

    name: str
    tree: ast.Module


@attrs.frozen
class Found:
    """Where a name is defined: statement and module. A module has no statement."""

    module: Module
    node: ast.stmt | None


def public_api(project: Path) -> dict[str, str]:
    """Return the page with its list renewed, by its path from the top folder.

    Raises:
        ValueError: a public name is defined nowhere, or the page lacks its marks.
    """
    return {PAGE: between_marks((project / PAGE).read_text(), "names", "\n".join(listing(project)), PAGE)}


def listing(project: Path) -> Iterator[str]:
    """Yield the lines of the list."""
    listed: dict[tuple[str, int], str] = {}
    for name, page in MODULES.items():
        module = load(project, name)
        if module is None:
            raise ValueError(f"{name} is to be listed in {PAGE}, and does not exist")
        known: dict[str, list[str]] = {}
        with_members: dict[tuple[str, ...], list[str]] = {}
        for public in exported(module):
            found = find(project, module, public)
            key = (found.module.name, found.node.lineno if found.node else 0)
            if key in listed:
                where, _, original = listed[key].rpartition(".")
                known.setdefault(where if original == public else listed[key], []).append(public)
                continue
            listed[key] = f"{name}.{public}"
            members: tuple[str, ...] = ()
            if isinstance(found.node, ast.ClassDef):
                members = tuple(sorted(set(members_of(project, found.module, found.node))))
            called = isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef)
            with_members.setdefault(members, []).append(f"{public}()" if called else public)
        yield from ("", f"### `{name}`", "", f"[Reference](reference/{page}.md)", "")
        for members, names in with_members.items():
            yield from _item(_quoted(names) + (f": {_quoted(members)}" if members else ""))
        for where, names in known.items():
            yield from _item(f"as in `{where}`: {_quoted(names)}")


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _item(text: str) -> list[str]:
    """Return an item of a list as lines."""
    return textwrap.wrap(
        text, _WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


@cache
def load(project: Path, name: str) -> Module | None:
    """Read a module; None if there is no such file."""
    path = project / name.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return Module(name, ast.parse(file.read_text())) if file.is_file() else None


def exported(module: Module) -> list[str]:
    """Return what `__all__` has."""
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    raise ValueError(f"{module.name} has no __all__")


def find(project: Path, module: Module, name: str) -> Found:
    """Find the definition of a name, through the modules that it is imported from.

    Raises:
        ValueError: it is defined nowhere.
    """
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == name and "overload" not in map(ast.unparse, node.decorator_list):
                return Found(module, node)
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in map(ast.unparse, targets(node)):
            return Found(module, node)
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    submodule = load(project, f"{node.module}.{alias.name}")
                    if submodule is not None:
                        return Found(submodule, None)
                    source = load(project, node.module)
                    if source is not None:
                        return find(project, source, alias.name)
    raise ValueError(f"{module.name}.{name} is in __all__, and defined nowhere")


def targets(node: ast.stmt) -> list[ast.expr]:
    """Return what a statement assigns to."""
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def members_of(project: Path, module: Module, node: ast.ClassDef) -> Iterator[str]:
    """Yield the public methods and attributes of a class, inherited ones included.

    Only classes of this project are considered.
    """
    for base in node.bases:
        parts = ast.unparse(base).partition("[")[0].split(".")
        try:
            found = find(project, module, parts[0])
            if found.node is None and len(parts) > 1:
                found = find(project, found.module, parts[1])
        except ValueError:
            continue  # of the standard library, or of another package
        if isinstance(found.node, ast.ClassDef):
            yield from members_of(project, found.module, found.node)
    for statement in node.body:
        yield from filter(is_public, members_by(statement))


def members_by(statement: ast.stmt) -> Iterator[str]:
    """Yield the members that a statement in the body of a class makes."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        decorators = {ast.unparse(one).rpartition(".")[2] for one in statement.decorator_list}
        if statement.name == "__init__":
            for inner in ast.walk(statement):
                if isinstance(inner, ast.Assign | ast.AnnAssign):
                    for target in map(ast.unparse, targets(inner)):
                        if re.fullmatch(r"self\.\w+", target):
                            yield target.removeprefix("self.")
        elif decorators & {"property", "cached_property", "setter"}:
            yield statement.name
        else:
            yield f"{statement.name}()"
    else:
        yield from (ast.unparse(target) for target in targets(statement))


def is_public(member: str) -> bool:
    """Whether a member of a class does not begin with an underscore."""
    return not member.startswith("_")
