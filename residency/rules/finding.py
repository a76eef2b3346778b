"""What a rule says: a Finding, and the Fix it offers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from residency.ways import Way
    from residency.where import Where


def plain(value: Any) -> Any:
    """Return a knob's value as JSON has it: tables for models, lists for tuples."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    dump = getattr(value, "model_dump", None)
    return dump() if dump is not None else value


class Outcome(StrEnum):
    """The only five things a rule can say."""

    APPROVE = "approve"
    VETO = "veto"
    WARN = "warn"
    CANNOT_TELL = "cannot-tell"
    NOT_APPLICABLE = "not-applicable"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fix:
    """A change offered to the user. ``verified``: the launch with that one change was re-evaluated and passes."""

    knob: str
    value: Any
    verified: bool
    note: str = ""
    spelling: str = ""  # the same change in the engine's own words, e.g. "-c 8192"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of DESIGN 4.3."""
        return {"knob": self.knob, "value": plain(self.value), "verified": self.verified, "note": self.note, "spelling": self.spelling}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One rule's answer. A rule fills what it knows; the core adds position, value and verified fixes."""

    rule: str
    outcome: Outcome
    message: str = ""
    missing: str | None = None  # capability id
    missing_title: str | None = None  # filled in by the core
    knob: str | None = None
    value: Any = None
    where: Where | None = None
    pool: str | None = None
    need_bytes: int | None = None
    have_bytes: int | None = None
    largest_name: str | None = None
    largest_bytes: int | None = None
    ways: tuple[Way, ...] = ()
    fixes: tuple[Fix, ...] = ()
    waived: Mapping[str, Any] | None = None
    culprit: str | None = None  # the plugin or file to look at, for findings of the core itself

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of DESIGN 4.3."""
        missing = None
        if self.missing is not None:
            missing = {"capability": self.missing, "title": self.missing_title or self.missing}
        largest = None
        if self.largest_name is not None:
            largest = {"name": self.largest_name, "bytes": self.largest_bytes}
        return {
            "rule": self.rule,
            "outcome": str(self.outcome),
            "message": self.message,
            "missing": missing,
            "knob": self.knob,
            "value": plain(self.value),
            "where": self.where.to_dict() if self.where is not None else None,
            "pool": self.pool,
            "need_bytes": self.need_bytes,
            "have_bytes": self.have_bytes,
            "largest": largest,
            "fixes": [fix.to_dict() for fix in self.fixes],
            "waived": dict(self.waived) if self.waived is not None else None,
        }
