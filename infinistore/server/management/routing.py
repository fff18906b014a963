"""From a table of operations to an application: routes, and the OpenAPI document."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import attrs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from infinistore.access.identity import Role
from infinistore.server.management.http import Application
from infinistore.server.management.openapi import Schema, document
from infinistore.server.security.access import Access

__all__ = ["Handler", "Operation", "application_of", "exactly"]

Handler: TypeAlias = Callable[[Any, Request], Awaitable[Response]]
"""Answers a request for an API, which comes first."""


def exactly(**properties: Schema) -> Schema:
    """Return the schema of an object that has exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


@attrs.frozen
class Operation:
    """One path and method. `answers` are by status, as in
    `infinistore.server.management.openapi.Described`.
    """

    method: str
    path: str
    summary: str
    handler: Handler
    answers: dict[int, Schema | str]
    role: Role = Role.MONITOR
    """The role that it needs."""
    parameters: dict[str, Schema] = attrs.field(factory=dict)
    body: Schema | None = None


def application_of(
    api: object, operations: Sequence[Operation], components: dict[str, Schema], access: Access
) -> Application:
    """Return the ASGI application of an API with these operations. `components` are the
    schemas that they refer to.
    """
    routes = [
        Route(operation.path, partial(_answer, api, operation, access), methods=[operation.method])
        for operation in operations
    ]
    described = document(operations, components, wants_token=access.policy.wants_token)

    async def openapi(request: Request) -> Response:
        access.check(request, Role.MONITOR)
        return JSONResponse(described)

    routes.append(Route("/openapi.json", openapi))
    application = Starlette(routes=routes, exception_handlers={HTTPException: _error})
    application.router.redirect_slashes = False
    return application


async def _answer(api: object, operation: Operation, access: Access, request: Request) -> Response:
    access.check(request, operation.role)
    return await operation.handler(api, request)


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)
