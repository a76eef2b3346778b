"""The largest image fits.

What: an image of the most tokens allowed fits the context, and the encoder's buffers for it fit the pool.

Why: buffers are reserved for a warm-up image that is smaller than the largest one. A larger image grows
them while requests run, on a card that was filled to fit at start
(https://github.com/ggml-org/llama.cpp/issues/22592). And an image of more tokens than the context holds is
refused each time it is sent.

Fix: allow fewer tokens per image, give the context more, or put the encoder on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule, Way
from residency.units import size

from . import tower

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="vision/largest-image")


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Compare the largest image with the context and with the pool."""
    if facts.launch.get("vision.enabled") is False or not (tower.wanted(facts) or facts.models.mmproj is not None):
        return rule.not_applicable("the launch does not ask for vision")
    findings: list[Finding] = []
    tokens, context = facts.launch.get("vision.max_tokens"), facts.budget.facts.get("context")
    if isinstance(tokens, int) and isinstance(context, int) and 0 < context < tokens:
        finding = rule.veto if tower.wanted(facts) else rule.warn
        findings.append(
            finding(
                f"One image may take {tokens} tokens, and the whole context is {context}.", knob="vision.max_tokens",
                ways=(Way(knob="vision.max_tokens", value=max(1, context // 2)),),
            )
        )
    sums = {s.pool.name: s for s in facts.budget.sums(facts.machine)}
    for allocation in tower.allocations(facts):
        found = sums[allocation.pool]
        usable = found.usable_bytes
        growth = allocation.at_most_bytes - allocation.likely_bytes
        held = found.likely_bytes - found.reserve_bytes
        if usable is not None and growth and held <= usable < held + growth:
            findings.append(
                rule.warn(
                    f"{allocation.device or allocation.pool}: the largest image allowed grows the encoder by {size(growth)} while requests run, and "
                    f"{size(usable - held)} is left.", pool=allocation.pool, need_bytes=held + growth, have_bytes=usable,
                    knob="vision.max_tokens",
                )
            )
    return findings or rule.approve("the largest image fits")
