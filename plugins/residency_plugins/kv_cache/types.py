"""The KV cache types can be had together.

What: the element types asked for keys and values exist in the engine, fit the model's head size, and
are allowed with each other and with the attention kernel chosen.

Why: a quantised value cache needs flash attention; a latent-attention model keeps one tensor and so
one type; a block of 32 must divide the head size. Engines find out after the weights are loaded.

Fix: take one of the pairs offered, or leave flash attention on automatic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from residency.rules import Finding, Rule
from residency.text import sentence

if TYPE_CHECKING:
    from residency.rules import Facts

rule = Rule(id="kv-cache/types")


@rule.check
def check(facts: Facts) -> list[Finding] | Finding:
    """Pass on what the engine's model remarked about the cache."""
    found = [
        rule.veto(sentence(remark.message), knob=remark.knob, missing=remark.capability, ways=remark.ways)
        for remark in facts.budget.remarks
        if (remark.knob or "").startswith("kv.") and remark.kind in ("impossible", "conflict", "fails-late")
    ]
    if found:
        return found
    key, value = facts.launch.get("kv.key_type"), facts.launch.get("kv.value_type")
    return rule.approve(f"keys {key or 'default'}, values {value or 'default'}")
