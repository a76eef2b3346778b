"""Need against room, per pool, by the same arithmetic as memory-budget/pools, so that two rules never disagree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from residency.budget import Allocation, PoolSum
    from residency.machine.model import Device
    from residency.rules import Facts, Finding, Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Over:
    """A pool that does not hold what the launch puts into it."""

    number: Literal["certain", "likely"]
    need_bytes: int
    have_bytes: int


def over(found: PoolSum, facts: Facts) -> Over | None:
    """Return by which number a pool is over, or None when it is not, or its size is unknown."""
    usable = found.usable_bytes
    if usable is None:
        return None
    limit = max(0, usable - facts.policy.margin_of(found.pool.name, found.pool.total_bytes or 0))
    if found.certain_bytes > usable:
        return Over(number="certain", need_bytes=found.certain_bytes, have_bytes=usable)
    if found.likely_bytes > limit:
        return Over(number="likely", need_bytes=found.likely_bytes, have_bytes=limit)
    return None


def filled(facts: Facts) -> Iterator[PoolSum]:
    """Yield every pool the launch puts something into."""
    return (found for found in facts.budget.sums(facts.machine) if found.allocations)


def shared_by(found: PoolSum, facts: Facts) -> Device | None:
    """Return the accelerator that draws from the same pool as the host, or None."""
    if found.pool.name != facts.machine.host_pool.name:
        return None
    return next((d for d in facts.machine.accelerators if d.pool == found.pool.name), None)


def answered(rule: Rule, findings: list[Finding], *, shared: bool, well: str) -> list[Finding] | Finding:
    """Return the findings, or an approval when a pool is shared by host and device, or "not applicable"."""
    if findings:
        return findings
    return rule.approve(well) if shared else rule.not_applicable("no pool is shared by host and device")


def held(rows: tuple[Allocation, ...] | list[Allocation]) -> int:
    """Likely bytes of allocations; mapped ones count nothing."""
    return sum(a.likely_bytes for a in rows)
