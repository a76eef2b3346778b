"""No card is still held by somebody else.

What: when a card is far from empty before the launch, what is free is compared with what the launch certainly
needs; a launch that would fit the empty card and not this one is refused, and whoever holds the memory is
named as far as the machine tells.

Why: a killed engine keeps its memory for 10 to 40 seconds while its pinned pages are released, and on shared
memory until its last process is gone; the next start then fails at its first large allocation
(https://github.com/Niko1221/Strata/issues/486 shows the message). It looks like a model that is too large, and
is not: a smaller context does not help.

Fix: end the process that holds the memory, wait until the card reads idle, and start again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule
from residency.units import size

from .cards import card_sums

if TYPE_CHECKING:
    from residency.budget import PoolSum
    from residency.rules import Facts

rule = Rule(id="layer-split/stale-tenant")

NOTABLE = 1 / 4  # of a card held by others


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Compare free with total on every card of the launch."""
    sums = card_sums(facts)
    if not sums:
        return rule.not_applicable("no weights on a card")
    findings = []
    for found in sums:
        total, free = found.pool.total_bytes, found.pool.free_bytes
        if total is None or free is None:
            continue
        held = total - free
        usable = found.usable_bytes or 0
        empty = min(total, found.pool.ceiling_bytes or total) - found.pool.reserved_bytes
        if usable < found.certain_bytes <= empty and held > total * NOTABLE:
            findings.append(
                rule.veto(
                    f"{found.pool.name}: {size(held)} of {size(total)} are held before the launch{_who(found, facts)}; {size(usable)} are free and the launch needs "
                    f"{size(found.certain_bytes)} for certain. It would fit the empty card, so this is not a question of model or context: an earlier run that has not "
                    f"let go yet is the usual reason. {_first(found)}",
                    pool=found.pool.name, need_bytes=found.certain_bytes, have_bytes=usable,
                )
            )  # fmt: skip
        elif held > total * NOTABLE and (found.pool.name != facts.machine.host_pool.name or _who(found, facts)):  # the system itself lives in shared memory
            findings.append(
                rule.warn(f"{found.pool.name}: {size(held)} of {size(total)} are held before the launch{_who(found, facts)}.", pool=found.pool.name, have_bytes=usable)
            )
    return findings or rule.approve("the cards are empty, or how full they are is unknown")


def _who(found: PoolSum, facts: Facts) -> str:
    names = [tenant for d in facts.machine.accelerators if d.pool == found.pool.name for tenant in d.tenants]
    return f" by {', '.join(names)}" if names else ""


def _first(found: PoolSum) -> str:
    largest = max((a for a in found.allocations if a.pieces == 1), key=lambda a: a.certain_bytes, default=found.allocations[0])
    return f"The first large allocation, {largest.name} of {largest.certain_bytes} bytes, is where it fails."
