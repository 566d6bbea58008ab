"""Faults, restarts and stops over HTTP: on each member's own port, and on the control port.

A member that was stopped has no port, so whoever wants it back asks the control
port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from aiohttp import web

from loadtest.emulator.faults import FaultError, Faults, parse
from loadtest.emulator.listener import application

# A member answers before it goes.
_BEFORE_GOING = 0.02


class Member(Protocol):
    """An engine or the master, as far as it can be made to fail."""

    faults: Faults
    possible: frozenset[str]
    """Names of the faults that it can have."""

    async def start(self) -> None:
        """Start where it does not run."""

    async def stop(self) -> None:
        """End as a process that is killed."""

    async def restart(self) -> None:
        """Stop and start."""

    def set_faults(self, faults: Faults) -> None:
        """Put faults in force, in place of those before."""

    def status(self) -> dict[str, Any]:
        """Return what it is and how it is."""


def routes(member: Member) -> list[web.RouteDef]:
    """Return the routes on a member's own port."""
    errands: set[asyncio.Task[None]] = set()

    def later(what: Callable[[], Awaitable[None]]) -> web.Response:
        async def errand() -> None:
            await asyncio.sleep(_BEFORE_GOING)
            await what()

        task = asyncio.create_task(errand())
        errands.add(task)
        task.add_done_callback(errands.discard)
        return web.json_response(member.status(), status=202)

    async def restart(request: web.Request) -> web.Response:
        return later(member.restart)

    async def stop(request: web.Request) -> web.Response:
        return later(member.stop)

    async def get(request: web.Request) -> web.Response:
        return _faults(member)

    async def put(request: web.Request) -> web.Response:
        return await _set(member, request)

    return [
        web.get("/emulator/faults", get),
        web.put("/emulator/faults", put),
        web.post("/emulator/restart", restart),
        web.post("/emulator/stop", stop),
    ]


def control(members: Mapping[str, Member]) -> web.Application:
    """Return the application of the control port, for all members by name."""

    def member(request: web.Request) -> Member:
        name = request.match_info["name"]
        if name not in members:
            raise web.HTTPNotFound
        return members[name]

    async def all_of_them(request: web.Request) -> web.Response:
        return web.json_response([one.status() for one in members.values()])

    async def one(request: web.Request) -> web.Response:
        return web.json_response(member(request).status())

    async def get(request: web.Request) -> web.Response:
        return _faults(member(request))

    async def put(request: web.Request) -> web.Response:
        return await _set(member(request), request)

    async def do(request: web.Request) -> web.Response:
        found = member(request)
        await {"start": found.start, "stop": found.stop, "restart": found.restart}[
            request.match_info["what"]
        ]()
        return web.json_response(found.status())

    return application(
        web.get("/emulator", all_of_them),
        web.get("/emulator/{name}", one),
        web.get("/emulator/{name}/faults", get),
        web.put("/emulator/{name}/faults", put),
        web.post("/emulator/{name}/{what:start|stop|restart}", do),
    )


def _faults(member: Member) -> web.Response:
    return web.json_response(member.faults.model_dump())


async def _set(member: Member, request: web.Request) -> web.Response:
    try:
        member.set_faults(parse(await request.read(), member.possible))
    except FaultError as error:
        return web.json_response({"error": str(error)}, status=400)
    return _faults(member)
