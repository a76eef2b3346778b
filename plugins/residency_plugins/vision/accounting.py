"""Memory of an encoder that the engine does not count is counted all the same.

What: an encoder that lives outside the engine's own accounting (a process of its own, or a library the
engine does not ask) fits the card it lands on, beside everything the engine takes there.

Why: the engine fills a card to the last MiB of what it thinks is free, and the encoder needs its gigabyte
before that or after it. Two cards went down this way with vision on
(https://github.com/Niko1221/Strata/issues/486); a fit that leaves the projector out is
https://github.com/ggml-org/llama.cpp/issues/22592.

Fix: put the encoder on the CPU or on the emptier card, or keep a reserve as large as the encoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule, Way
from residency.units import size

from . import tower

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="vision/accounting")


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Compare unaccounted vision memory with what is left of its pool."""
    outside = [a for a in tower.allocations(facts) if not a.accounted]
    if not outside:
        return rule.not_applicable("no encoder memory outside the engine's accounting")
    findings: list[Finding] = []
    sums = {s.pool.name: s for s in facts.budget.sums(facts.machine)}
    for allocation in outside:
        found = sums[allocation.pool]
        usable = found.usable_bytes
        if usable is None:
            continue
        rest = found.likely_bytes - allocation.likely_bytes
        where = allocation.device or allocation.pool
        limit = max(0, usable - max(0, facts.policy.margin_of(found.pool.name, found.pool.total_bytes or 0) - found.reserve_bytes))
        if found.likely_bytes > limit >= rest:
            findings.append(
                rule.veto(
                    f"{where}: the image encoder takes {size(allocation.likely_bytes)} that the engine does not count. With it the launch needs "
                    f"{size(found.likely_bytes)} of {size(limit)}; without it, {size(rest)}.",
                    pool=allocation.pool, need_bytes=found.likely_bytes, have_bytes=limit, knob="vision.device",
                    ways=(Way(knob="vision.device", value="cpu", note="slower images"), Way(knob="vision.enabled", value=False, note="text only"),
                          *facts.budget.ways),
                )
            )
    return findings or rule.approve(f"{size(sum(a.likely_bytes for a in outside))} outside the engine's accounting fit")
