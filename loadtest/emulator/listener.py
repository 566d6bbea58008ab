"""A port that can be closed as a killed process closes it, and opened again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# Look-ups of a whole chain are one long line; Mooncake's master takes megabytes.
_LINE_BYTES = 4 * 1024**2
_BODY_BYTES = 512 * 1024**2


def application(
    *routes: web.AbstractRouteDef, not_found: Callable[[], web.Response] | None = None
) -> web.Application:
    """Return an application; unknown paths and methods are answered as vLLM answers them.

    `not_found` makes another answer to unknown paths.
    """

    def unknown() -> web.Response:
        return web.json_response({"detail": "Not Found"}, status=404)

    @web.middleware
    async def plain_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPMethodNotAllowed as error:
            return web.json_response(
                {"detail": "Method Not Allowed"},
                status=405,
                headers={"Allow": ", ".join(sorted(error.allowed_methods))},
            )
        except web.HTTPNotFound:
            return (not_found or unknown)()

    app = web.Application(client_max_size=_BODY_BYTES, middlewares=[plain_errors])
    app.add_routes(routes)
    return app


class Listener:
    """One HTTP port. The first port drawn by the system is kept from then on."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{self.host}:{self.port}"

    async def open(self, app: web.Application) -> None:
        """Serve an application. Raises OSError where the port is taken."""
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=0.0,
            max_line_size=_LINE_BYTES,
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, self.host, self.port, backlog=1024, reuse_address=True)
            await site.start()
        except BaseException:
            await runner.cleanup()
            raise
        address = runner.addresses[0]
        self.port = int(address[1])
        self._runner = runner

    async def close(self) -> None:
        """Close the port and break all connections."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for site in list(runner.sites):
            await site.stop()
        server = runner.server
        if server is not None:
            for connection in list(server.connections):
                abort(connection.transport)
        await runner.cleanup()


def abort(transport: asyncio.Transport | None) -> None:
    """Break a connection, where there is one."""
    if transport is not None:
        transport.abort()
