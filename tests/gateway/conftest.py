"""Fixtures of the gateway's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from scripted import Scripted


@pytest.fixture
async def engines() -> AsyncIterator[list[Scripted]]:
    """Two scripted engines, `a` and `b`."""
    started = [Scripted(name, 0) for name in "ab"]
    for engine in started:
        await engine.start()
    yield started
    for engine in started:
        await engine.stop()
