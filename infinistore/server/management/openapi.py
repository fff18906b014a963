"""The OpenAPI document of the management API, made from its table of operations and
from the statistics classes.
"""

import types
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, Union, get_args, get_origin, get_type_hints

import attrs

from infinistore.server.security.access import PROBES
from infinistore.version import __version__

__all__ = ["Schema", "document", "schema_of"]

Schema: TypeAlias = dict[str, Any]
"""A JSON Schema, as nested maps."""

_PLAIN: dict[Any, Schema] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
}
_ERROR: Schema = {
    "type": "object",
    "properties": {"error": {"type": "string"}},
    "required": ["error"],
    "additionalProperties": False,
}


class Described(Protocol):
    """What this module needs of an operation; see
    `infinistore.server.management.api`.
    """

    @property
    def path(self) -> str:
        """The path."""

    @property
    def method(self) -> str:
        """The method, in capitals."""

    @property
    def summary(self) -> str:
        """One sentence."""

    @property
    def answers(self) -> dict[int, Schema | str]:
        """By status: the schema of the JSON answer, or the media type of any other
        answer.
        """

    @property
    def parameters(self) -> dict[str, Schema]:
        """The query parameters, all optional."""

    @property
    def body(self) -> Schema | None:
        """The schema of the JSON body, which may be left out."""


def schema_of(kind: Any, components: dict[str, Schema]) -> Schema:
    """Return the schema of a type: plain, a list, optional, or an attrs class, which
    becomes one of the components.
    """
    if kind in _PLAIN:
        return _PLAIN[kind]
    if get_origin(kind) is list:
        return {"type": "array", "items": schema_of(get_args(kind)[0], components)}
    if get_origin(kind) in (Union, types.UnionType):
        (inner,) = (one for one in get_args(kind) if one is not types.NoneType)
        return {"anyOf": [schema_of(inner, components), {"type": "null"}]}
    if kind.__name__ not in components:
        hints = get_type_hints(kind)
        names = [field.name for field in attrs.fields(kind)]
        components[kind.__name__] = {}  # named before it is made, in case it holds itself
        components[kind.__name__] = {
            "type": "object",
            "properties": {name: schema_of(hints[name], components) for name in names},
            "required": names,
            "additionalProperties": False,
        }
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def document(operations: Sequence[Described], components: dict[str, Schema], *, wants_token: bool) -> Schema:
    """Return the OpenAPI document. `components` are the schemas that the operations
    refer to.
    """
    paths: dict[str, Schema] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, wants_token)
    return {
        "openapi": "3.1.0",
        "info": {"title": "InfiniStore management", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Described, wants_token: bool) -> Schema:
    described: Schema = {
        "summary": operation.summary,
        "operationId": f"{operation.method.lower()}_{operation.path.strip('/')}",
        "responses": {str(status): _answer(status, answer) for status, answer in operation.answers.items()},
    }
    for status in _refusals(operation, wants_token):
        described["responses"].setdefault(str(status), _answer(status, {"$ref": "#/components/schemas/Error"}))
    if operation.parameters:
        described["parameters"] = [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in operation.parameters.items()
        ]
    if operation.body is not None:
        described["requestBody"] = {"required": False, "content": {"application/json": {"schema": operation.body}}}
    if wants_token and operation.path not in PROBES:
        described["security"] = [{"token": []}]
    return described


def _refusals(operation: Described, wants_token: bool) -> list[int]:
    """Return the error statuses that an operation may answer with."""
    refusals = [408, 413, 500, 503]
    if operation.parameters or operation.body is not None:
        refusals.append(400)
    if operation.method == "POST" or (wants_token and operation.path not in PROBES):
        refusals.append(403)
    if operation.path not in PROBES:
        refusals.append(401 if wants_token else 421)
    return sorted(refusals)


def _answer(status: int, answer: Schema | str) -> Schema:
    content = {answer: {}} if isinstance(answer, str) else {"application/json": {"schema": answer}}
    return {"description": _DESCRIPTIONS[status], "content": content}


_DESCRIPTIONS = {
    200: "Done.",
    400: "A parameter, or the body, is wrong.",
    401: "The token is missing or wrong.",
    403: "The request comes from a web page, or from a tenant that may not make it.",
    409: "A file cannot be used; what was read before stays.",
    421: "The Host is no name of this server.",
    404: "There is no such thing here.",
    408: "The request did not come in time.",
    413: "The body is too long.",
    500: "An error inside the server.",
    503: "Not now: the server starts, drains, or is not well.",
}
