"""What an emulated fleet is made of; the command line and tests fill it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.emulator.faults import MASTER, Faults
from loadtest.engine import Limits, Rates


@dataclass(frozen=True, slots=True)
class Settings:
    """An emulated fleet: `engines` alike engines, e1 to eN, and a pool's master.

    Ports of 0 are drawn by the system. `base_port` is the first engine's; the
    others' follow it. `speed` divides every duration of the model. `pool_blocks`
    of None means no pool and no master. `faults` are set from the start, by the
    engine's id or `master`.
    """

    tokenizer: Path
    engines: int = 4
    model: str = "emulated"
    host: str = "127.0.0.1"
    base_port: int = 0
    master_port: int = 0
    control_port: int = 0
    limits: Limits = field(default_factory=Limits)
    rates: Rates = field(default_factory=Rates)
    speed: float = 1.0
    max_model_len: int = 32768
    default_max_tokens: int = 16
    """Tokens of an answer to a chat that names no number; vLLM would fill the context."""
    pool_blocks: int | None = 65536
    client_ttl: float = 10.0
    events: bool = True
    algorithm: str = "sha256_cbor"
    seed: str | None = "0"
    cache_prefix: str = ""
    faults: Mapping[str, Faults] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.engines < 1:
            raise ValueError("a fleet has at least one engine")
        if not self.speed > 0:
            raise ValueError(f"speed {self.speed} is not above 0")
        unknown = sorted(set(self.faults) - {*self.ids, MASTER})
        if unknown:
            raise ValueError(
                f"faults for {', '.join(unknown)}; there are {', '.join(self.ids)} and {MASTER}"
            )

    @property
    def ids(self) -> tuple[str, ...]:
        """The engines' ids."""
        return tuple(f"e{i + 1}" for i in range(self.engines))

    @property
    def context(self) -> int:
        """Longest sequence in tokens: vLLM refuses to start with less cache than one needs."""
        return min(self.max_model_len, self.limits.tokens)


def segment_name(number: int) -> str:
    """Return the name of the pool segment of engine `number`, counted from 0."""
    return f"127.0.{number // 250}.{2 + number % 250}:{17101 + number}"
