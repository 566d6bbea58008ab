"""What can be made to go wrong with an emulated engine or master while it runs."""

from __future__ import annotations

from pydantic import Field, ValidationError

from connector.model import Section

MASTER = "master"
"""The master's name where faults are set by name."""


class FaultError(ValueError):
    """Faults that cannot be set; the text says why."""


class Faults(Section):
    """The faults in force. A PUT replaces all of them; `{}` heals.

    `hang`, `error` and `empty` are the master's too; the others are an engine's.
    """

    hang: bool = Field(
        False,
        description="Connections are accepted, nothing is answered, streams stand still; what "
        "waited goes on when it is lifted, as after SIGSTOP and SIGCONT.",
    )
    reset: bool = Field(False, description="The connection of an inference request is closed.")
    reset_after: int | None = Field(
        None, ge=0, description="A stream's connection is closed after so many chunks."
    )
    slow: float = Field(1.0, gt=0, description="Every duration of the engine is so much longer.")
    error: int | None = Field(
        None, ge=400, le=599, description="Status with which inference requests are answered."
    )
    freeze_metrics: bool = Field(False, description="/metrics goes on to say what it said last.")
    drop_events: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the KV-event batches that are numbered and kept for replay, but "
        "not sent; true is all of them.",
    )
    empty: bool = Field(False, description="The master finds no key.")


NO_FAULTS = Faults()

OF_MASTER = frozenset({"hang", "error", "empty"})
OF_ENGINE = frozenset(Faults.model_fields) - {"empty"}


def check(faults: Faults, possible: frozenset[str]) -> None:
    """Check that a member can have these faults. Raises FaultError."""
    other = sorted(faults.model_fields_set - possible)
    if other:
        known = ", ".join(name for name in Faults.model_fields if name in possible)
        raise FaultError(f"{', '.join(other)}: not a fault that it can have; there are {known}")


def parse(body: bytes, possible: frozenset[str]) -> Faults:
    """Read a member's faults from JSON. Raises FaultError."""
    try:
        faults = Faults.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise FaultError(_told(error)) from error
    check(faults, possible)
    return faults


def parse_option(text: str) -> tuple[str, Faults]:
    """Read `e2:slow=4,error=503` or `e1:hang`: an id, and its faults. Raises FaultError."""
    name, _, settings = text.partition(":")
    if not name or not settings:
        raise FaultError(f"{text!r} is no fault; write ID:FAULT or ID:FAULT=VALUE, e.g. e2:slow=4")
    values: dict[str, str] = {}
    for setting in settings.split(","):
        fault, _, value = setting.partition("=")
        values[fault.strip()] = value.strip() or "true"
    if values.get("drop_events") == "true":
        values["drop_events"] = "1"
    try:
        faults = Faults.model_validate(values)
        check(faults, OF_MASTER if name == MASTER else OF_ENGINE)
    except ValidationError as error:
        raise FaultError(f"{text!r}: {_told(error)}") from error
    except FaultError as error:
        raise FaultError(f"{text!r}: {error}") from error
    return name, faults


def _told(error: ValidationError) -> str:
    lines = []
    for wrong in error.errors():
        place = ".".join(str(part) for part in wrong["loc"])
        if wrong["type"] == "extra_forbidden":
            known = ", ".join(Faults.model_fields)
            lines.append(f"{place}: no such fault; there are {known}")
        else:
            lines.append(f"{place}: {wrong['msg']}" if place else wrong["msg"])
    return "; ".join(lines)
