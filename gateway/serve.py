"""Runs a gateway: both listeners in one event loop, and what signals do.

SIGHUP, or a change of the file, reloads the configuration (`reload.py`).
SIGTERM and SIGINT: the data plane stops accepting, requests under way may end
within `shutdown_grace`, then the admin listener closes and the process exits
with 0. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from gateway.app import Gateway
from gateway.config import ConfigError, GatewayConfig
from gateway.reload import Reloader
from gateway.telemetry import log as logs

log = logging.getLogger("gateway")


class _Server(uvicorn.Server):
    """A server whose signals are handled once for both listeners."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


Serving = Callable[[str, str], None]


def run(config: GatewayConfig, path: Path | None = None, on_serving: Serving | None = None) -> None:
    """Serve until a signal says otherwise; `path` is the file to reload from, if any.

    `on_serving` is called once with the URLs of both listeners when they listen.

    Raises:
        ConfigError: if the configuration cannot be used, or an address is taken.
    """
    logs.configure(config.log)
    # Every request takes two sockets; the soft limit is often 1024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, path, on_serving))


async def _serve(config: GatewayConfig, path: Path | None, on_serving: Serving | None) -> None:
    with contextlib.ExitStack() as stack:
        data_socket = stack.enter_context(_bind(config.listen.host, config.listen.port, "listen"))
        admin_socket = stack.enter_context(_bind(config.admin.host, config.admin.port, "admin"))
        gateway = Gateway(config)
        data = _server(gateway.data_app, config.shutdown_grace)
        admin = _server(gateway.admin_app, 1)
        stopping = asyncio.Event()

        def stop() -> None:
            if stopping.is_set():
                data.force_exit = admin.force_exit = True
            stopping.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        gateway.start()
        # What start-up made stays: a full collection over it would hold the loop for longer than a
        # pool look-up may take.
        gc.collect()
        gc.freeze()
        log.info(
            "serving on http://%s, admin on http://%s",
            _address(data_socket),
            _address(admin_socket),
            extra={"fields": {"models": list(gateway.rooms), "policy": config.policy}},
        )
        if on_serving is not None:
            on_serving(f"http://{_address(data_socket)}", f"http://{_address(admin_socket)}")
        watching: asyncio.Task[None] | None = None
        if path is not None:
            reloader = Reloader(path, gateway)
            loop.add_signal_handler(signal.SIGHUP, reloader.reload, "SIGHUP")
            watching = asyncio.create_task(reloader.watch(stopping), name="reload")
        serving = [
            asyncio.create_task(data.serve([data_socket])),
            asyncio.create_task(admin.serve([admin_socket])),
        ]
        stopped = asyncio.create_task(stopping.wait())
        await asyncio.wait((*serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        log.info("shutting down; requests under way have %g s", config.shutdown_grace)
        gateway.draining = True
        data.should_exit = True
        await asyncio.gather(serving[0], return_exceptions=True)
        await _cancel_requests(data)
        admin.should_exit = True
        stopped.cancel()
        stopping.set()
        if watching is not None:
            await asyncio.gather(watching, return_exceptions=True)
        results = await asyncio.gather(*serving, return_exceptions=True)
        await gateway.stop()
        for result in results:
            if isinstance(result, Exception):
                raise result
        log.info("stopped")


async def _cancel_requests(server: _Server) -> None:
    """End what a second signal left running, while its connections are still there."""
    tasks = list(server.server_state.tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _bind(host: str, port: int, section: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', error)}; "
            f"free the port, or set {section}.host and {section}.port "
            f"(MOONCAKE_GATEWAY_{section.upper()}__PORT in the environment)"
        ) from error


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _server(app: Any, grace: float) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            # Longer than clients and load balancers keep theirs, so that they close first.
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, round(grace)),
        )
    )
