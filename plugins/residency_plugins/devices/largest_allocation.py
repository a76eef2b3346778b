"""No single allocation is larger than the driver makes.

What: the largest piece of every group of allocations is compared with the largest single allocation of its device,
where that is known.

Why: a driver may refuse one large buffer while most of the memory is free. Under Vulkan an allocation above
``maxMemoryAllocationSize``, often 4 GiB, failed with 16 of 32 GiB free; a context one percent smaller ran, twice at
the same time (https://github.com/ggml-org/llama.cpp/issues/11598).

Fix: a smaller context or micro-batch, flash attention, or a back end without the limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.budget import Purpose
from residency.rules import Finding, Rule, Way
from residency.units import size

if TYPE_CHECKING:
    from residency.budget import Allocation
    from residency.rules import Facts

rule = Rule(id="devices/largest-allocation")


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Compare every device's largest piece with its limit."""
    limits = {d.name: d.largest_allocation_bytes for d in facts.machine.accelerators if d.largest_allocation_bytes is not None}
    if not limits:
        return rule.not_applicable("no limit on a single allocation is known")
    findings = []
    for row in facts.budget.ordered:
        limit = limits.get(row.device or "")
        if limit is not None and (row.largest_bytes or 0) > limit:
            findings.append(_refusal(row, limit, facts))
    return findings or rule.approve("every single allocation is small enough")


def _refusal(row: Allocation, limit: int, facts: Facts) -> Finding:
    ways = facts.budget.ways
    if row.purpose is Purpose.COMPUTE:
        ways = (Way(knob="context.flash_attention", value="on"), *ways)
    return rule.veto(
        f"{row.device}: {row.name} is one allocation of {size(row.largest_bytes)}, and the driver makes none above {size(limit)}, "
        f"however much is free.",
        pool=row.pool, need_bytes=row.largest_bytes, have_bytes=limit, knob=row.knob, largest_name=row.largest_name or row.name,
        largest_bytes=row.largest_bytes, ways=ways,
    )  # fmt: skip
