"""Reloads the configuration: on SIGHUP, and when its file has changed.

A file that cannot be used changes nothing: the gateway goes on with what it
has, says why in the log, and is degraded in `/ready` until the file is mended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from watchfiles import awatch

from gateway.app import Gateway
from gateway.config import ConfigError, Faulty
from gateway.reading import Reading
from gateway.telemetry import log as logs

log = logging.getLogger("gateway.reload")

_REPLACING = 1.0
"""Seconds that a file may be missing while another is put in its place."""


class Reloader:
    """Watches one configuration file for one gateway."""

    def __init__(self, path: Path, gateway: Gateway) -> None:
        self._path = path
        self._gateway = gateway
        self._seen = _content(path)

    def reload(self, cause: str) -> None:
        """Read the file and let what has changed take effect."""
        self._seen = _content(self._path)
        gateway, metrics = self._gateway, self._gateway.metrics
        try:
            reading = Reading(self._path)
            config = reading.accepted()
            try:
                later = gateway.apply(config)
            except Faulty as error:
                raise reading.error(error.faults) from error
        except ConfigError as error:
            gateway.reload_error = str(error)
            metrics.reloaded("refused")
            log.error("the configuration is not reloaded: %s", error)
            return
        gateway.reload_error = None
        metrics.reloaded("applied")
        logs.configure(config.log)
        log.info(
            "the configuration is reloaded (%s)",
            cause,
            extra={"fields": {"policy": gateway.router.policies.acting}},
        )
        if later:
            log.warning("changed, but in force only after a restart: %s", ", ".join(later))

    async def watch(self, stop: asyncio.Event) -> None:
        """Reload whenever the file's content has changed, until `stop` is set.

        The folder is watched, not the file: editors and mounted ConfigMaps put a
        new file, or a new link, in the place of the old one.
        """
        while not stop.is_set():
            folders = self._folders()
            changes = awatch(*folders, stop_event=stop, recursive=False)
            async with contextlib.aclosing(changes):
                async for _ in changes:
                    await self._look()
                    if self._folders() != folders:
                        break  # it has become a link to somewhere else

    def _folders(self) -> set[Path]:
        return {self._path.absolute().parent, self._path.resolve().parent}

    async def _look(self) -> None:
        content = _content(self._path)
        if content is None:
            # A file that is just being replaced is missing for a moment.
            await asyncio.sleep(_REPLACING)
            content = _content(self._path)
        if content is None and self._seen is not None:
            self._seen = None
            self._gateway.reload_error = f"{self._path} cannot be read any more"
            log.error("%s; the configuration in force stays", self._gateway.reload_error)
        elif content is not None and content != self._seen:
            self.reload("its file has changed")


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
