"""The data plane's application: the listed routes, `/health`, `/ready`, `/v1/models`."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Response
from starlette.routing import Route

from gateway.api.handlers import error_handlers
from gateway.api.inference import Inference, unknown_model
from gateway.fleet.fleet import Fleet
from gateway.routing import Router

_JSON = "application/json"


def data_app(
    inference: list[Inference], router: Router, fleet: Fleet, readiness: Callable[[], Readiness]
) -> FastAPI:
    """Put the data plane together."""
    app = FastAPI(
        title="mooncake-gateway",
        description="An OpenAI-compatible front door for vLLM engines that share a Mooncake pool.",
        redirect_slashes=False,
        exception_handlers=error_handlers(),
    )

    @app.head("/health", include_in_schema=False)
    @app.get("/health", summary="Whether the gateway is alive.")
    async def health() -> dict[str, Any]:
        state = readiness()
        return {"status": "ok", "degraded": state.degraded}

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", summary="Whether turns can be placed; what is degraded is named.")
    async def ready() -> Response:
        state = readiness()
        body = {"ready": not state.reasons, "reasons": state.reasons, "degraded": state.degraded}
        status = HTTPStatus.SERVICE_UNAVAILABLE if state.reasons else HTTPStatus.OK
        return Response(msgspec.json.encode(body), status, media_type=_JSON)

    @app.get("/v1/models", summary="The served models, as their engines describe them.")
    async def models() -> Response:
        cards = [card for name in router.rooms for card in _cards(fleet, name)]
        body = {"object": "list", "data": cards}
        return Response(msgspec.json.encode(body), media_type=_JSON)

    @app.get("/v1/models/{name:path}", summary="One served model.")
    async def model(name: str) -> Response:
        if name not in router.rooms:
            raise unknown_model(router, name)
        card = next((card for card in _cards(fleet, name) if card.get("id") == name), None)
        return Response(msgspec.json.encode(card), media_type=_JSON)

    # Plain ASGI: an instance that is no function is called with (scope, receive, send).
    for route in inference:
        app.router.routes.append(Route(route.route, route, methods=["POST"]))
    _describe(app, inference)
    return app


class Readiness(msgspec.Struct, frozen=True):
    """Why no turn can be placed (empty: it can), and what works with less than it should know."""

    reasons: list[str]
    degraded: list[str]


def _cards(fleet: Fleet, model: str) -> list[dict[str, Any]]:
    """Return the model's cards with every field that its first answering engine gave them."""
    for engine in fleet.of(model):
        if engine.cards:
            return engine.cards
    return [{"id": model, "object": "model", "created": 0, "owned_by": "vllm"}]


def _describe(app: FastAPI, inference: list[Inference]) -> None:
    """Merge the plain routes into the OpenAPI schema."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = make()
            for route in inference:
                schema["paths"][route.route] = {"post": _operation(route.route)}
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _operation(route: str) -> dict[str, Any]:
    return {
        "summary": f"OpenAI's {route}; the body goes to an engine as it is.",
        "requestBody": {
            "required": True,
            "content": {_JSON: {"schema": {"type": "object", "additionalProperties": True}}},
        },
        "responses": {
            "200": {
                "description": "The engine's answer, as it is.",
                "content": {_JSON: {}, "text/event-stream": {}},
            },
            "default": {"description": "An error in OpenAI's shape."},
        },
    }
