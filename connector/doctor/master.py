"""Does the pool's master answer, and do its segments belong to the engines as configured?"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from connector.doctor.ask import Answer
from connector.doctor.subject import Exam, Subject, some
from connector.model import EngineConfig, ModelConfig, PoolConfig
from connector.pool import PoolError, Segment, parse_segments

HTTP_PORT = 9003
"""Where a master serves HTTP unless --metrics_port says otherwise."""

_BLIND = "turns are routed without knowledge of the pool; its keys and hits were not checked"
_PORT = "the master's HTTP port (--metrics_port, 9003 by default), not its RPC port (--rpc_port)"


async def reach(exam: Exam, pool: PoolConfig) -> bool:
    """Ask the master how it is; False where it cannot be asked further."""
    health = await exam.asker.get(f"{pool.master}/health")
    state = health.object()
    if not health.status:
        await _unreachable(exam, pool, health)
        return False
    if not health.ok or ("role" not in state and "service_ready" not in state):
        exam.fail(
            "master",
            "not-a-master",
            f"{pool.master}/health answers {health.why()[:120]}: that is no Mooncake master; "
            f"{_BLIND}",
            expected=f"a Mooncake master at {pool.master}",
            remedy=f"set `pool.master` to {_PORT}",
        )
        return False
    role, leader = state.get("role"), state.get("leader_address")
    if role not in (None, "leader") or state.get("service_ready") is False:
        exam.fail(
            "master",
            "not-serving",
            f"the master at {pool.master} does not serve: role {role}, state "
            f"{state.get('ha_state')}; {_BLIND}",
            expected="the leader, ready to serve",
            remedy=f"set `pool.master` to the HTTP port of the leader ({leader})"
            if leader
            else "wait until it is ready, or set `pool.master` to the leader's HTTP port",
        )
        return False
    exam.ok("master", f"a Mooncake master serves at {pool.master}")
    return True


async def _unreachable(exam: Exam, pool: PoolConfig, health: Answer) -> None:
    closed = health.failure == "refused"
    if closed:
        found = f"nothing answers at {pool.master}: {health.why()}"
    elif health.failure == "timeout":
        found = (
            f"no HTTP answer from {pool.master}: {health.why()}; a frozen master, or its RPC port"
        )
    else:
        found = (
            f"{pool.master} takes connections, but speaks no HTTP: this is likely the master's "
            f"RPC port ({health.why()})"
        )
    elsewhere = await _at_default(exam, pool)
    exam.fail(
        "master",
        "unreachable" if closed else "not-http",
        f"{found}; {_BLIND}",
        expected=f"a Mooncake master at {pool.master}",
        remedy=f"set `pool.master: {elsewhere}`, where a master answers"
        if elsewhere
        else ("start mooncake_master, or " if closed else "") + f"set `pool.master` to {_PORT}",
    )


async def _at_default(exam: Exam, pool: PoolConfig) -> str | None:
    """Look whether a master answers at the usual port of the same host."""
    parts = urlsplit(pool.master)
    if parts.port == HTTP_PORT or not parts.hostname:
        return None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    url = f"{parts.scheme}://{host}:{HTTP_PORT}"
    answer = await exam.asker.get(f"{url}/health")
    return url if answer.ok and "service_ready" in answer.object() else None


async def segments(exam: Exam, pool: PoolConfig, models: Sequence[ModelConfig]) -> None:
    """Compare the segments that the master lists with those of all engines before it."""
    answer = await exam.asker.get(f"{pool.master}/get_segments_detail")
    try:
        listed = list(parse_segments(answer.body).values()) if answer.ok else None
    except PoolError:
        listed = None
    if listed is None:
        exam.warn(
            "segments",
            "untold",
            f"the master does not list its segments: {answer.why()}",
            expected="a list of segments",
            remedy=f"set `pool.master` to {_PORT}",
        )
        return
    engines = [
        engine
        for model in models
        if model.pool and model.pool.master == pool.master
        for engine in model.engines
    ]
    mounted = {segment.name: segment for segment in listed}
    claimed = {name for engine in engines for name in engine.segments}
    unclaimed = sorted(mounted.keys() - claimed)
    for subject in exam.subjects:
        if not subject.rank:
            _of_engine(exam, subject, engines, mounted, unclaimed)
    if unclaimed and claimed:
        exam.warn(
            "segments",
            "unclaimed",
            f"the master lists segments that no engine here claims: {some(unclaimed)}",
            expected="every segment in some engine's `segments`",
            remedy="add them to `segments` of the engines they belong to: else the gateway cannot "
            "tell near blocks from far ones, nor whose are lost with an engine",
        )


def _of_engine(
    exam: Exam,
    subject: Subject,
    engines: Sequence[EngineConfig],
    mounted: dict[str, Segment],
    unclaimed: Sequence[str],
) -> None:
    config = subject.config
    known = f"mounted at the master: {some(sorted(mounted))}"
    if not config.segments:
        exam.warn(
            "segments",
            "none",
            "no segments are configured: the gateway cannot tell which blocks of the pool are near "
            f"it, nor which are lost with it; {known}",
            subject,
            expected="its segments in `segments`",
            remedy=f"set `segments` of engine {config.id} to its MOONCAKE_REQUESTER_LOCAL_HOSTNAME",
        )
        return
    expected = f"{', '.join(config.segments)} mounted by engine {config.id}"
    if missing := [name for name in config.segments if name not in mounted]:
        exam.fail(
            "segments",
            "not-mounted",
            f"the master does not know {', '.join(missing)}; {known}, of which nobody claims "
            f"{some(unclaimed)}",
            subject,
            expected=expected,
            remedy=f"correct `segments` of engine {config.id}, or see that its "
            "MOONCAKE_CONFIG_PATH names this master and MOONCAKE_REQUESTER_LOCAL_HOSTNAME this "
            "segment",
        )
        return
    if twice := [
        (name, other.id)
        for name in config.segments
        for other in engines
        if other.id != config.id and name in other.segments
    ]:
        exam.fail(
            "segments",
            "claimed-twice",
            f"segment {twice[0][0]} is claimed by engine {twice[0][1]} too",
            subject,
            expected=expected,
            remedy="leave it with the engine whose MOONCAKE_REQUESTER_LOCAL_HOSTNAME it is",
        )
        return
    if other := _likely_owner(config, engines):
        exam.warn(
            "segments",
            "likely-swapped",
            f"{config.segments[0]} has the host of engine {other}, not its own",
            subject,
            expected=expected,
            remedy=f"compare `segments` of engines {config.id} and {other} with their "
            "MOONCAKE_REQUESTER_LOCAL_HOSTNAME",
        )
        return
    if ill := [name for name in config.segments if mounted[name].status not in ("", "OK")]:
        exam.warn(
            "segments",
            "status",
            f"segment {', '.join(ill)} is {mounted[ill[0]].status} at the master",
            subject,
            expected="status OK",
            remedy="look into the engine's and the master's logs",
        )
        return
    exam.ok("segments", f"the master lists {', '.join(config.segments)}", subject)


def _likely_owner(config: EngineConfig, engines: Sequence[EngineConfig]) -> str | None:
    """Return the engine that runs on a segment's host, where this one does not."""
    own = urlsplit(config.url).hostname
    for name in config.segments:
        host = name.rpartition(":")[0].strip("[]")
        if host == own:
            continue
        for other in engines:
            if other.id != config.id and urlsplit(other.url).hostname == host:
                return other.id
    return None
