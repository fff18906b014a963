"""From a table of operations to an application: routes, the OpenAPI document, and who
may change something.

Operations that change the store require the server's token, if it has one, and refuse
requests of web pages: a browser on the same machine reaches loopback, whatever page it
shows.
"""

import hmac
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import attrs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from infinistore.server.management.http import Application
from infinistore.server.management.openapi import Schema, document

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
    parameters: dict[str, Schema] = attrs.field(factory=dict)
    body: Schema | None = None


def application_of(
    api: object, operations: Sequence[Operation], components: dict[str, Schema], token: str
) -> Application:
    """Return the ASGI application of an API with these operations. `components` are the
    schemas that they refer to.
    """
    routes = [
        Route(operation.path, partial(_answer, api, operation, token), methods=[operation.method])
        for operation in operations
    ]
    described = document(operations, components, wants_token=bool(token))

    async def openapi(request: Request) -> Response:
        return JSONResponse(described)

    routes.append(Route("/openapi.json", openapi))
    application = Starlette(routes=routes, exception_handlers={HTTPException: _error})
    application.router.redirect_slashes = False
    return application


async def _answer(api: object, operation: Operation, token: str, request: Request) -> Response:
    if operation.method == "POST":
        _check_may_change(request, token)
    return await operation.handler(api, request)


def _check_may_change(request: Request, token: str) -> None:
    if "origin" in request.headers:
        raise HTTPException(403, "a web page may not change the store; send the request without Origin")
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if token and not (scheme.lower() == "bearer" and _equal(given.strip(), token)):
        problem = "the token given is wrong" if given else "this needs the server's token"
        raise HTTPException(
            401,
            f"{problem}: send Authorization: Bearer TOKEN",
            headers={"WWW-Authenticate": 'Bearer realm="infinistore"'},
        )


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("latin-1"), token.encode())


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)
