"""What the rules of this plugin share: the pools of the cards in play, and what a greedy cache leaves to others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from residency.budget import Purpose
from residency.units import size

if TYPE_CHECKING:
    from residency.budget import Allocation, PoolSum
    from residency.machine.model import Device
    from residency.rules import Facts


def card_sums(facts: Facts) -> tuple[PoolSum, ...]:
    """Return the sums of the pools that belong to accelerators the launch puts weights on, in the machine's order."""
    pools = {d.pool for d in facts.machine.accelerators}
    return tuple(
        found for found in facts.budget.sums(facts.machine)
        if found.pool.name in pools and any(a.purpose in (Purpose.WEIGHTS, Purpose.EXPERTS) and a.certain_bytes for a in found.allocations)
    )  # fmt: skip


def device_of(facts: Facts, pool: str) -> Device | None:
    """Return the device that draws from a pool."""
    return next((d for d in facts.machine.accelerators if d.pool == pool), None)


@dataclass(frozen=True, kw_only=True)
class AfterCache:
    """One card whose cache takes what is left: what must live in its reserve."""

    found: PoolSum
    cache: Allocation
    reserve_bytes: int
    late: tuple[Allocation, ...]  # after the cache, and not budgeted by the engine
    outside: tuple[Allocation, ...]  # of other processes, before the engine measures anything

    def late_bytes(self, number: str) -> int:
        """Return the late allocations' "certain", "likely" or "at_most" bytes."""
        return sum(getattr(a, f"{number}_bytes") for a in self.late)


def after_cache(facts: Facts) -> tuple[AfterCache, ...]:
    """Return every card with a greedy cache, in the machine's order."""
    reserves = facts.budget.facts.get("reserve_bytes")
    rows = []
    for found in facts.budget.sums(facts.machine):
        place = next((i for i, a in enumerate(found.allocations) if a.greedy), None)
        if place is None:
            continue
        cache = found.allocations[place]
        late = tuple(a for a in found.allocations[place + 1 :] if not a.accounted and a.purpose is not Purpose.RESERVE)
        kept = found.reserve_bytes + sum(a.likely_bytes for a in late)
        reserve = reserves.get(found.pool.name, kept) if isinstance(reserves, dict) else kept
        outside = tuple(a for a in found.allocations[:place] if not a.accounted)
        rows.append(AfterCache(found=found, cache=cache, reserve_bytes=reserve, late=late, outside=outside))
    return tuple(rows)


def listed(rows: tuple[Allocation, ...], number: str = "at_most") -> str:
    """Return "verify window 96 MiB and draft head 133 MiB"."""
    texts = [f"{a.name} {size(getattr(a, f'{number}_bytes'))}" for a in rows if getattr(a, f"{number}_bytes")]
    return " and ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else "".join(texts)
