"""Parts die, freeze and come back, and turns go on (must shows 1, 2 and 5 of the robust fleet).

This fleet is one of its own: the others' tests want theirs alive.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import CHAT, Front, Ports, fleet_file, front, prompt, until
from rich.console import Console

from connector.stack import Stack

DEADLINE = 0.02


@pytest.fixture(scope="module")
def mortal(
    interpreter: Path, model: Path, ports: Ports, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """Two engines and a master that may be killed."""
    fleet = fleet_file(interpreter, model, [{"id": "a"}, {"id": "b"}], ports)
    with Stack(fleet, log_dir=tmp_path_factory.mktemp("mortal")) as running:
        yield running


@pytest.fixture(scope="module")
def calm(mortal: Stack, ports: Ports, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A gateway in front of them."""
    with front(mortal, tmp_path_factory.mktemp("calm"), ports) as running:
        yield running


@dataclass
class Talk:
    """A conversation, growing by an answer and a message a turn."""

    seed: str
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: int = 0

    def body(self, **more: Any) -> dict[str, Any]:
        """Return the next turn's body."""
        if not self.messages:
            self.messages.append({"role": "system", "content": prompt(f"{self.seed} rules", 12)})
        new = prompt(f"{self.seed} turn {self.turns}", 3)
        self.messages.append({"role": "user", "content": new})
        self.turns += 1
        return self.again(**more)

    def again(self, **more: Any) -> dict[str, Any]:
        """Return the latest turn's body once more."""
        body = {"model": "tiny", "messages": list(self.messages), "max_tokens": 6, "temperature": 0}
        return body | more

    def say(self, gateway: Front) -> Any:
        """Play the next turn."""
        turn = gateway.chat(self.body())
        self.messages.append({"role": "assistant", "content": turn.text})
        return turn


@dataclass
class Streamed:
    """What a client saw of one streamed turn."""

    engine: str | None = None
    status: int | None = None
    pieces: int = 0
    whole: bool = False
    error: str | None = None


def stream(gateway: Front, body: dict[str, Any], begun: threading.Event | None = None) -> Streamed:
    """Play a turn as a stream, and tell what came of it."""
    seen = Streamed()
    try:
        with gateway.client.stream("POST", f"{gateway.url}{CHAT}", json=body) as answer:
            seen.status = answer.status_code
            seen.engine = answer.headers.get("x-gateway-engine")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    seen.pieces += 1
                    if begun is not None:
                        begun.set()
                    if "error" in json.loads(line.removeprefix("data: ")):
                        seen.error = line
                seen.whole = seen.whole or line == "data: [DONE]"
    except httpx.RemoteProtocolError as error:
        seen.error = seen.error or str(error)
    return seen


def rows(gateway: Front) -> dict[str, Any]:
    """Return what the gateway knows of each engine."""
    found = gateway.client.get(f"{gateway.admin}/gateway/engines").json()
    return {row["id"]: row for row in found}


def degraded(gateway: Front) -> str:
    """Return what is degraded, in one text."""
    return "; ".join(gateway.client.get(f"{gateway.url}/ready").json()["degraded"])


def decision(gateway: Front, request_id: str) -> dict[str, Any]:
    """Return a turn's record."""
    found = gateway.client.get(f"{gateway.admin}/gateway/decisions", params={"id": request_id})
    record: dict[str, Any] = found.json()[0]
    return record


def segments(gateway: Front, body: dict[str, Any]) -> set[str]:
    """Return the segments from which a body's blocks would be credited."""
    return {span["segment"] for span in gateway.explain(body)["residency"]["pool"]}


def test_an_engine_is_killed_in_the_middle_of_conversations(calm: Front) -> None:
    gateway, stack = calm, calm.stack
    own = stack.fleet.engine_settings("a").segment
    gateway.policy("pool_aware")
    talks = [Talk(f"mortal {i}") for i in range(6)]
    homes = {talk.seed: talk.say(gateway).engine for talk in talks}
    for talk in talks:
        talk.say(gateway)
    assert set(homes.values()) == {"a", "b"}
    lost = [talk for talk in talks if homes[talk.seed] == "a"]
    assert own in segments(gateway, gateway_body := lost[0].again())

    # Turns of all conversations are under way when the engine dies: one that answers already
    # on `a`, and many that do not answer yet.
    with ThreadPoolExecutor(16) as pool:
        begun = threading.Event()
        answering = pool.submit(
            stream, gateway, lost[0].body(stream=True, max_tokens=2000, ignore_eos=True), begun
        )
        assert begun.wait(60)
        waiting = [
            pool.submit(stream, gateway, talk.body(stream=True, max_tokens=4))
            for talk in talks
            for _ in range(2)
        ]
        stack.kill("a")
        broken = answering.result()
        others = [future.result() for future in waiting]

    assert broken.error is not None, "an answer that breaks off says so"
    assert not broken.whole
    unanswered = [one for one in others if not (one.engine == "a" and one.pieces)]
    assert all(one.status == 200 and one.whole and not one.error for one in unanswered), others
    assert unanswered, "some were not answering yet"

    until(lambda: rows(gateway)["a"]["state"], lambda state: state == "down")
    assert "engine a is down" in degraded(gateway)
    # The master goes on listing the dead engine's blocks; they are credited no more.
    assert own not in segments(gateway, gateway_body)
    for talk in talks:
        assert talk.say(gateway).engine == "b"

    stack.restart("a")
    until(lambda: rows(gateway)["a"]["state"], lambda state: state == "ready")
    row = until(
        lambda: rows(gateway)["a"]["ranks"]["a"], lambda rank: rank["events"]["state"] == "live"
    )
    assert row["device_blocks"] == 0
    assert row["events"]["restarts"] >= 1
    gateway.policy("round_robin")
    fresh = Talk("mortal again")
    used = [gateway.chat(fresh.again(messages=[*talks[0].messages])) for _ in range(2)]
    on_a = next(turn for turn in used if turn.engine == "a")
    assert on_a.expected["device"] == 0
    until(lambda: rows(gateway)["a"]["ranks"]["a"]["device_blocks"], lambda blocks: blocks > 0)
    # Its segment counts again when the master has had the time to forget the dead instance.
    newcomer = Talk("mortal newcomer")
    body = newcomer.body()
    until(lambda: gateway.chat(body).engine, lambda engine: engine == "a")
    until(lambda: segments(gateway, body), lambda found: bool(found), seconds=60)


def test_the_master_freezes_dies_and_returns_empty(
    calm: Front, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway, stack = calm, calm.stack
    gateway.policy("round_robin")
    gateway.client.timeout = httpx.Timeout(180)
    until(lambda: degraded(gateway), lambda text: text == "", seconds=60)
    talk = Talk("frozen")
    before = decision(gateway, gateway.chat(talk.body()).answer.headers["x-request-id"])
    assert before["pool_state"] == "ok"

    def play(name: str) -> dict[str, Any]:
        turn = gateway.chat(Talk(name).body())
        return decision(gateway, turn.answer.headers["x-request-id"])

    with ThreadPoolExecutor(8) as pool:
        stack.kill_master(signal.SIGSTOP)
        # Side by side: real engines stall for up to 30 s on a frozen master.
        tripping = [pool.submit(play, f"frozen {i}") for i in range(3)]
        until(lambda: degraded(gateway), lambda text: "pool" in text)
        resting = [pool.submit(play, f"resting {i}") for i in range(3)]
        slow = [future.result() for future in tripping]
        free = [future.result() for future in resting]
    assert {record["status"] for record in slow + free} == {200}, "no timeout of ours"
    assert {record["pool_state"] for record in slow} == {"deadline"}
    # One probe may fall among those that come while the breaker rests.
    assert {record["pool_state"] for record in free} <= {"breaker", "deadline"}
    assert any(record["pool_state"] == "breaker" for record in free)
    # The least of several tells the gateway's own part on a machine that is busy with engines.
    with capsys.disabled():
        show = Console(width=120).print
        show("\nlook-up with the master frozen:", [round(r["pool_seconds"], 4) for r in slow])
        show("and with the breaker open:", [round(r["pool_seconds"], 6) for r in free])
    assert min(record["pool_seconds"] for record in slow) < DEADLINE + 0.01
    assert min(r["pool_seconds"] for r in free if r["pool_state"] == "breaker") < 0.001

    stack.kill_master()
    assert play("killed")["status"] == 200
    assert "pool" in degraded(gateway)

    stack.restart_master()
    body = Talk("healed").body()
    until(lambda: degraded(gateway), lambda text: text == "", seconds=90)
    assert gateway.explain(talk.again())["residency"]["pool"] == [], "the pool is empty"
    until(
        lambda: (gateway.chat(body), segments(gateway, body))[1],
        lambda found: bool(found),
        seconds=90,
    )


@pytest.mark.parametrize("knows", ["replay", "cached tokens", "reports"])
def test_a_gateway_before_warm_engines_soon_expects_what_they_have(
    calm: Front, ports: Ports, tmp_path: Path, knows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    calm.policy("pool_aware")
    talk = Talk(f"warm {knows}")
    for _ in range(3):
        talk.say(calm)
    models = calm.stack.gateway_config()
    for section in models:
        section["pool"] = None  # else the pool's word would do
        section["full_reports"] = float(knows == "reports")
        for engine in section["engines"]:
            if knows != "replay":
                engine["replay"] = None
    shares = []
    with front(calm.stack, tmp_path, ports, models=models) as later:
        for _ in range(10):
            turn = talk.say(later)
            shares.append(sum(turn.expected.values()) / max(1, turn.cached))
        page = later.client.get(f"{later.admin}/metrics").text
    with capsys.disabled():
        shown = [round(share, 2) for share in shares]
        Console(width=120).print(f"\nexpected of reported cached tokens, by {knows}:", shown)
    assert shares[-1] >= 0.9
    if knows == "replay":
        assert shares[0] >= 0.9, "its events go back that far"
    else:
        # The first turn may go to the engine without the prefix; whoever answers it is known then.
        assert min(shares[2:]) >= 0.9
    if knows == "reports":
        assert "mooncake_gateway_device_reports_total 0.0" not in page
