"""The subscriber against publishers that speak vLLM's wire protocol over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable

import pytest
import zmq.asyncio
from publisher import Publisher, removed, stored

from connector.blocks import Chain
from connector.events import AllBlocksCleared
from gateway.index.device import DeviceIndex
from gateway.index.subscriber import State, Subscriber, SubscriberStatus, Timing, rank_endpoint
from policies.base import EngineKey

A = EngineKey("a")
Publishers = Callable[..., Publisher]
Subscribers = Callable[..., Subscriber]
Chains = Callable[..., Chain]


async def until(
    subscriber: Subscriber, reached: Callable[[SubscriberStatus], bool]
) -> SubscriberStatus:
    async with asyncio.timeout(10):
        return await subscriber.until(reached)


async def live(subscriber: Subscriber, publisher: Publisher) -> None:
    """Wait until the subscriber hears the publisher and has caught up."""
    async with asyncio.timeout(10):
        await publisher.subscribed()
    await until(subscriber, lambda s: s.state is State.LIVE and s.connected)


async def applied(subscriber: Subscriber, seq: int) -> SubscriberStatus:
    return await until(
        subscriber, lambda s: s.last_seq is not None and s.last_seq >= seq and s.state is State.LIVE
    )


async def test_applies_stores_and_removals_in_order(
    publishers: Publishers, subscribers: Subscribers, index: DeviceIndex, chain: Chains
) -> None:
    publisher = publishers()
    subscriber = subscribers(publisher.endpoint, publisher.replay, clock=lambda: 7.0)
    await live(subscriber, publisher)
    await publisher.publish(stored(1, 2, 3))
    status = await applied(subscriber, await publisher.publish(removed(3)))
    assert index.leading(chain(1, 2, 3)) == {A: 8}
    assert (status.batches, status.gaps, status.flushes, status.errors) == (2, 0, 0, 0)
    assert (status.keys, status.last_event_at) == ((A,), 7.0)


async def test_learns_what_was_cached_before_it_came(
    publishers: Publishers, subscribers: Subscribers, index: DeviceIndex, chain: Chains
) -> None:
    publisher = publishers()
    for block in range(2_000):
        publisher.lose(stored(block))
    subscriber = subscribers(publisher.endpoint, publisher.replay)
    status = await applied(subscriber, 1_999)
    assert publisher.asked == [0]
    assert (status.batches, status.gaps) == (2_000, 0)
    assert index.leading(chain(*range(2_000))) == {A: 8_000}


async def test_late_to_a_buffer_that_rolled_starts_with_what_is_left(
    publishers: Publishers, subscribers: Subscribers, index: DeviceIndex
) -> None:
    publisher = publishers(buffer=5)
    for block in range(20):
        publisher.lose(stored(block))
    status = await applied(subscribers(publisher.endpoint, publisher.replay), 19)
    assert (status.batches, index.size(A)) == (5, 5)


async def test_gap_is_filled_from_the_replay_and_duplicates_are_left_out(
    publishers: Publishers, subscribers: Subscribers, index: DeviceIndex, chain: Chains
) -> None:
    publisher = publishers()
    subscriber = subscribers(publisher.endpoint, publisher.replay)
    await live(subscriber, publisher)
    await applied(subscriber, await publisher.publish(stored(1)))
    publisher.lose(stored(2))
    publisher.lose(stored(3))
    await publisher.publish(stored(4))
    status = await applied(subscriber, 3)
    # The last batch applied is asked for again: it proves the publisher's identity.
    assert publisher.asked == [0, 0]
    assert (status.gaps, status.flushes) == (1, 0)
    assert index.leading(chain(1, 2, 3, 4)) == {A: 16}
    # The gap's own batch came twice, and so does this one; each counts once.
    await publisher.again(2)
    await until(subscriber, lambda s: s.duplicates == 2)
    await applied(subscriber, await publisher.publish(removed(1, 2, 3, 4)))
    assert index.size(A) == 0


async def test_gap_beyond_the_buffer_flushes_then_applies(
    publishers: Publishers, subscribers: Subscribers, index: DeviceIndex, chain: Chains
) -> None:
    publisher = publishers(buffer=3)
    subscriber = subscribers(publisher.endpoint, publisher.replay)
    await live(subscriber, publisher)
    await applied(subscriber, await publisher.publish(stored(1)))
    for block in range(2, 10):
        publisher.lose(stored(block))
    status = await applied(subscriber, await publisher.publish(stored(10)))
    assert (status.flushes, status.restarts) == (1, 0)
    assert index.leading(chain(8, 9, 10)) == {A: 12}
    assert index.size(A) == 3


@pytest.mark.parametrize("replay", ["none", "mute", "nobody"])
async def test_gap_without_an_answer_flushes(
    publishers: Publishers,
    subscribers: Subscribers,
    index: DeviceIndex,
    chain: Chains,
    replay: str,
) -> None:
    publisher = publishers()
    publisher.mute = True
    endpoint = {"none": None, "mute": publisher.replay, "nobody": "tcp://127.0.0.1:9"}[replay]
    subscriber = subscribers(
        publisher.endpoint, endpoint, timing=Timing(replay_silence=0.1, check=None)
    )
    await live(subscriber, publisher)
    await applied(subscriber, await publisher.publish(stored(1)))
    publisher.lose(stored(2))
    before = subscriber.status()
    await publisher.publish(stored(3))
    status = await applied(subscriber, 2)
    assert status.flushes == before.flushes + 1
    assert status.replay_failures == before.replay_failures + (replay != "none")
    assert index.size(A) == 1
    await applied(subscriber, await publisher.publish(stored(4)))
    assert index.leading(chain(3, 4)) == {A: 8}


async def test_answers_lost_inside_a_replay_are_asked_for_again(
    publishers: Publishers, subscribers: Subscribers, index: DeviceIndex, chain: Chains
) -> None:
    publisher = publishers()
    for block in range(50):
        publisher.lose(stored(block))
    publisher.drop = {20, 21, 40}
    publisher.drop_end = True
    subscriber = subscribers(publisher.endpoint, publisher.replay)
    status = await applied(subscriber, 49)
    assert publisher.asked == [0, 19]
    assert (status.batches, status.flushes, status.replay_failures) == (50, 0, 0)
    assert index.leading(chain(*range(50))) == {A: 200}


async def test_silence_is_checked_for_a_lost_last_batch(
    publishers: Publishers, subscribers: Subscribers, index: DeviceIndex
) -> None:
    publisher = publishers()
    subscriber = subscribers(publisher.endpoint, publisher.replay, timing=Timing(check=0.05))
    await live(subscriber, publisher)
    await applied(subscriber, await publisher.publish(stored(1)))
    status = await applied(subscriber, publisher.lose(stored(2)))
    assert (status.gaps, status.flushes, index.size(A)) == (0, 0, 2)


async def test_check_without_an_answer_keeps_what_is_known(
    publishers: Publishers, subscribers: Subscribers, index: DeviceIndex
) -> None:
    publisher = publishers()
    subscriber = subscribers(
        publisher.endpoint, publisher.replay, timing=Timing(replay_silence=0.05, check=0.05)
    )
    await live(subscriber, publisher)
    await applied(subscriber, await publisher.publish(stored(1)))
    publisher.mute = True
    status = await until(subscriber, lambda s: s.replay_failures > 0 and s.state is State.LIVE)
    assert (status.flushes, index.size(A)) == (0, 1)


@pytest.mark.parametrize("before", [1, 5])
@pytest.mark.parametrize("after", [0, 1, 5, 9])
async def test_restart_purges_and_is_told(
    publishers: Publishers,
    subscribers: Subscribers,
    index: DeviceIndex,
    chain: Chains,
    before: int,
    after: int,
) -> None:
    """Whatever number the new process has reached when the connection is back."""
    told: list[EngineKey] = []
    old = publishers()
    subscriber = subscribers(old.endpoint, old.replay, on_restart=told.append)
    await live(subscriber, old)
    for block in range(before):
        await old.publish(stored(block))
    await applied(subscriber, before - 1)
    await old.stop()
    await until(subscriber, lambda s: not s.connected)
    assert subscriber.status().state is State.CONNECTING

    new = publishers(port=old.port, replay_port=old.replay_port)
    for block in range(after):
        new.lose(stored(100 + block))
    await until(subscriber, lambda s: s.restarts == 1 and s.connected and s.state is State.LIVE)
    assert told == [A]
    assert index.size(A) == after
    await applied(subscriber, await new.publish(stored(100 + after)))
    assert index.leading(chain(*range(100, 101 + after))) == {A: 4 * (after + 1)}
    assert subscriber.status().restarts == 1


async def test_restart_without_replay_shows_in_the_number_and_the_time(
    publishers: Publishers, subscribers: Subscribers, index: DeviceIndex, chain: Chains
) -> None:
    told: list[EngineKey] = []
    old = publishers()
    subscriber = subscribers(old.endpoint, on_restart=told.append)
    await live(subscriber, old)
    for block in range(3):
        await old.publish(stored(block))
    await applied(subscriber, 2)
    await old.stop()
    await until(subscriber, lambda s: not s.connected)
    new = publishers(port=old.port)
    await live(subscriber, new)
    await new.publish(stored(50))
    status = await until(subscriber, lambda s: s.last_seq == 0)
    assert (status.restarts, told, index.size(A)) == (1, [A], 1)
    assert index.leading(chain(50)) == {A: 4}


async def test_a_new_connection_to_the_same_process_loses_nothing(
    context: zmq.asyncio.Context,
    publishers: Publishers,
    subscribers: Subscribers,
    index: DeviceIndex,
    chain: Chains,
) -> None:
    """A peer that falls silent without closing is noticed, and what it said meanwhile is heard."""
    publisher = publishers()
    async with proxy(publisher.port) as wire:
        timing = Timing(heartbeat=0.05, check=None)
        subscriber = subscribers(f"tcp://127.0.0.1:{wire.port}", publisher.replay, timing=timing)
        await live(subscriber, publisher)
        await applied(subscriber, await publisher.publish(stored(1)))
        wire.open.clear()
        await publisher.publish(stored(2))
        await until(subscriber, lambda s: not s.connected)
        wire.open.set()
        status = await applied(subscriber, 1)
        assert (status.restarts, status.flushes) == (0, 0)
        assert index.leading(chain(1, 2)) == {A: 8}


async def test_all_blocks_cleared_purges(
    publishers: Publishers, subscribers: Subscribers, index: DeviceIndex, chain: Chains
) -> None:
    publisher = publishers()
    subscriber = subscribers(publisher.endpoint, publisher.replay)
    await live(subscriber, publisher)
    await publisher.publish(stored(1, 2), AllBlocksCleared(), stored(3))
    await applied(subscriber, 0)
    assert index.leading(chain(1, 2)) == {}
    assert index.size(A) == 1


async def test_a_second_copy_outlives_the_first(
    publishers: Publishers, subscribers: Subscribers, index: DeviceIndex, chain: Chains
) -> None:
    publisher = publishers()
    subscriber = subscribers(publisher.endpoint, publisher.replay)
    await live(subscriber, publisher)
    await publisher.publish(stored(1), stored(1), removed(1))
    await applied(subscriber, 0)
    assert index.leading(chain(1)) == {A: 4}
    await applied(subscriber, await publisher.publish(removed(1)))
    assert index.leading(chain(1)) == {}


async def test_nothing_is_applied_after_removal_during_a_flood(
    publishers: Publishers, subscribers: Subscribers, index: DeviceIndex
) -> None:
    publisher = publishers()
    subscriber = subscribers(publisher.endpoint, publisher.replay)
    await live(subscriber, publisher)

    async def flood() -> None:
        for block in itertools.count():
            await publisher.publish(stored(block))
            await asyncio.sleep(0)

    flooding = asyncio.create_task(flood())
    await applied(subscriber, 200)
    await subscriber.close()
    assert index.keys() == ()
    events = index.events
    await asyncio.sleep(0.1)
    flooding.cancel()
    await asyncio.gather(flooding, return_exceptions=True)
    assert (index.keys(), index.events) == ((), events)
    assert subscriber.status().state is State.CLOSED
    with pytest.raises(RuntimeError, match="closed"):
        subscriber.start()


async def test_a_flood_leaves_the_loop_to_others(
    publishers: Publishers, subscribers: Subscribers, index: DeviceIndex
) -> None:
    publisher = publishers()
    for block in range(3_000):
        publisher.lose(stored(*range(block, block + 50)))
    loop = asyncio.get_running_loop()
    subscriber = subscribers(publisher.endpoint, publisher.replay, timing=Timing(slice=0.001))
    turns = 0
    began = loop.time()
    while subscriber.status().last_seq != 2_999:
        await asyncio.sleep(0)
        turns += 1
        assert loop.time() - began < 30
    assert turns > 50
    assert index.size(A) == 3_049


async def test_unreadable_payloads_are_counted_named_and_survived(
    publishers: Publishers,
    subscribers: Subscribers,
    index: DeviceIndex,
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher = publishers()
    subscriber = subscribers(publisher.endpoint, publisher.replay)
    await live(subscriber, publisher)
    await publisher.publish(stored(1))
    with caplog.at_level(logging.WARNING):
        await publisher.frames(b"only one")
        await publisher.frames(b"", b"short", b"")
        await publisher.broken(b"\xc1 no msgpack")
        await publisher.again(1)
        await until(subscriber, lambda s: s.duplicates == 1)
    status = subscriber.status()
    assert status.errors == 4
    assert "event batch 1 cannot be read" not in caplog.text  # the third is not logged
    assert "a at tcp://" in caplog.text
    # A removal may have been in it.
    assert (status.flushes, index.size(A)) == (1, 0)
    status = await applied(subscriber, await publisher.publish(stored(2)))
    assert (status.gaps, status.restarts, index.size(A)) == (0, 0, 1)


async def test_rank_comes_from_the_batch_else_from_the_configuration(
    publishers: Publishers, subscribers: Subscribers, index: DeviceIndex
) -> None:
    for publisher, rank in ((publishers(rank=3), 3), (publishers(rank=None), 1)):
        subscriber = subscribers(publisher.endpoint, publisher.replay, rank=1)
        await live(subscriber, publisher)
        status = await applied(subscriber, await publisher.publish(stored(1)))
        assert status.keys == (EngineKey("a", rank),)
    assert set(index.keys()) == {EngineKey("a", 3), EngineKey("a", 1)}


async def test_hashes_over_lookahead_tokens_get_no_credit(
    publishers: Publishers,
    subscribers: Subscribers,
    index: DeviceIndex,
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher = publishers()
    subscriber = subscribers(publisher.endpoint, publisher.replay)
    await live(subscriber, publisher)
    status = await applied(subscriber, await publisher.publish(stored(1, lookahead=[7])))
    assert (status.unusable, index.size(A)) == (1, 0)
    assert "look-ahead" in caplog.text


async def test_waits_for_an_engine_that_is_not_there_yet(
    publishers: Publishers, subscribers: Subscribers, index: DeviceIndex
) -> None:
    gone = publishers()
    await gone.stop()
    subscriber = subscribers(gone.endpoint, gone.replay)
    assert subscriber.status().state is State.CONNECTING
    publisher = publishers(port=gone.port, replay_port=gone.replay_port)
    publisher.lose(stored(1))
    status = await applied(subscriber, 0)
    assert (status.connected, status.restarts, index.size(A)) == (True, 0, 1)


async def test_an_endpoint_that_is_none_is_an_error_not_an_end(
    subscribers: Subscribers, caplog: pytest.LogCaptureFixture
) -> None:
    subscriber = subscribers("nonsense", timing=Timing(retry=0.01))
    status = await until(subscriber, lambda s: s.errors >= 2)
    assert (status.state, status.connected) == (State.CONNECTING, False)
    assert "its socket failed" in caplog.text


async def test_a_fault_of_its_own_is_shown_and_flushes(
    publishers: Publishers,
    subscribers: Subscribers,
    index: DeviceIndex,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher = publishers()
    subscriber = subscribers(publisher.endpoint, publisher.replay)
    await live(subscriber, publisher)
    await applied(subscriber, await publisher.publish(stored(1)))

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(index, "remove", fails)
    await publisher.publish(removed(1))
    status = await until(subscriber, lambda s: s.state is State.FAILED)
    assert (status.connected, index.size(A)) == (False, 0)
    assert "broke down" in caplog.text


def test_ranks_count_ports_up() -> None:
    assert rank_endpoint("tcp://10.0.0.1:5557", 0) == "tcp://10.0.0.1:5557"
    assert rank_endpoint("tcp://10.0.0.1:5557", 3) == "tcp://10.0.0.1:5560"


class Wire:
    """A TCP proxy's switch: while `open` is clear, bytes are accepted and go nowhere."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.port = 0
        self.open = asyncio.Event()
        self.open.set()
        self.tasks: list[asyncio.Task[None]] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.target)
        self.writers += (writer, back)
        for source, sink in ((reader, back), (there, writer)):
            self.tasks.append(asyncio.create_task(self.pump(source, sink)))

    async def pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                if not self.open.is_set():
                    # What was cut off stays so, even when the wire is whole again.
                    await self.open.wait()
                    break
                sink.write(data)
                await sink.drain()
        sink.close()


@contextlib.asynccontextmanager
async def proxy(port: int) -> AsyncIterator[Wire]:
    wire = Wire(port)
    server = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
    wire.port = server.sockets[0].getsockname()[1]
    try:
        yield wire
    finally:
        server.close()
        for task in wire.tasks:
            task.cancel()
        for writer in wire.writers:
            writer.close()
        closings = (writer.wait_closed() for writer in wire.writers)
        await asyncio.gather(*wire.tasks, *closings, return_exceptions=True)
