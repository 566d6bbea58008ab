"""What both listeners answer when a route fails: the one table of errors, in OpenAI's shape."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route

from gateway.api.body import ClientLeft
from gateway.api.errors import ApiError, Fault
from gateway.proxy.relay import CLIENT_LEFT
from gateway.telemetry.log import MeantAbort

log = logging.getLogger("gateway.api")


def error_handlers() -> dict[Any, Any]:
    """Return the exception handlers of an application."""
    return {
        HTTPException: _http_error,
        RequestValidationError: _invalid,
        ApiError: _api_error,
        ClientLeft: _client_left,
        Exception: _internal,
    }


async def _http_error(request: Request, error: HTTPException) -> Response:
    headers = dict(error.headers or {})
    if error.status_code == 405:
        takes = " or ".join(_methods(request))
        headers["Allow"] = takes.replace(" or ", ", ")
        known = ApiError(
            Fault.METHOD_NOT_ALLOWED,
            f"this route does not take {request.method}; send it with {takes}",
        )
    elif error.status_code == 404:
        known = ApiError(
            Fault.ROUTE_NOT_FOUND, "there is no such route here; /docs lists those there are"
        )
    else:
        known = ApiError(Fault.MALFORMED, str(error.detail))
    answer = _response(known)
    answer.headers.update(headers)
    return answer


def _methods(request: Request) -> list[str]:
    """Return what this path takes on all routes that bear it: the error knows of one alone."""
    path = request.scope["path"]
    return sorted(
        {
            method
            for route in request.app.routes
            if isinstance(route, Route) and route.path_regex.match(path)
            for method in route.methods or ()
        }
    )


async def _invalid(_: Request, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return _response(ApiError(Fault.MALFORMED, f"`{name}`: {first['msg']}", param=name))


async def _api_error(_: Request, error: ApiError) -> Response:
    return _response(error)


async def _client_left(_: Request, __: ClientLeft) -> Response:
    return Response(status_code=CLIENT_LEFT)


async def _internal(request: Request, error: Exception) -> Response:
    # The exception itself goes on to the server, which logs it. An abort that is meant is in
    # the log already, and the connection has no room for another answer.
    if not isinstance(error, MeantAbort):
        log.error("%s %s failed in the gateway itself", request.method, request.url.path)
    return _response(ApiError(Fault.INTERNAL, "the gateway failed; its log has the cause"))


def _response(error: ApiError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error.headers}
    return Response(error.body, error.status, headers=headers)
