"""The inference routes: body in, placement, relay out. Plain ASGI: every token passes here."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from connector.render import RenderError
from gateway.api.body import (
    Body,
    ClientLeft,
    decode,
    read_body,
    refuse_engine_fields,
    with_full_report,
)
from gateway.api.errors import ApiError, Fault, answer_error, error_event
from gateway.api.session import session_key
from gateway.prompt.reader import Kind
from gateway.proxy.relay import (
    CLIENT_LEFT,
    Outgoing,
    Receive,
    Relay,
    Send,
    StreamBroken,
    Timeouts,
    forwarded,
)
from gateway.proxy.upstream import Headers, Upstream, UpstreamError
from gateway.routing import (
    NoEngine,
    Placement,
    Rejected,
    Request,
    Router,
    UnknownModel,
    UnknownPolicy,
)
from gateway.telemetry.metrics import Metrics
from policies.base import Ending

access = logging.getLogger("gateway.access")
log = logging.getLogger("gateway.api")

# What may be echoed in a header and looked for in a log.
_FIELD = re.compile(r"`([^`]+)`")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class Settings:
    """The part of the configuration that the routes need; a reload replaces it as a whole."""

    body_bytes: int
    debug_headers: bool
    allow_engine_fields: bool
    api_key: str | None
    timeouts: Timeouts
    access_log: bool


class Inference:
    """One inference route."""

    def __init__(
        self,
        route: str,
        kind: Kind,
        router: Router,
        upstream: Upstream,
        metrics: Metrics,
        settings: Settings,
    ) -> None:
        self.route = route
        self._kind = kind
        self._router = router
        self._upstream = upstream
        self._metrics = metrics
        self.settings = settings

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        began = time.monotonic()
        headers: Headers = scope["headers"]
        fields = dict(headers)
        given = fields.get(b"x-request-id", b"")
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        own = [(b"x-request-id", request_id.encode())]
        placement: Placement | None = None
        relay: Relay | None = None
        status, trouble = CLIENT_LEFT, None
        try:
            body = await self._read(receive, fields)
            placement = await self._place(request_id, body, fields)
            relay = Relay(
                placement,
                self._outgoing(placement, headers, body, own),
                self._upstream,
                self.settings.timeouts,
            )
            await relay.run(receive, send)
            status = relay.status
        except ClientLeft:
            trouble = "the client left before its body was whole"
        except ApiError as error:
            status, trouble = error.status, error.detail
            await answer_error(send, error, own)
        except UpstreamError as error:
            timeout = relay is not None and relay.status == 504
            fault = Fault.ENGINE_TIMEOUT if timeout else Fault.ENGINE_FAILED
            last = placement.record.engine if placement else "none"
            answer = ApiError(
                fault, f"no engine gave an answer; the last one tried, {last}: {error.cause}"
            )
            # Clients learn the engine's id, and never its address.
            status, trouble = answer.status, f"{last}: {error}"
            await answer_error(send, answer, own)
        except StreamBroken as error:
            status, trouble = relay.status if relay else 502, str(error)
            # Ending by an exception closes the connection: an aborted end, which no client takes
            # for a complete answer.
            raise
        except asyncio.CancelledError as error:
            # Only the server's end cancels a request, when the time for its answer is over.
            if relay is not None and relay.started:
                status, trouble = relay.status, "the gateway is shutting down"
                raise StreamBroken(trouble) from error
            answer = ApiError(Fault.NO_ENGINE, "the gateway is shutting down; try again")
            status, trouble = answer.status, str(answer)
            await answer_error(send, answer, own)
        except Exception as error:
            status, trouble = 500, f"{type(error).__name__}: {error}"
            log.exception("a request failed in the gateway itself")
            if relay is not None and relay.started:
                raise
            await answer_error(send, ApiError(Fault.INTERNAL, "the gateway failed"), own)
        finally:
            if placement is not None:
                # The relay has done so already, unless something failed before it ran.
                placement.ended(Ending.FAILED, status, None)
            self._metrics.answered(self.route, status)
            if self.settings.access_log:
                self._log(request_id, placement, status, trouble, time.monotonic() - began)

    async def _read(self, receive: Receive, headers: Mapping[bytes, bytes]) -> Body:
        raw = await read_body(receive, headers, self.settings.body_bytes)
        body = decode(raw)
        if not self.settings.allow_engine_fields:
            refuse_engine_fields(body.fields)
        return body

    async def _place(
        self, request_id: str, body: Body, headers: Mapping[bytes, bytes]
    ) -> Placement:
        policy = headers.get(b"x-gateway-policy")
        request = to_request(
            self._router,
            body,
            kind=self._kind,
            route=self.route,
            request_id=request_id,
            headers=headers,
            policy=policy.decode("latin-1") if policy else None,
        )
        try:
            return await self._router.place(request)
        except UnknownModel as error:
            raise unknown_model(self._router, str(error)) from error
        except UnknownPolicy as error:
            raise ApiError(Fault.UNKNOWN_POLICY, str(error)) from error
        except RenderError as error:
            raise unrenderable(error) from error
        except Rejected as error:
            raise ApiError(Fault.REJECTED, str(error)) from error
        except NoEngine as error:
            raise ApiError(Fault.NO_ENGINE, str(error), detail=error.detail) from error

    def _outgoing(
        self,
        placement: Placement,
        headers: Headers,
        body: Body,
        own: list[tuple[bytes, bytes]],
    ) -> Outgoing:
        record = placement.record

        def answer_headers() -> Headers:
            if not self.settings.debug_headers:
                return own
            expected = ",".join(f"{source}={n}" for source, n in record.expected.items())
            return [
                *own,
                (b"x-gateway-engine", record.engine.encode()),
                (b"x-gateway-policy", record.policy.encode()),
                (b"x-gateway-expected-cached", expected.encode()),
            ]

        return Outgoing(
            method="POST",
            path=self.route,
            headers=forwarded(headers, request_id=record.id, api_key=self.settings.api_key),
            body=with_full_report(body) if placement.reports else body.raw,
            answer_headers=answer_headers,
            error_event=error_event,
        )

    def _log(
        self,
        request_id: str,
        placement: Placement | None,
        status: int,
        trouble: str | None,
        seconds: float,
    ) -> None:
        fields: dict[str, Any] = {
            "request_id": request_id,
            "route": self.route,
            "status": status,
            "seconds": round(seconds, 6),
        }
        if placement is not None:
            record = placement.record
            fields |= {
                "model": record.model,
                "engine": record.engine,
                "policy": record.policy,
                "prompt_tokens": record.prompt_tokens,
                "expected": record.expected,
                "reported": record.reported,
                "attempts": len(record.attempts),
            }
        if trouble:
            fields["trouble"] = trouble
        level = logging.WARNING if status >= 500 or trouble else logging.INFO
        access.log(level, "%s %s", self.route, status, extra={"fields": fields})


def to_request(
    router: Router,
    body: Body,
    *,
    kind: Kind,
    route: str,
    request_id: str,
    headers: Mapping[bytes, bytes],
    policy: str | None = None,
) -> Request:
    """Return what routing needs to know of a body.

    Raises:
        ApiError: MALFORMED if the body names no model, or no prompt.
    """
    fields = body.fields
    model = fields.get("model")
    if model is None and len(router.rooms) == 1:
        # The engines, too, take a missing model for the only one.
        model = next(iter(router.rooms))
    if not isinstance(model, str):
        wrong = "`model` is missing" if model is None else "`model` must be a string"
        raise ApiError(
            Fault.MALFORMED, f"{wrong}; name one of those served: {_served(router)}", param="model"
        )
    if kind == "chat":
        messages = fields.get("messages")
        if not isinstance(messages, list) or not messages:
            wrong = "missing" if messages is None else "empty" if messages == [] else "no list"
            raise ApiError(
                Fault.MALFORMED,
                f"`messages` is {wrong}; send a list of at least one message, such as "
                '{"role": "user", "content": "..."}',
                param="messages",
            )
    elif fields.get("prompt") is None and fields.get("prompt_embeds") is None:
        raise ApiError(
            Fault.MALFORMED,
            "`prompt` is missing; send a string, a list of strings or a list of token ids",
            param="prompt",
        )
    return Request(
        id=request_id,
        route=route,
        kind=kind,
        model=model,
        body=fields,
        session=session_key(headers, fields),
        size=len(body.raw),
        policy=policy,
        unreadable=body.unreadable,
    )


def unknown_model(router: Router, name: str) -> ApiError:
    """Return the error for a model that nobody serves."""
    asked = name if len(name) <= 100 else name[:100] + "..."
    return ApiError(
        Fault.MODEL_NOT_FOUND,
        f"there is no model {asked!r} here; served: {_served(router)}",
        param="model",
    )


def unrenderable(error: RenderError) -> ApiError:
    """Return the error for a body that is no prompt; its text begins with the field's name."""
    named = _FIELD.match(str(error))
    return ApiError(Fault.MALFORMED, str(error), param=named[1] if named else None)


def _served(router: Router) -> str:
    return ", ".join(repr(model) for model in router.rooms)
