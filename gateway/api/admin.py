"""The admin listener: metrics, engines, policy, explanations, decisions, configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field

from connector.render import RenderError
from gateway.api.body import decode, read_body
from gateway.api.errors import ApiError, Fault
from gateway.api.handlers import error_handlers
from gateway.api.inference import to_request, unknown_model, unrenderable
from gateway.config import GatewayConfig
from gateway.prompt.reader import Kind
from gateway.routing import Explanation, Router, UnknownModel
from policies import base

log = logging.getLogger("gateway.admin")

EngineRows = Callable[[], list[dict[str, Any]]]


class PolicyChoice(BaseModel):
    """Which policy is to act."""

    model_config = ConfigDict(extra="forbid")

    policy: str = Field(description="Name of a policy.", examples=["round_robin"])


def admin_app(
    router: Router, in_force: Callable[[], GatewayConfig], engine_rows: EngineRows
) -> FastAPI:
    """Put the admin listener together; `in_force` returns the configuration as last reloaded."""
    app = FastAPI(
        title="mooncake-gateway admin",
        redirect_slashes=False,
        exception_handlers=error_handlers(),
    )

    @app.get("/metrics", summary="Prometheus metrics.")
    async def metrics() -> Response:
        return Response(router.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/gateway/engines", summary="Every engine: state, load, hashing, events, index.")
    async def engines() -> list[dict[str, Any]]:
        return engine_rows()

    @app.get("/gateway/policy", summary="The acting policy, and those that could act.")
    async def policy() -> dict[str, Any]:
        return _policy(router, in_force())

    @app.put(
        "/gateway/policy",
        summary="Let another policy act, from the next request on.",
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": PolicyChoice.model_json_schema()}},
            }
        },
    )
    async def set_policy(request: Request) -> dict[str, Any]:
        # Read here and not by the framework, which takes a body without a Content-Type for no JSON.
        headers = dict(request.scope["headers"])
        raw = await read_body(request.receive, headers, in_force().limits.body_bytes)
        wanted = _choice(decode(raw).fields)
        before = router.policies.acting
        try:
            router.policies.act(wanted)
        except base.PolicyError as error:
            raise ApiError(Fault.UNKNOWN_POLICY, str(error), param="policy") from error
        peer = f"{request.client.host}:{request.client.port}" if request.client else "unknown"
        log.info(
            "policy %s acts in place of %s, by PUT /gateway/policy",
            wanted,
            before,
            extra={"fields": {"peer": peer, "from": before, "to": wanted}},
        )
        return _policy(router, in_force())

    @app.post("/gateway/explain", summary="What every policy would do with this body, and why.")
    async def explain(request: Request) -> dict[str, Any]:
        headers = dict(request.scope["headers"])
        raw = await read_body(request.receive, headers, in_force().limits.body_bytes)
        body = decode(raw)
        kind: Kind = "chat" if "messages" in body.fields else "completions"
        wanted = to_request(
            router, body, kind=kind, route="explain", request_id="explain", headers=headers
        )
        try:
            explanation = await router.explain(wanted)
        except UnknownModel as error:
            raise unknown_model(router, str(error)) from error
        except RenderError as error:
            raise unrenderable(error) from error
        return _explanation(router, explanation)

    @app.get("/gateway/decisions", summary="Recent decisions, newest first.")
    async def decisions(
        limit: Annotated[int, Query(ge=1, le=100_000, description="How many at most.")] = 50,
        id: Annotated[str | None, Query(description="Only this request id's.")] = None,  # noqa: A002
    ) -> list[dict[str, Any]]:
        return list(router.decisions.newest(limit, id))

    @app.get("/gateway/config", summary="The configuration in force, defaults included.")
    async def configuration() -> dict[str, Any]:
        return in_force().model_dump(mode="json")

    return app


def _choice(fields: dict[str, Any]) -> str:
    """Return the policy that a body names.

    Raises:
        ApiError: MALFORMED for anything but `{"policy": NAME}`.
    """
    expected = 'the body must be {"policy": NAME}; GET /gateway/policy lists the names'
    if odd := sorted(fields.keys() - {"policy"}):
        raise ApiError(Fault.MALFORMED, f"unknown key {odd[0][:60]!r}: {expected}")
    name = fields.get("policy")
    if not isinstance(name, str):
        raise ApiError(Fault.MALFORMED, f"`policy` is no name: {expected}", param="policy")
    return name


def _policy(router: Router, config: GatewayConfig) -> dict[str, Any]:
    return {
        "policy": router.policies.acting,
        "configured": config.policy,
        "available": {
            name: base.options(name) | config.policies.get(name, {}) for name in base.names()
        },
    }


def _explanation(router: Router, found: Explanation) -> dict[str, Any]:
    prompt, turn = found.prompt, found.turn
    residency = found.residency
    keys = [view.key for view in found.views]
    return {
        "model": turn.model,
        "session": turn.session,
        "exact": prompt.exact,
        "inexact_reason": prompt.reason,
        "prompt_tokens": prompt.tokens,
        "token_ids": prompt.token_ids,
        "block_size": prompt.chain.block_size,
        "hashes": [digest.hex() for digest in prompt.chain],
        "residency": {
            "device": {str(key): n for key, n in residency.device.items()},
            "pending": {str(key): pending.tokens for key, pending in turn.pending.items()},
            "pool": [span._asdict() for span in residency.pool],
            "pool_state": residency.pool_state,
        },
        "engines": {
            str(view.key): {
                "running": view.running,
                "waiting": view.waiting,
                "queued_prefill_tokens": view.queued_prefill,
                "kv_usage": view.kv_usage,
                "expected_cached": turn.cached(view.key)._asdict(),
            }
            for view in found.views
        },
        "acting": router.policies.acting,
        "rankings": {
            name: [
                {"engine": str(c.key), "cost": c.cost, "reason": c.reason, "terms": dict(c.terms)}
                for c in ranking.prefill
                if c.key in keys
            ]
            for name, ranking in found.rankings.items()
        },
    }
