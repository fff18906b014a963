"""No code keeps an exception, or raises one that something else refers to: see
`infinistore/kept_errors.py`.

This is read from the source. A name is known to hold an exception when `except` has
bound it, or when its annotation says so, which mypy wants of every parameter. What a
function of another package keeps is not seen here; that is what
tests/bad_days/test_kept_errors.py is for.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from infinistore import errors
from tests.packaging.conftest import PROJECT

FILES = sorted(
    file
    for folder in ("infinistore", "transports", "allocators")
    for file in (PROJECT / folder).rglob("*.py")
    if file == file.resolve()  # the links in infinistore/ are seen at the top
)
EXCEPTION = re.compile(
    r"\b(\w*(Exception|ExceptionGroup|Error|NoRdma)|TracebackType|"
    + "|".join(name for name in errors.__all__ if name[0].isupper())
    + r")\b"
)
NO_EXCEPTION = re.compile(r"\b(KeptError|type\[.*\])")
LOGGING = {"debug", "info", "warning", "error", "critical", "log"}  # what a record is given as it is, handlers may keep
KEEPERS = {"add", "append", "appendleft", "extend", "insert", "partial", "put", "put_nowait", "set", "set_exception"}
"""Methods that keep what they are given."""
HANDED_OVER = "infinistore/client/memory/copying.py", "self._error"
"""The one error that goes from one thread to another with its traceback: raised once,
and forgotten while it is.
"""


def kept_exceptions(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line of each place that keeps an exception, or raises a kept one, and
    what is wrong there.
    """
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    may_hold = {node.name for node in nodes if isinstance(node, ast.ExceptHandler)}
    may_hold |= {
        node.arg for node in nodes if isinstance(node, ast.arg) and node.annotation and _says_exception(node.annotation)
    }
    for node in nodes:
        if isinstance(node, ast.Raise) and node.exc is not None:
            caught = _caught(node, parents)
            for raised in node.exc.values if isinstance(node.exc, ast.BoolOp) else [node.exc]:
                if not _is_fresh(raised, caught):
                    yield node.lineno, f"raises `{ast.unparse(raised)}`, which is kept elsewhere: KeptError.again()"
        elif isinstance(node, ast.AnnAssign) and _says_exception(_declared(node)):
            yield node.lineno, f"`{ast.unparse(node.target)}` is to keep an exception: keep a KeptError"
        elif isinstance(node, ast.Name) and node.id in may_hold and (why := _keeps(node, parents)):
            yield node.lineno, f"`{node.id}` is kept by {why}: keep a KeptError, or its text"


def _declared(node: ast.AnnAssign) -> ast.expr:
    is_alias = ast.unparse(node.annotation) == "TypeAlias"
    return node.value if is_alias and node.value is not None else node.annotation


def _is_fresh(raised: ast.expr, caught: str | None) -> bool:
    """Whether it is a new exception, a class, or what the `except` around it has
    caught.
    """
    if isinstance(raised, ast.Await | ast.YieldFrom):
        raised = raised.value
    if isinstance(raised, ast.Call):
        return True
    if isinstance(raised, ast.Name):
        return raised.id == caught or raised.id[0].isupper()
    return isinstance(raised, ast.Attribute) and raised.attr[0].isupper()


def _holds_exception(name: ast.Name, parents: dict[ast.AST, ast.AST]) -> tuple[bool, bool]:
    """Return whether it does, and whether a function that was made meanwhile has it
    from outside.
    """
    from_outside = False
    node: ast.AST | None = name
    while (node := parents.get(node)) is not None:  # type: ignore[arg-type]
        if isinstance(node, ast.ExceptHandler) and node.name == name.id:
            return True, from_outside
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if any(a.arg == name.id and a.annotation and _says_exception(a.annotation) for a in arguments):
                return True, from_outside
            from_outside = True
    return False, from_outside


def _keeps(name: ast.Name, parents: dict[ast.AST, ast.AST]) -> str | None:
    """Return what keeps an exception: an assignment, a function made here, a method
    that keeps what it is given.
    """
    if not isinstance(name.ctx, ast.Load):
        return None
    held, from_outside = _holds_exception(name, parents)
    if not held or from_outside:
        return "a function that is made here" if held else None
    node: ast.AST = name
    while isinstance(parents[node], ast.Tuple | ast.List | ast.Dict | ast.Set | ast.IfExp | ast.BoolOp | ast.Starred):
        node = parents[node]
    parent = parents[node]
    if isinstance(parent, ast.keyword):
        node, parent = parent, parents[parent]
    if isinstance(parent, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr | ast.Yield):
        return f"`{ast.unparse(parent).splitlines()[0]}`"
    if isinstance(parent, ast.Call) and node is not parent.func:
        called = parent.func.attr if isinstance(parent.func, ast.Attribute) else ast.unparse(parent.func)
        return f"`{called}`" if called in KEEPERS | LOGGING else None
    return None


def _caught(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str | None:
    """Return what the `except` around a node calls the exception."""
    above = parents.get(node)
    while above is not None and not isinstance(above, ast.ExceptHandler):
        above = parents.get(above)
    return None if above is None else above.name


def _says_exception(annotation: ast.expr) -> bool:
    text = NO_EXCEPTION.sub("", ast.unparse(annotation))
    return "Callable" not in text and EXCEPTION.search(text) is not None


@pytest.mark.parametrize(
    "statement",
    [
        "self.error = error",
        "self.error, self.done = error, True",
        "refused = error",
        "self.errors.append(error)",
        "self.why['load'] = error",
        "future.set_exception(error)",
        "queue.put((number, error))",
        "self.raise_later = lambda: fail(error)",
        "threads.submit(partial(fail, error))",
        "yield error",
        "_log.warning('failed: %s', error)",
    ],
)
def test_an_exception_that_is_kept_is_found(statement: str) -> None:
    caught = f"def work(self):\n try: pass\n except OSError as error:\n  {statement}"
    given = f"def work(self, error: StoreUnavailable | None):\n {statement}"
    assert list(kept_exceptions(caught)) and list(kept_exceptions(given))


@pytest.mark.parametrize(
    "statement",
    ["self.error: Exception | None = None", "errors: list[BaseException] = []", "Problem: TypeAlias = OSError | None"],
)
def test_a_place_for_exceptions_is_found(statement: str) -> None:
    assert list(kept_exceptions(statement))


@pytest.mark.parametrize("statement", ["raise self.error", "raise error", "raise failures[0]", "raise first or error"])
def test_an_exception_that_is_raised_from_where_it_is_kept_is_found(statement: str) -> None:
    assert list(kept_exceptions(f"def work(self, error):\n {statement}"))


@pytest.mark.parametrize(
    "statement",
    [
        "raise",
        "raise error",
        "raise StoreUnavailable(str(error)) from error",
        "raise found() or error from None",
        "raise trio.ClosedResourceError from error",
        "raise kept.again() from None",
        "self.failure = KeptError(error)",
        "self.why = f'{type(error).__name__}: {error}'",
        "record.failed(error)",
        "_log.warning('failed: %s', str(error))",
        "return outcome_of(error)",
    ],
)
def test_what_keeps_nothing_is_let_be(statement: str) -> None:
    source = f"def work(self):\n try: pass\n except OSError as error:\n  {statement}"
    assert list(kept_exceptions(source)) == []


def test_no_file_keeps_an_exception() -> None:
    found = [
        (str(file.relative_to(PROJECT)), line, what)
        for file in FILES
        for line, what in kept_exceptions(file.read_text())
    ]
    handed_over = [one for one in found if one[0] == HANDED_OVER[0] and HANDED_OVER[1] in one[2]]
    assert handed_over
    assert [f"{file}:{line}: {what}" for file, line, what in found if (file, line, what) not in handed_over] == []
