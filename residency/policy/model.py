"""The fleet's policy: which rules must run, how much margin, which plugins may load, what is waived.

Only the fleet's file decides policy; a launch file can never relax a rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import date

#: Rules that ship with residency and must have run for an approval to mean anything. If one of
#: them is blocked, shadowed or uninstalled, the launch is refused with exit code 3.
REQUIRED = (
    "devices/exist",
    "kv-cache/types",
    "layer-split/after-cache",
    "memory-budget/pools",
    "model-files/sound",
)

Severity = Literal["deny", "warn", "off"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginPin:
    """One entry of the plugin allow-list. Distribution and version bind when given."""

    name: str
    distribution: str | None = None
    version: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiver:
    """A veto the fleet accepts for a while. Reason, end and approver are required."""

    rule: str
    reason: str
    until: date
    approved_by: str
    match: Mapping[str, str] = field(default_factory=dict)  # "model", "machine", "engine", "knob", "pool" -> glob


@dataclass(frozen=True, kw_only=True, slots=True)
class Margin:
    """Bytes kept over the likely need: the larger of an absolute and a relative part."""

    size_bytes: int = 0
    percent: float = 0.0

    def of(self, total_bytes: int) -> int:
        """Return the margin in bytes for a pool of that size."""
        return max(self.size_bytes, int(total_bytes * self.percent / 100))


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Everything the fleet decides."""

    name: str = "default"
    require: tuple[str, ...] = REQUIRED
    margin: Margin = Margin()
    pool_margins: Mapping[str, Margin] = field(default_factory=dict)  # pool name -> margin
    plugins: tuple[PluginPin, ...] | None = None  # None: everything installed may load
    severities: Mapping[str, Severity] = field(default_factory=dict)
    waivers: tuple[Waiver, ...] = ()
    cannot_tell: Literal["refuse", "warn"] = "refuse"

    def margin_of(self, pool: str, total_bytes: int) -> int:
        """Return the margin for a pool, bytes."""
        return self.pool_margins.get(pool, self.margin).of(total_bytes)


DEFAULT_POLICY = Policy()
