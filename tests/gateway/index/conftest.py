"""Fixtures of the index's tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import zmq.asyncio
from publisher import Publisher

from connector.blocks import Chain
from gateway.index.device import DeviceIndex
from gateway.index.subscriber import Subscriber, Timing


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def index() -> DeviceIndex:
    return DeviceIndex()


@pytest.fixture
async def publishers(context: zmq.asyncio.Context) -> AsyncIterator[Callable[..., Publisher]]:
    """Make publishers that end with the test."""
    made: list[Publisher] = []

    def make(**options: Any) -> Publisher:
        made.append(Publisher(context, **options))
        return made[-1]

    yield make
    for publisher in made:
        await publisher.stop()


@pytest.fixture
async def subscribers(
    context: zmq.asyncio.Context, index: DeviceIndex
) -> AsyncIterator[Callable[..., Subscriber]]:
    """Make and start subscribers that end with the test."""
    made: list[Subscriber] = []
    quick = Timing(replay_silence=0.5, check=None, retry=0.05)

    def make(endpoint: str, replay: str | None = None, **options: Any) -> Subscriber:
        given: dict[str, Any] = {"timing": quick, "context": context, **options}
        subscriber = Subscriber("a", endpoint, replay, index, **given)
        made.append(subscriber)
        subscriber.start()
        return subscriber

    yield make
    await asyncio.gather(*(subscriber.close() for subscriber in made))


@pytest.fixture
def chain() -> Callable[..., Chain]:
    """Make a chain of the given block ids, of 4 tokens each."""

    def make(*ids: int, block_size: int = 4) -> Chain:
        return Chain(block_size, 32, b"".join(bytes(24) + i.to_bytes(8, "big") for i in ids))

    return make
