"""HTTP questions to engines and masters, whose failures are answers too."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import msgspec

Failure = Literal["refused", "timeout", "not-http", "broken"]

_SHOWN = 200
"""Characters of an error's text that are shown."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back; `status` is 0 and `failure` is set where nothing did."""

    status: int = 0
    body: bytes = b""
    failure: Failure | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is a 200."""
        return self.status == 200

    @property
    def text(self) -> str:
        """The body as text, whatever it holds."""
        return self.body.decode("utf-8", "replace")

    def object(self) -> dict[str, Any]:
        """Return the body's JSON object; an empty one where it is none."""
        try:
            value = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def why(self) -> str:
        """Return in a few words what is the matter with it."""
        if not self.status:
            return self.error
        said = self.object().get("error")
        message = said.get("message") if isinstance(said, dict) else said
        text = message if isinstance(message, str) else " ".join(self.text.split())
        return f"HTTP {self.status}" + (f" ({text[:_SHOWN]})" if text else "")


class Asker:
    """Asks one question at a time per call, directly, whatever proxy the environment names.

    `seconds` bounds each whole exchange. The key goes to engines, never to masters.
    """

    def __init__(self, client: httpx.AsyncClient, seconds: float, api_key: str | None) -> None:
        self._client = client
        self._seconds = seconds
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def get(self, url: str, *, engine: bool = False) -> Answer:
        """GET; `engine` sends the engines' key along."""
        return await self._ask("GET", url, headers=self._headers if engine else {})

    async def post(
        self, url: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> Answer:
        """POST a JSON body to an engine."""
        return await self._ask("POST", url, json=body, headers={**self._headers, **(headers or {})})

    async def search(
        self, url: str, keep: Callable[[str], bool], most: int
    ) -> tuple[list[str], bool]:
        """Return the words of a long text that are to be kept, and whether all of it was read.

        It is read as it comes: at most `most` bytes, and no longer than an
        exchange may take.
        """
        kept: list[str] = []
        size = 0
        try:
            async with (
                asyncio.timeout(self._seconds),
                self._client.stream("GET", url) as answer,
            ):
                if answer.status_code != 200:
                    return kept, False
                async for line in answer.aiter_lines():
                    size += len(line)
                    if size > most:
                        return kept, False
                    kept += filter(keep, line.split())
        except (httpx.HTTPError, TimeoutError):
            return kept, False
        return kept, True

    async def _ask(self, method: str, url: str, **given: Any) -> Answer:
        try:
            async with asyncio.timeout(self._seconds):
                answer = await self._client.request(method, url, **given)
        except (TimeoutError, httpx.TimeoutException):
            return Answer(failure="timeout", error=f"no answer within {self._seconds:g} s")
        except httpx.ConnectError as error:
            return Answer(failure="refused", error=reason(error))
        except httpx.RemoteProtocolError as error:
            return Answer(failure="not-http", error=str(error))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return Answer(failure="broken", error=reason(error))
        return Answer(answer.status_code, answer.content)


@asynccontextmanager
async def asker(seconds: float, api_key: str | None) -> AsyncIterator[Asker]:
    """Open the one client of a run."""
    async with httpx.AsyncClient(trust_env=False, timeout=httpx.Timeout(seconds)) as client:
        yield Asker(client, seconds, api_key)


def reason(error: BaseException) -> str:
    """Return what the operating system said, which libraries wrap several times."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno and cause.errno > 0:
            return os.strerror(cause.errno).lower()
        if isinstance(cause, socket.gaierror):
            return str(cause.strerror).lower()
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__
