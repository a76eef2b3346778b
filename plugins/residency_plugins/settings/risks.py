"""Known dangers of settings that work.

What: settings that run, but with a danger that has bitten somebody, or whose correctness is not
established in this version.

Why: a launch is not only bytes. An experts-on-CPU layout under a row split runs at a seventh of the
speed and then crashes; a path whose parity test fails answers, but not what the model says.

Fix: the message names the danger and the safer setting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule
from residency.text import sentence

from .claims import unclaimed

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="settings/risks", severity="warn")


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Pass on what the engine's model calls risky or unverified."""
    found = [
        rule.warn(
            f"{'Unverified: ' if remark.kind == 'unverified' else ''}{sentence(remark.message)}",
            knob=remark.knob, value=remark.value, pool=remark.pool, missing=remark.capability, ways=remark.ways,
        )
        for remark in facts.budget.remarks
        if remark.kind in ("risk", "unverified") and unclaimed(remark)
    ]  # fmt: skip
    return found or rule.approve("no known danger")
